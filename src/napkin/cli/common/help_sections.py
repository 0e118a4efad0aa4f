"""`--help` of commands with many options: the dozen that people use first, then the others section by section.

What tyro prints is divided into its boxes, one per group of options, and a box into its options; `--help all` prints it
as it is.
"""

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.errors import NapkinError, near_names

ALL, OWN = "all", "options"
_TITLE = re.compile(r"╭─ (.+?) ─*╮")


@dataclass(frozen=True)
class Section:
    """A box of the help: what it is about, and the lines of each option by the option's name."""

    name: str
    about: tuple[str, ...]
    options: dict[str, tuple[str, ...]]

    def lines(self) -> list[str]:
        """The whole section."""
        return [*self.about, *(line for option in self.options.values() for line in option)]


def asked_section(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """The arguments up to `--help`, and the section that stands behind it, or "" if none does; None without --help."""
    asked = next((i for i, argument in enumerate(arguments) if argument in ("-h", "--help")), None)
    if asked is None:
        return list(arguments), None
    behind = arguments[asked + 1 : asked + 2]
    return list(arguments[: asked + 1]), "".join(word for word in behind if not word.startswith("-"))


def short_help(text: str, section: str, first: Sequence[str], command: str) -> str:
    """Cut tyro's help to one section, or to the options `first` and the names of all sections.

    Raises NapkinError, with the names, for a section that is not there.
    """
    head, sections = _divided(text)
    if section in sections:
        return "\n".join([f"{command}: {section}", "", *sections[section].lines()])
    if section:
        near = near_names(section, sections)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise NapkinError(f"the help has no section '{section}'{hint}: use one of {', '.join([*sections, ALL])}")
    every = {name: lines for each in sections.values() for name, lines in each.options.items()}
    own = [name for name in sections[OWN].options if name != "--help"]
    chosen = [*(own if not {f"--{name}" for name in first} & {*own} else ()), *(f"--{name}" for name in first)]
    shown = [line for name in dict.fromkeys(chosen) for line in every.get(name, ())]
    return "\n".join([*head, "options used first:", *shown, "", *_index(sections, command)])


def _index(sections: dict[str, Section], command: str) -> list[str]:
    widest = max(map(len, [*sections, ALL]))
    lines = [f"all options: {command} --help SECTION"]
    for name, section in sections.items():
        about = " ".join(section.about) or "of the command itself"
        entry = f"{len(section.options):>3}  {about}"
        lines += textwrap.wrap(
            f"  {name:<{widest}}  {entry}",
            max(shutil.get_terminal_size().columns, 40),
            subsequent_indent=" " * (widest + 9),
            break_on_hyphens=False,
        )
    return [*lines, f"  {ALL:<{widest}}  {sum(len(section.options) for section in sections.values()):>3}"]


def _divided(text: str) -> tuple[list[str], dict[str, Section]]:
    head, sections = list[str](), dict[str, Section]()
    box: list[str] | None = None
    title = ""
    for line in text.splitlines():
        if found := _TITLE.match(line):
            title, box = found[1].removesuffix(" options"), []
        elif line.startswith("╰") and box is not None:
            sections[title] = _section(title, box)
            box = None
        elif box is None:
            head.append(line)
        else:
            box.append(line.removeprefix("│").removesuffix("│").rstrip())
    return head, sections


def _section(title: str, lines: list[str]) -> Section:
    about, options = list[str](), dict[str, list[str]]()
    name = None
    for line in lines:
        continues = name is not None and options[name][-1].endswith(",")
        if line.startswith(" -") and not continues:
            # Of `-h, --help` and `--verify, --no-verify` the first long form is the name.
            name = re.findall(r"--[\w.-]+", line)[0]
            options[name] = [f" {line}"]
        elif name is not None:
            options[name].append(f" {line}")
        elif not line or line.strip("─ "):
            about.append(line.strip())
    return Section(title, tuple(about), {name: tuple(option) for name, option in options.items()})
