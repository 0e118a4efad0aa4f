"""`napkin generate` lets a model continue texts, `napkin chat` is a conversation with one."""

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from napkin.cli.common.files import renew_report
from napkin.cli.common.options import INLINED, RunOptions, Switch, command, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, out, print_json, print_verbatim, say
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.inference.settings import Sampling, Speculation
from napkin.runs.run_folder import is_run

if TYPE_CHECKING:
    from napkin.chats.chat_format import Message
    from napkin.environments.tools import Call, Tool
    from napkin.inference.conversation import Conversation


@dataclass(frozen=True)
class GenerateOptions(RunOptions):
    """Let a trained model continue a text: that of a run, or of a Hugging Face folder."""

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT ...]")] = ()
    """Texts to continue. None, or an empty one, begins a new document."""
    prompts: tuple[str, ...] = ()
    """More texts to continue. Write --prompts=-TEXT for one that begins with -"""
    tokens: int = 120
    """Maximum number of tokens of a completion, which ends earlier where the model ends the document."""
    sampling: Annotated[Sampling, INLINED] = field(default_factory=Sampling)
    speculation: Annotated[Speculation, INLINED] = field(default_factory=Speculation)
    kv: Literal["auto", "int8"] = "auto"
    """Number format of keys and values. auto: the format of the weights, in a cache for this text alone, which drops
    the oldest tokens when the text outgrows the model's context. int8: about half the bytes of bf16, in the block pool
    that `napkin serve` uses, which drops nothing: prompt and new tokens must fit the context, and --draft and --lookup
    cannot be used."""
    save: Switch = False
    """Write the completions to the run's samples.txt, and show them in its report."""


@takes(GenerateOptions)
def generate_command(arguments: Sequence[str]) -> None:
    """Print completions."""
    options = parse(GenerateOptions, "generate", arguments)
    if "--prompts" in arguments and not options.prompts:
        raise NapkinError('--prompts names no text: give one, or --prompts "" for a new document')
    if options.tokens < 1:
        raise NapkinError(f"--tokens is {options.tokens}: use 1 or more")
    prompts = (*options.texts, *options.prompts) or ("",)
    samples = Path(options.run) / "samples.txt"
    if options.save:
        if (Path(options.run) / "config.json").exists() and not is_run(Path(options.run)):
            raise NapkinError(f"'{options.run}' is not a run: completions are saved in runs, leave --save out")
        refuse_unmarked(samples, b"=== 1 (seed ", "what `napkin generate --save` wrote")
    with progress_line("opening the run"):
        from napkin.inference.loaded_model import load
        from napkin.inference.speculation import SpeculationMeter

        model = load(options.run, on_message=notify)
        _ = model.model  # The weights are read while the line shows.
        proposer = model.proposer(options.speculation)
    completions, texts, draws = [], [], []
    meter = SpeculationMeter()
    for number, prompt in enumerate(prompts):
        seed = options.sampling.seed + number
        beginning = f"=== {number + 1} (seed {seed})\n{prompt}"
        draws.append([])
        pieces = model.stream(
            prompt,
            max_new_tokens=options.tokens,
            sampling=options.sampling,
            seed=seed,
            on_draw=draws[-1].append,
            proposer=proposer,
            proposed=options.speculation.proposed,
            meter=meter,
            kv=options.kv,
        )
        made = []
        # What must be compiled for the first token is told before the prompt, not in its line.
        first = next(pieces, "")
        if not options.json:
            print_verbatim(beginning, end="")
        for piece in itertools.chain([first], pieces):
            made.append(piece)
            if not options.json:
                print_verbatim(piece, end="")
        if not options.json:
            print_verbatim("\n")
        completions.append("".join(made))
        texts.append(f"{beginning}{completions[-1]}\n")
    if options.save:
        atomic_write_text(samples, "\n".join(texts), overwrite=True)
    if options.json:
        print_json(
            [
                {"prompt": p, "completion": c, **({} if options.sampling.logprobs is None else {"tokens": drawn})}
                for p, c, drawn in zip(prompts, completions, draws, strict=True)
            ]
        )
    if proposer is not None:
        notify(f"speculation: {meter}")
    if options.save:
        renew_report(Path(options.run))


