"""The command line: a table of all commands, each imported when it is called, and `main`, which runs one."""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

import napkin
from napkin.cli.commands import Command, Form, Forms, Group
from napkin.errors import NapkinError, is_out_of_memory

TOKENIZER = Group(
    "napkin tokenizer",
    {
        "train": Command(
            "train a tokenizer: byte-level BPE, words, characters or bytes", "tokenizer.making:train_command"
        ),
        "encode": Command("encode text into token files", "tokenizer.making:encode_command"),
        "compare": Command("show how each kind of tokenizer encodes a text", "tokenizer.showing:compare_command"),
        "show": Command(
            "inspect a tokenizer: longest tokens, merges, how a word is built up", "tokenizer.showing:show_command"
        ),
        "import": Command(
            "read a BPE vocabulary of Hugging Face, tiktoken or GPT-2", "tokenizer.exchange:import_command"
        ),
        "export": Command("write a BPE tokenizer for one of these", "tokenizer.exchange:export_command"),
    },
)


def _chooses_plan(choice: str, arguments: Sequence[str]) -> bool:
    """--within is the time of a plan by rule, unless a recipe is to be trained in it."""
    names_recipe = not arguments[0].startswith("-") or any(
        each.startswith(("--preset", "--model.", "--layout", "--for")) for each in arguments
    )
    return choice != "--within" or not names_recipe


PLAN = Forms(
    "plan",
    Command("plan a training run by counting its step", "plan.recipe:plan_command"),
    {
        "rule": Form(
            Command("plan by rules of thumb, without a recipe", "plan.rule"),
            ("--params", "--active-params", "--tokens-per-second", "--within"),
        ),
        "layouts": Form(Command("search the layouts of several devices", "plan.layouts")),
        "service": Form(Command("plan a service", "plan.service"), ("--serve",), is_name=True),
        "program": Form(
            Command("plan a program of your own, on each rank", "plan.program"), ("--program",), is_name=True
        ),
    },
    _chooses_plan,
)
TUNE = Group(
    "napkin tune",
    {
        "sft": Command("fine-tune a model on conversations: all weights, or adapters", "tune:sft_command"),
        "demo": Command(
            "an arithmetic model from scratch: taught by a careless teacher, then by rewards",
            "demo:tuning_demo_command",
        ),
        "distill": Command(
            "learn a teacher's distributions of tokens, of conversations or of a text", "tune:distill_command"
        ),
        "teach": Command("write a teacher's likeliest tokens, for runs of distill", "tune:teach_command"),
        "rl": Command("reinforcement learning: a model learns from rewards of its own answers", "tune:rl_command"),
        "preference": Command("learn from pairs of answers: DPO, IPO, KTO, ORPO, SimPO", "tune:preference_command"),
        "reward-model": Command(
            "learn which of two answers is better, as a number for each", "tune:reward_model_command"
        ),
    },
)
EVALUATE = Forms(
    "evaluate",
    Command("predict all validation tokens of a run", "evaluate.text:evaluate_tokens"),
    {
        "text": Form(
            Command("estimate bits per byte from a sample of a text", "evaluate.text:evaluate_text"),
            ("--text", "--stride", "--error", "--max-tokens"),
        ),
        "task": Form(Command("put the questions of a task to a model", "evaluate.tasks:evaluate_task"), ("--task",)),
        "programs": Form(
            Command("run sampled programs against tests, and estimate pass@k", "evaluate.programs:evaluate_programs"),
            ("--problems", "--completions"),
        ),
        "ngrams": Form(
            Command("bits per byte of n-gram models, a baseline", "evaluate.ngrams:evaluate_ngrams"), ("--train",)
        ),
        "votes": Form(
            Command("rate models by votes between pairs of answers", "evaluate.votes:votes_command"),
            ("--bootstrap", "--models"),
        ),
        "judge": Form(
            Command("let a model judge the answers of two others", "evaluate.votes:judge_command"), ("--answers",)
        ),
        "compare": Form(
            Command("compare two results item by item", "evaluate.compare:compare_command"),
            ("--compare",),
            is_name=True,
        ),
    },
)
LAW_FIT = Forms(
    "law fit",
    Command("fit a law to all runs", "scale.law:fit_all"),
    {
        "sizes": Form(
            Command("fit power laws to the best sizes (approaches 1 and 2)", "scale.law:fit_sizes"),
            ("--approach=1", "--approach=2"),
        ),
        "repetitions": Form(
            Command("say what repeated tokens are worth", "scale.law:fit_repetitions"), ("--law=data-constrained",)
        ),
    },
)
LAW = Group(
    "napkin law",
    {
        "fit": Command("fit a scaling law to runs, and say how far it can be trusted", LAW_FIT),
        "predict": Command(
            "predict a loss, or the best size and tokens for some FLOPs, with intervals", "scale.law:predict"
        ),
        "compare": Command(
            "say which law holds: fit on the smaller runs, predict the larger ones", "scale.law:compare"
        ),
    },
)
BENCH = Forms(
    "bench",
    Command("time an operator in its forms", "measure.bench:bench_operator"),
    {
        # The names are repeated here, because importing what they name would import torch.
        "module": Form(
            Command("time a part of a model", "measure.bench:bench_module"),
            ("transformer", "block", "self-attention", "mlp"),
        ),
        "collective": Form(
            Command("time a collective among ranks", "measure.bench:bench_collective"),
            ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
        ),
    },
)

