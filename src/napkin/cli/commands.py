"""Groups of commands: a folder is a group, a file in it a command, imported when it is called."""

import importlib
import keyword
from collections.abc import Mapping, Sequence

from napkin.errors import NapkinError, near_names


def run_command(package: str, commands: Mapping[str, str], name: str, arguments: Sequence[str]) -> int:
    """Call `main` of the command's module in `package` and return the exit status.

    Raises NapkinError, with the nearest name, for a command that is not in `commands`.
    """
    if name not in commands:
        prefix = command_line(package)
        near = near_names(name, commands)
        way_out = f"did you mean `{prefix} {near[0]}`?" if near else f"`{prefix} --help` lists them"
        full_name = f"{prefix} {name}".removeprefix("napkin ")
        raise NapkinError(f"there is no command '{full_name}': {way_out}")
    return importlib.import_module(f"{package}.{module_name(name)}").main(list(arguments)) or 0


def module_name(command: str) -> str:
    """The name of a command's module: `import` cannot be one, nor what has a hyphen.

    >>> module_name("bench-serve"), module_name("import")
    ('bench_serve', 'import_')
    """
    return command.replace("-", "_") + "_" * keyword.iskeyword(command)


def run_group(package: str, commands: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; `--help`, or no argument, lists the commands."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("\n".join([*usage(package, commands), "", f"`{command_line(package)} COMMAND --help` tells more."]))
        return 0
    return run_command(package, commands, name, rest)


def usage(package: str, commands: Mapping[str, str]) -> list[str]:
    """The lines of help that list the commands of a group."""
    width = max(map(len, commands))
    listed = [f"  {name:<{width}}  {what}" for name, what in commands.items()]
    return [f"usage: {command_line(package)} COMMAND ...", "", *listed]


def command_line(package: str) -> str:
    """What is typed for a group.

    >>> command_line("napkin.cli"), command_line("napkin.cli.tokenizer")
    ('napkin', 'napkin tokenizer')
    """
    return " ".join(["napkin", *package.split(".")[2:]])
