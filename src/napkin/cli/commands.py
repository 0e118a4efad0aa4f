"""The ways to a command: by its name in a group, or by an argument that only one form of it has.

Where the function of a command stands is a name: it is imported when the command is called.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from napkin.errors import NapkinError, near_names

Main = Callable[[Sequence[str]], int | None]
"""The type of a command, as in `napkin.cli.common.options`, whose import takes longer than `napkin --help`."""


class Command(NamedTuple):
    """A command: a line on what it does, and the place of its function."""

    about: str
    place: "str | Group | Forms | Callable[[], Main]"
    """The module below napkin.cli, with `:function` behind it unless that is `main`; commands; or what gives the
    function."""

    def load(self) -> Main:
        """Import the command."""
        if isinstance(self.place, Group | Forms):
            return self.place
        if not isinstance(self.place, str):
            return self.place()
        module, _, function = self.place.partition(":")
        return getattr(importlib.import_module(f"napkin.cli.{module}"), function or "main")


class Group:
    """A command that is several: its first argument names one, and `--help`, or no argument, lists them.

    `typed` are the words that are typed to call it, such as "napkin tokenizer".
    """

    def __init__(self, typed: str, commands: Mapping[str, Command]) -> None:
        self.typed, self.commands = typed, commands

    def __call__(self, arguments: Sequence[str]) -> int:
        """Run the command that the first argument names."""
        name, *rest = arguments or ["--help"]
        if name in ("-h", "--help"):
            print("\n".join([*self.usage(), "", f"`{self.typed} COMMAND --help` tells more."]))
            return 0
        return self.run(name, rest)

    def run(self, name: str, arguments: Sequence[str]) -> int:
        """Run a command and return its exit status.

        Raises NapkinError, with the nearest name, for one that is not in the group.
        """
        if name not in self.commands:
            near = near_names(name, self.commands)
            way_out = f"did you mean `{self.typed} {near[0]}`?" if near else f"`{self.typed} --help` lists them"
            raise NapkinError(f"there is no command '{f'{self.typed} {name}'.removeprefix('napkin ')}': {way_out}")
        return self.commands[name].load()(list(arguments)) or 0

    def usage(self) -> list[str]:
        """The lines of help that list the commands."""
        width = max(map(len, self.commands))
        listed = [f"  {name:<{width}}  {command.about}" for name, command in self.commands.items()]
        return [f"usage: {self.typed} COMMAND ...", "", *listed]


@dataclass(frozen=True)
class Form:
    """One form of a command, with options of its own."""

    command: Command
    chosen_by: tuple[str, ...] = ()
    """Arguments that choose it where its name is not given: an option, "--option=VALUE" for an option with this value,
    or a word, whatever its case and hyphens."""
    is_name: bool = False
    """True if that option stands for the name of the form, and is not one of its options."""


@dataclass(frozen=True)
class Forms:
    """A command with a usual form and others, named by its first argument or chosen by an argument that only it has.

    An option of another form is refused in a line that says whose it is.
    """

    name: str
    usual: Command
    others: Mapping[str, Form]
    chooses: Callable[[str, Sequence[str]], bool] = lambda choice, arguments: True
    """Whether an argument of `chosen_by` chooses its form among all arguments."""

    def __call__(self, arguments: Sequence[str]) -> int | None:
        """Run the form that the arguments name or choose."""
        first, *rest = arguments or [""]
        if first in self.others:
            return self._run(first, rest, None)
        for choice in _choices(arguments):
            for name, form in self.others.items():
                if choice in form.chosen_by and self.chooses(choice, arguments):
                    return self._run(name, _without(choice, arguments) if form.is_name else list(arguments), choice)
        return self._run("", list(arguments), None)

    @property
    def commands(self) -> dict[str, Command]:
        """The forms by name, the usual one as ""."""
        return {"": self.usual, **{name: form.command for name, form in self.others.items()}}

    @property
    def options(self) -> tuple[type, ...]:
        """The options of all forms."""
        return tuple(options for command in self.commands.values() for options in options_of(command.load()))

    def _run(self, name: str, arguments: list[str], chosen_by: str | None) -> int | None:
        from napkin.cli.common.options import UnknownArgument, option_choices

        main = self.commands[name].load()
        try:
            return main(arguments)
        except UnknownArgument as error:
            option, owners = error.argument.lstrip("-"), []
            for other, command in self.commands.items():
                loaded = command.load()
                if loaded is not main and any(option in option_choices(each) for each in options_of(loaded)):
                    owners.append(f"`napkin {f'{self.name} {other}'.strip()}`")
            if chosen_by is not None and (owners or not error.argument.startswith("-")):
                raise NapkinError(
                    f"'{error.argument}' does not go with {chosen_by}, which is `napkin {self.name} {name}`, to "
                    f"{self.commands[name].about}: leave one of them out"
                ) from None
            if owners:
                raise NapkinError(
                    f"'{error.argument}' is an option of {' and '.join(owners)}: leave it out, or use that"
                ) from None
            raise


def options_of(run: Main) -> tuple[type, ...]:
    """The dataclasses that a command parses."""
    return getattr(run, "options", ())


def _choices(arguments: Sequence[str]) -> Iterator[str]:
    """Yield what may choose a form, in the order of the arguments.

    >>> list(_choices(["All_Reduce", "--law", "gadre", "--out=law.json"]))
    ['all-reduce', '--law', '--law=gadre', 'gadre', '--out', '--out=law.json']
    """
    for argument, following in pairwise([*arguments, ""]):
        if not argument.startswith("--"):
            yield argument.lower().replace("_", "-")
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        yield from (name, f"{name}={value if equals else following}")


def _without(option: str, arguments: Sequence[str]) -> list[str]:
    kept = list[str]()
    for each in arguments:
        name, equals, value = each.partition("=")
        if name.replace("_", "-") != option:
            kept.append(each)
        elif equals:
            kept.append(value)
    return kept
