"""The command line: one file a command, imported when it is called."""

import difflib
import importlib
import os
import sys

from napkin.errors import NapkinError

COMMANDS = {
    "demo": "train a language model on Python's own library, books kept, in five minutes",
    "tokenizer": "train a tokenizer; encode text into token files",
    "recipe": "print a recipe, the TOML file that says everything a run does",
    "plan": "say what a run will take before it starts: parameters, FLOPs, bytes, seconds",
    "train": "plan, train, meter and reconcile a run",
    "resume": "continue a run from its newest good checkpoint",
    "evaluate": "loss, perplexity and bits a byte on held-out text, beside gzip and xz",
    "generate": "let a trained model continue a text",
    "report": "write a run's report.html",
    "calibrate": "measure this machine's matrix products, memory and operator overhead",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 a wrong input, 128 + n stopped by signal n."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    command, *rest = arguments
    if command == "--version":
        import napkin

        print(f"napkin {napkin.__version__}")
        return 0
    try:
        if command not in COMMANDS:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            way_out = f"did you mean `napkin {near[0]}`?" if near else "`napkin --help` lists them"
            raise NapkinError(f"there is no command '{command}': {way_out}")
        return importlib.import_module(f"napkin.cli.{command}").main(rest) or 0
    except NapkinError as error:
        return _fail(command, str(error))
    except MemoryError:
        return _fail(command, "this machine ran out of memory: `napkin plan` says what a run needs")
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; what is still buffered has no place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(command, f"{error.filename or 'a file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail(command, "interrupted", status=130)


def _fail(command: str, reason: str, status: int = 2) -> int:
    print(f"{command}: {' '.join(reason.split())}", file=sys.stderr)
    return status


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