PROFILE = Forms(
    "profile",
    Command("say where the seconds of a step go", "measure.profile"),
    {"memory": Form(Command("show a memory snapshot", "measure.profile:memory_command"))},
)

NOTES = Group(
    "napkin notes",
    {"check": Command("compare the figures of lecture notes or a paper with what they should be", "plan.notes")},
)

GROUPS: dict[str, dict[str, Command]] = {
    "begin": {
        "demo": Command("train a model on Python's own library, and account for it", "demo:demo_command"),
        "speedrun": Command(
            "raw pages to a model to talk with, planned and metered", "speedrun.command:speedrun_command"
        ),
        "doctor": Command("say what this machine has and lacks, and what is broken", "measure.machine:doctor_command"),
        "calibrate": Command(
            "measure this machine's products, bandwidth and overhead", "measure.machine:calibrate_command"
        ),
        "mcp": Command("serve plans, counts and runs to programs, over MCP", "mcp"),
        "completion": Command("print a script that completes commands in bash, zsh or fish", "completion"),
    },
    "text": {
        "tokenizer": Command("train, compare, show, import or export one; encode text", TOKENIZER),
        "data": Command("make a corpus of raw pages and files, by pipelines of stages", "data"),
        "contamination": Command("find the items of a task that are in a training text", "evaluate.contamination"),
    },
    "plan, before anything runs": {
        "recipe": Command("print a recipe, the TOML file that says all that a run does", "plan.recipe:print_command"),
        "plan": Command("say what a run will take: parameters, FLOPs, bytes, seconds", PLAN),
        "fit": Command("say how large a model some accelerators can train", "plan.budget:fit_command"),
        "count": Command("trace a training step: FLOPs, bytes by operator or module", "plan.recipe:count_command"),
        "rehearse": Command("run a training script without a GPU, and plan its step", "plan.rehearse"),
        "diff": Command("what a change does to a step: FLOPs, bytes, seconds, exactly", "plan.diff"),
        "check": Command("find out if a program's gradient depends on its arrangement", "plan.check"),
        "budget": Command("say what FLOPs, days or dollars buy, by a fitted law", "plan.budget:budget_command"),
        "stacks": Command("print the stacks that plans are made for, or calibrate one", "plan.stacks:stacks_command"),
        "hardware": Command("print the catalogue of accelerators, or all about one", "plan.catalogue:hardware_command"),
        "formats": Command("print the number formats, or a number rounded to each", "plan.catalogue:formats_command"),
        "notes": Command("check the figures that lecture notes or a paper state", NOTES),
    },
    "train": {
        "train": Command("plan, train, meter and reconcile a run", "train.train:train_command"),
        "resume": Command("continue a run from its newest intact checkpoint", "train.train:resume_command"),
        "launch": Command("print or submit a job's script for Slurm or Kubernetes", "train.launch"),
        "tune": Command("learn from conversations, preferences, or rewards of answers", TUNE),
        "runs": Command("list runs, and compare their losses over steps or dollars", "train.runs:runs_command"),
        "report": Command("write a run's report.html", "train.runs:report_command"),
        "studio": Command("pages in a browser, to plan and to watch runs", "studio"),
    },
    "use a model": {
        "generate": Command("let a trained model continue a text", "models.generate:generate_command"),
        "chat": Command("talk with a model in the terminal", "models.generate:chat_command"),
        "serve": Command("serve a model over HTTP, with OpenAI's interface and a page", "models.serve:serve_command"),
        "evaluate": Command("bits per byte beside gzip and xz; tasks; two models compared", EVALUATE),
        "quantize": Command("write a run's model with weights of 8 or 4 bits", "models.export:quantize_command"),
        "prune": Command("remove the heads, units and layers that matter least", "models.prune:prune_command"),
        "export": Command("write a model and its tokenizer as a Hugging Face folder", "models.export:export_command"),
    },
    "scale": {
        "sweep": Command("train a grid, a list or a sample of runs, and name the best", "scale.sweep"),
        "ladder": Command("recipes of growing runs whose law predicts a larger one", "scale.ladder"),
        "law": Command("fit scaling laws to runs, predict losses and best sizes", LAW),
        "mup": Command("whether a learning rate of a small width holds at larger ones", "scale.mup"),
    },
    "measure": {
        "profile": Command("where the seconds of a step go; memory snapshots", PROFILE),
        "bench": Command("time operators, modules, collectives, beside their limits", BENCH),
        "bench-serve": Command("send a load to a server: what its requests see", "models.serve:bench_serve_command"),
        "autotune": Command(
            "choose the tiles of a recipe's GPU kernels by timing them", "measure.machine:autotune_command"
        ),
    },
}
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}
ALL = Group("napkin", COMMANDS)

