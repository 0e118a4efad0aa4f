"""A command that does one of several things: named by its first argument, or chosen by an argument that only it has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from napkin.cli.commands import Command, Main
from napkin.cli.common.options import UnknownArgument, option_choices, options_of
from napkin.errors import NapkinError


@dataclass(frozen=True)
class Form:
    """One of the things that a command does, with options of its own."""

    command: Command
    chosen_by: tuple[str, ...] = ()
    """Arguments that choose it where its name is not given: an option, "--option=VALUE" for an option with this value,
    or a word, whatever its case and hyphens."""
    is_name: bool = False
    """True if that option stands for the name of the form, and is not one of its options."""


class Forms:
    """A command with a usual form and others.

    An option of another form is refused in a line that says whose it is.
    """

    def __init__(self, name: str, package: str, usual: Command, others: Mapping[str, Form]) -> None:
        self.name, self.package, self.usual, self.others = name, package, usual, others

    def __call__(self, arguments: Sequence[str]) -> int | None:
        """Run the form that the arguments name or choose."""
        first, *rest = arguments or [""]
        if first in self.others:
            return self._run(first, self.others[first].command, rest, None)
        for choice in _choices(arguments):
            for name, form in self.others.items():
                if choice in form.chosen_by and self.chooses(choice, arguments):
                    kept = _without(choice, arguments) if form.is_name else list(arguments)
                    return self._run(name, form.command, kept, choice)
        return self._run("", self.usual, list(arguments), None)

    def chooses(self, option: str, arguments: Sequence[str]) -> bool:
        """Return whether an argument chooses its form among the others."""
        return True

    @property
    def options(self) -> tuple[type, ...]:
        """The options of all forms."""
        commands = (self.usual, *(form.command for form in self.others.values()))
        return tuple(options for command in commands for options in options_of(command.load(self.package)))

    def _run(self, name: str, command: Command, arguments: list[str], chosen_by: str | None) -> int | None:
        main = command.load(self.package)
        try:
            return main(arguments)
        except UnknownArgument as error:
            owners = self._owners(error.argument, main)
            if chosen_by is not None and (owners or not error.argument.startswith("-")):
                raise NapkinError(
                    f"'{error.argument}' does not go with {chosen_by}, which is `napkin {self.name} {name}`, to "
                    f"{command.about}: leave one of them out"
                ) from None
            if owners:
                raise NapkinError(
                    f"'{error.argument}' is an option of {' and '.join(owners)}: leave it out, or use that"
                ) from None
            raise

    def _owners(self, option: str, but: Main) -> list[str]:
        """The forms that have the option."""
        forms = {"": self.usual, **{name: form.command for name, form in self.others.items()}}
        found = []
        for name, command in forms.items():
            main = command.load(self.package)
            if main is not but and any(option.lstrip("-") in option_choices(each) for each in options_of(main)):
                found.append(f"`napkin {f'{self.name} {name}'.strip()}`")
        return found


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