@dataclass(frozen=True)
class ChatOptions:
    """Talk with a model in the terminal. /new begins again, /quit ends; Ctrl-C stops an answer."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN-or-FOLDER")]
    """A run, or a Hugging Face folder."""
    system: str | None = None
    """System message before the conversation."""
    tools: str = ""
    """Programs that the model may call: python, calculator, or both with a comma."""
    tokens: int = 512
    """Maximum number of tokens of an answer."""
    sampling: Annotated[Sampling, INLINED] = field(default_factory=Sampling)


@command("chat", ChatOptions)
def chat_command(options: ChatOptions) -> None:
    if options.tokens < 1:
        raise NapkinError(f"--tokens is {options.tokens}: use 1 or more")
    with progress_line("opening the model"):
        from napkin.inference.conversation import Conversation
        from napkin.inference.loaded_model import load

        tools = chosen_tools(options.tools)
        opened = load(options.model, weights="auto", on_message=notify)
        conversation = Conversation(opened, system=options.system, tools=[] if tools is None else tools.schemas)
    if not opened.has_chat_template:
        notify(f"{opened.name} has no chat template: it continues lines that begin with user: and assistant:")
    if out.is_terminal:
        say("/new begins again, /quit or Ctrl-D ends; Ctrl-C stops an answer", style="dim")
    converse(conversation, options.sampling, options.tokens, tools)


@dataclass(frozen=True)
class ChatTools:
    """Tools that the model of a chat may call, as `napkin.environments.tools` has them."""

    tools: "Sequence[Tool]"
    schemas: list[dict[str, Any]]

    def run(self, calls: "Sequence[Call]") -> "list[Message]":
        """Run calls, and print a line for each. Raises NapkinError where a call gives no output."""
        from napkin.environments.tools import messages_of

        said: list[Message] = []
        for call in calls:
            if call.tool is not None:
                notify(f"chat: runs {call.tool.name} in the sandbox: {' '.join(call.text.split())[:MOST_SHOWN]}")
            said += messages_of([call])
            notify(f"chat: {'the call' if call.tool is None else call.tool.name} says: {said[-1].content}")
        return said


MOST_SHOWN = 200
"""Characters of a program that are shown."""


def chosen_tools(names: str) -> ChatTools | None:
    """The tools of these names with bounded seconds and bytes; None without a name."""
    if not names:
        return None
    from napkin.environments.tools import tool_schemas, tools_named

    tools = tools_named(names)
    return ChatTools(tools, tool_schemas(tools))


def converse(
    conversation: "Conversation", sampling: Sampling, max_new_tokens: int, tools: ChatTools | None = None
) -> None:
    """Read messages and print answers, until the messages end or one is /quit; each answer has the next seed.

    An answer that calls tools is followed by what they say and the next turn of the model.
    """
    from napkin.chats.chat_format import Message
    from napkin.environments.tools import MOST_CALLS, calls_in

    for number, text in enumerate(_messages()):
        if text == "/quit":
            return
        if text == "/new":
            conversation.forget()
            continue
        seed = replace(sampling, seed=sampling.seed + number)
        said, calls_left = [Message("user", text)], MOST_CALLS
        try:
            with _interrupt_stops(conversation):
                while said:
                    for piece in conversation.answer_to(said, seed, max_new_tokens=max_new_tokens):
                        print_verbatim(piece, end="")
                    print_verbatim("")
                    sys.stdout.flush()
                    if tools is None or conversation.was_stopped:
                        break
                    calls = calls_in(conversation.messages[-1].content, tools.tools)[:calls_left]
                    calls_left -= len(calls)
                    said = tools.run(calls)
                    # Ctrl-C while programs ran ends the answer too.
                    if conversation.was_stopped:
                        break
        except NapkinError as error:
            notify(f"chat: {error}")
            continue
        if conversation.n_left_out:
            notify(f"chat: the oldest {conversation.n_left_out} messages no longer fit the model's context")


def _messages() -> Iterator[str]:
    """Lines that are not empty. On a terminal they are asked for and can be edited."""
    asked = "> " if sys.stdin.isatty() and out.is_terminal else ""
    if asked:
        with contextlib.suppress(ImportError):
            # `input` then has a history and arrow keys.
            import readline  # noqa: F401
    while True:
        try:
            line = input(asked).strip()
        except EOFError:
            if asked:
                say()
            return
        except UnicodeDecodeError:
            notify("chat: the line is not UTF-8: write it again")
            continue
        except KeyboardInterrupt:
            if not asked:
                raise
            say()
            say("/quit ends the conversation", style="dim")
            continue
        if line:
            yield line


@contextlib.contextmanager
def _interrupt_stops(conversation: "Conversation") -> Iterator[None]:
    """While an answer is made, Ctrl-C ends the answer: the engine is never left in the middle of a step."""
    before = signal.signal(signal.SIGINT, lambda *_: conversation.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
