"""The command line: one file per command, imported when it is called."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

import napkin
from napkin.cli.commands import run_command, usage
from napkin.errors import NapkinError, is_out_of_memory

COMMANDS = {
    "demo": "train a language model on Python's own library, and account for it, in five minutes",
    "tokenizer": "train, compare, show, import or export a tokenizer; encode text into token files",
    "data": "make a corpus of raw pages and files: pipelines of stages, resumable to the byte; tell a document's story",
    "recipe": "print a recipe, the TOML file that says everything a run does",
    "plan": "say what a run will take before it starts: parameters, FLOPs, bytes, seconds",
    "fit": "say how large a model some accelerators can train, by rule and by count",
    "count": "trace a training step: FLOPs and bytes by operator, module or phase",
    "profile": "where the seconds of a training step go, operator by operator, beside the plan",
    "train": "plan, train, meter and reconcile a run",
    "sweep": "train a grid, a list or a random sample of runs, and name the best",
    "ladder": "recipes of growing runs within a budget, whose law predicts a larger one",
    "mup": "whether a learning rate found at a small width holds at larger ones",
    "budget": "say what FLOPs, days or dollars buy by a fitted law: size, tokens, loss",
    "resume": "continue a run from its newest intact checkpoint",
    "launch": "print or submit the script with which Slurm or Kubernetes trains a run on several nodes",
    "evaluate": "bits per byte on held-out text, beside gzip and xz; scores of tasks, and two models compared",
    "contamination": "say which items of a task stand in a training text, and what score remains",
    "generate": "let a trained model continue a text",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP, with OpenAI's interface and a page to chat on",
    "bench": "time operators, modules and collectives, beside the machine's limits",
    "tune": "fine-tune a model on conversations, on preferences, or on rewards of its own answers",
    "autotune": "choose the tiles of the GPU kernels of a recipe by timing them, or show those that are kept",
    "bench-serve": "send a load to a server: what its requests see, beside a plan",
    "quantize": "write a run's model with weights of 8 or 4 bits, and say what that costs in bits per byte",
    "export": "write a trained model and its tokenizer as a Hugging Face folder",
    "report": "write a run's report.html",
    "runs": "list runs, and compare their losses over steps, tokens, FLOPs, seconds or dollars",
    "law": "fit scaling laws to runs, predict losses and best sizes, compare laws",
    "hardware": "print the catalogue of accelerators, or everything known about one",
    "formats": "print the number formats, or a number rounded to each",
    "doctor": "say what this machine has and lacks, and what is broken",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
    "calibrate": "measure this machine's matrix products, memory bandwidth and operator overhead",
}

# GNU's OpenMP lets waiting threads spin for a long time. Beside another busy program they occupy the core that they are
# waiting for; sleeping sooner costs nothing on an idle machine (benchmarks/waiting_threads.py).
WAITING = {"GOMP_SPINCOUNT": "5000"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 wrong input, 128 + n stopped by signal n."""
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
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _notify(command, f"warning: {message}")
        try:
            status = _run(command, arguments[1:])
            # Flushed here, not at the interpreter's exit, where a full or closed output would print a traceback.
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output has gone, as `head` does.
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
    return status


def _discard_output() -> None:
    from napkin.cli.terminal import discard

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
        from napkin.data.lost_pages import leaving_on_lost_pages

        with leaving_on_lost_pages():
            return run_command(__name__, COMMANDS, command, rest)
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
        # No shell can give one, but a caller of `main`; no system has such a path.
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
    from napkin.cli.terminal import notify

    notify(f"{command if command in COMMANDS else 'napkin'}: {message}")


def _help() -> str:
    listed, *commands = usage(__name__, COMMANDS)
    about = "napkin trains language models from scratch and accounts for every byte, FLOP, second and dollar."
    more = "`napkin COMMAND --help` tells more. TEXT is a file, a folder, or stdlib: for Python's own library."
    return "\n".join([listed, "", about, *commands, "", more])
