"""The command line: one file a command, imported when it is called."""

import difflib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

import napkin
from napkin.errors import NapkinError

COMMANDS = {
    "demo": "train a language model on Python's own library, books kept, in five minutes",
    "tokenizer": "train, compare, show, import or export a tokenizer; encode text into token files",
    "recipe": "print a recipe, the TOML file that says everything a run does",
    "plan": "say what a run will take before it starts: parameters, FLOPs, bytes, seconds",
    "fit": "say how large a model some accelerators can train, by rule and by count",
    "count": "trace a training step: FLOPs and bytes by operator, module or phase",
    "train": "plan, train, meter and reconcile a run",
    "resume": "continue a run from its newest good checkpoint",
    "evaluate": "loss, perplexity and bits per byte on held-out text, beside gzip and xz",
    "generate": "let a trained model continue a text",
    "report": "write a run's report.html",
    "runs": "list runs, and compare their losses over steps, tokens, FLOPs, seconds or dollars",
    "hardware": "print the catalogue of accelerators, or all that is known of one",
    "formats": "print the number formats, or what each makes of a number",
    "calibrate": "measure this machine's matrix products, memory and operator overhead",
}

# GNU's OpenMP lets threads spin for long while they wait for one another. Beside another busy program they hold the
# core that they wait for; sleeping sooner costs nothing where the machine is one's own (benchmarks/waiting_threads.py).
WAITING = {"GOMP_SPINCOUNT": "5000"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 a wrong input, 128 + n stopped by signal n."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else "--help"
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read once, when torch is loaded: here that is still to come.
        for name, value in WAITING.items():
            os.environ.setdefault(name, value)
    for stream in (sys.stdout, sys.stderr):
        # A "·" that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(command, f"warning: {message}")
        try:
            status = _run(command, arguments[1:])
            # Not left to the interpreter's end, where an output that is full or gone would be told as a traceback.
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output has gone, as `head` does.
            _discard_output()
            status = 141
        except OSError as error:
            _discard_output()
            status = _fail(command, f"the output cannot be written ({error.strerror}): make room, or send it elsewhere")
    if "RANK" in os.environ:
        # A thread of gloo that still drops its last tensor aborts an interpreter that is being taken down: torchrun
        # would begin a finished job again (pytorch/pytorch#179291).
        sys.stderr.flush()
        os._exit(status)
    return status


def _discard_output() -> None:
    """What is still buffered has no place to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(command: str, rest: Sequence[str]) -> int:
    try:
        for argument in (command, *rest):
            _refuse_bytes(argument)
        if command in ("-h", "--help", "help"):
            print(_help())
            return 0
        if command in ("-V", "--version"):
            print(f"napkin {napkin.__version__}")
            return 0
        if command not in COMMANDS:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            way_out = f"did you mean `napkin {near[0]}`?" if near else "`napkin --help` lists them"
            return _fail(command, f"there is no command '{command}': {way_out}")
        return importlib.import_module(f"napkin.cli.{command}").main(list(rest)) or 0
    except SystemExit as leaving:
        # `--help` leaves so.
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
        return _fail(command, "a file is nested too deeply to be read: put it back as napkin wrote it")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail(command, "this machine ran out of memory: `napkin plan` says what a run needs")
    except KeyboardInterrupt:
        return _fail(command, "interrupted", status=130)


def _refuse_bytes(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise NapkinError(
            f"argument {argument!r} is not UTF-8 at character {error.start}: rename the file, or convert the text"
        ) from None


def _is_out_of_memory(error: Exception) -> bool:
    # torch has no class for it on the CPU.
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


def _fail(command: str, reason: str, status: int = 2) -> int:
    _say(command, reason)
    return status


def _say(command: str, what: str) -> None:
    line = f"{command if command in COMMANDS else 'napkin'}: {' '.join(what.split())}"
    # The name of a file may hold anything: a terminal is not to obey it.
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
    print(shown, file=sys.stderr)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: napkin COMMAND ...",
            "",
            "napkin trains language models from scratch and keeps the books while it does.",
            "",
            *lines,
            "",
            "`napkin COMMAND --help` tells more. TEXT is a file, a folder, or stdlib: for Python's own library.",
        ]
    )