# GNU's OpenMP lets waiting threads spin for a long time. Beside another busy program they occupy the core that they are
# waiting for; sleeping sooner costs nothing on an idle machine (benchmarks/waiting_threads.py).
WAITING = {"GOMP_SPINCOUNT": "5000"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 wrong input, 128 + n stopped by signal n."""
    is_program = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else "--help"
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read once, when torch is loaded, which has not happened yet.
        for name, value in WAITING.items():
            os.environ.setdefault(name, value)
    for stream in (sys.stdout, sys.stderr):
        # A "·" that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with warnings.catch_warnings(), _collecting_later():
        warnings.showwarning = lambda message, *_, **__: _notify(command, f"warning: {message}")
        try:
            status = _run(command, arguments[1:])
            # Flushed here, not at the interpreter's exit, where a full or closed output would print a traceback.
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output has closed it, as `head` does.
            _discard_output()
            status = 141
        except OSError as error:
            _discard_output()
            reason = f"the output cannot be written ({error.strerror}): make room, or redirect it to another place"
            status = _fail(command, reason)
    if "RANK" in os.environ:
        # A gloo thread that is still releasing its last tensor aborts an interpreter that is shutting down, and
        # torchrun would restart a finished job (pytorch/pytorch#179291).
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status)
    if is_program and not (sys.flags.interactive or sys.getprofile() or sys.gettrace()):
        _leave(status)
    return status


def _leave(status: int) -> NoReturn:
    """End the program as the interpreter would, but without freeing all of torch's objects one by one and without
    searching them for cycles, which takes half a second."""
    try:
        # As multiprocessing ends its processes. Files that are still to be removed are, and threads are waited for.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


FIRST_COLLECTION = 700_000
"""Objects before the garbage collector looks for cycles: those of torch and of a plan are about 600,000."""


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Put off the garbage collector while modules are loaded, since their objects are never garbage: that saves a fifth
    of the time of a start. It runs as usual once this many objects exist.
    """
    usual = gc.get_threshold()
    if usual[0] == FIRST_COLLECTION:
        # Called by another command, which has put it off already.
        yield
        return

    def as_usual(*_: object) -> None:
        # A collection may begin between any two lines, in any thread, and come here too.
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(as_usual)
        gc.set_threshold(*usual)

    gc.callbacks.append(as_usual)
    gc.set_threshold(FIRST_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        as_usual()


def _discard_output() -> None:
    from napkin.cli.common.terminal import discard

    discard(sys.stdout)


def _run(command: str, rest: Sequence[str]) -> int:
    try:
        for argument in (command, *rest):
            _require_utf8(argument)
        if command in ("-h", "--help", "help"):
            print(_help())
            return 0
        if command in ("-V", "--version"):
            print(f"napkin {napkin.__version__}")
            return 0
        from napkin.cli.late_dynamo import load_late
        from napkin.data.lost_pages import leaving_on_lost_pages

        load_late()

        with leaving_on_lost_pages():
            return ALL.run(command, rest)
    except SystemExit as leaving:
        # `--help` of a command exits.
        return leaving.code if isinstance(leaving.code, int) else 0
    except NapkinError as error:
        return _fail(command, str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(
            command, f"'{error.filename}' cannot be used ({error.strerror}): choose another, or make it accessible"
        )
    except RecursionError:
        return _fail(command, "a file is nested too deeply to be read: restore it as napkin wrote it")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(command, "this machine ran out of memory: `napkin plan` says what a run needs")
    except KeyboardInterrupt:
        return _fail(command, "interrupted", status=130)


def _require_utf8(argument: str) -> None:
    if "\0" in argument:
        # A NUL, which no shell can pass but a caller of `main` can; no system has such a path.
        raise NapkinError(f"argument {argument[:100]!r} contains a NUL character: leave it out")
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise NapkinError(
            f"argument {argument!r} is not UTF-8 at character {error.start}: rename the file, or convert the text"
        ) from None


def _fail(command: str, reason: str, status: int = 2) -> int:
    _notify(command, reason)
    return status


def _notify(command: str, message: str) -> None:
    from napkin.cli.common.terminal import notify

    notify(f"{command if command in COMMANDS else 'napkin'}: {message}")


def _help() -> str:
    listed, *_ = ALL.usage()
    about = "napkin trains language models and accounts for every byte, FLOP and dollar."
    width = max(map(len, COMMANDS))
    groups = [
        line
        for title, commands in GROUPS.items()
        for line in ("", f"{title}:", *(f"  {name:<{width}}  {command.about}" for name, command in commands.items()))
    ]
    more = "`napkin COMMAND --help` tells more. TEXT is a file, a folder, or stdlib: for\nPython's own library."
    return "\n".join([listed, "", about, *groups, "", more])
