"""`napkin chat`."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import INLINED, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, out, print_verbatim, say
from napkin.errors import NapkinError
from napkin.inference.settings import Sampling

if TYPE_CHECKING:
    from napkin.inference.conversation import Conversation


@dataclass(frozen=True)
class ChatOptions:
    """Talk with a model in the terminal. /new begins again, /quit ends; Ctrl-C stops an answer."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN-or-FOLDER")]
    """A run, or a Hugging Face folder."""
    system: str | None = None
    """What the model is told before the conversation."""
    tokens: int = 512
    """Maximum number of tokens of an answer."""
    sampling: Annotated[Sampling, INLINED] = field(default_factory=Sampling)


@command("chat", ChatOptions)
def main(options: ChatOptions) -> None:
    if options.tokens < 1:
        raise NapkinError(f"--tokens is {options.tokens}: use 1 or more")
    with progress_line("opening the model"):
        from napkin.inference.conversation import Conversation
        from napkin.inference.loaded_model import load

        opened = load(options.model, weights="auto", on_message=notify)
        conversation = Conversation(opened, system=options.system)
    if not opened.has_chat_template:
        notify(f"{opened.name} has no chat template: it continues lines that begin with user: and assistant:")
    if out.is_terminal:
        say("/new begins again, /quit or Ctrl-D ends; Ctrl-C stops an answer", style="dim")
    converse(conversation, options.sampling, options.tokens)


def converse(conversation: "Conversation", sampling: Sampling, max_new_tokens: int) -> None:
    """Read messages and print answers, until the messages end or one is /quit; each answer has the next seed."""
    for number, text in enumerate(_messages()):
        if text == "/quit":
            return
        if text == "/new":
            conversation.forget()
            continue
        seed = replace(sampling, seed=sampling.seed + number)
        try:
            with _interrupt_stops(conversation):
                for piece in conversation.answer(text, seed, max_new_tokens=max_new_tokens):
                    print_verbatim(piece, end="")
        except NapkinError as error:
            notify(f"chat: {error}")
            continue
        print_verbatim("")
        sys.stdout.flush()
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
