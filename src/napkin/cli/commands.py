"""Groups of commands, and where the function of each command stands: it is imported when the command is called."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from napkin.errors import NapkinError, near_names

Main = Callable[[Sequence[str]], int | None]
"""A command as a function of its arguments; None is the exit status 0."""


class Command(NamedTuple):
    """A command: a line on what it does, and the place of its function."""

    about: str
    place: str | Callable[[], Main]
    """The module below the package of the group, with `:function` behind it unless that is `main`; or what gives the
    function."""

    def load(self, package: str) -> Main:
        """Import the command."""
        if not isinstance(self.place, str):
            return self.place()
        module, _, function = self.place.partition(":")
        return getattr(importlib.import_module(f"{package}.{module}"), function or "main")


class Group:
    """A command that is several: its first argument names one, and `--help`, or no argument, lists them."""

    def __init__(self, package: str, commands: Mapping[str, Command]) -> None:
        self.package, self.commands = package, commands

    @property
    def typed(self) -> str:
        """The words that are typed to call it.

        >>> Group("napkin.cli", {}).typed, Group("napkin.cli.tokenizer", {}).typed
        ('napkin', 'napkin tokenizer')
        """
        return " ".join(["napkin", *self.package.split(".")[2:]])

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
        return self.commands[name].load(self.package)(list(arguments)) or 0

    def usage(self) -> list[str]:
        """The lines of help that list the commands."""
        width = max(map(len, self.commands))
        listed = [f"  {name:<{width}}  {command.about}" for name, command in self.commands.items()]
        return [f"usage: {self.typed} COMMAND ...", "", *listed]
