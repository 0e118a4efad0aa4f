"""Commands and their options, parsed by tyro into the command's dataclass; an error in them is one line.

The docstring below a field is its help. tyro would keep the line breaks of the source, so a rule of our own joins the
lines of each paragraph. Commands with many options show the dozen that people use first, then the others section by
section: what tyro prints is divided into its boxes, and a box into its options; `--help all` prints it as it is.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro
from rich.text import Text
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from napkin.bounds import MOST_STEPS, bounds_of
from napkin.cli.common.terminal import printable
from napkin.errors import NapkinError, near_names
from napkin.recipe.data_config import TrainFiles, read_files, write_files

ALL, OWN = "all", "options"
_TITLE = re.compile(r"╭─ (.+?) ─*╮")


Options = TypeVar("Options")

Main = Callable[[Sequence[str]], int | None]
"""A command as a function of its arguments; None is the exit status 0."""

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""An option that is off unless it is given; other booleans also have a --no- form."""

INLINED = tyro.conf.arg(name="")
"""For a group of options without a prefix: --temperature, not --sampling.temperature."""


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """For commands that can print their result as JSON."""

    json: Switch = False
    """Print the result for programs, as JSON."""


@dataclass(frozen=True)
class RunOptions(JsonOption):
    """For commands on a run."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


def command(name: str, options: type[Options]) -> Callable[[Callable[[Options], int | None]], Main]:
    """Make a command of a function of its parsed options."""

    def decorate(run: Callable[[Options], int | None]) -> Main:
        return takes(options)(lambda arguments: run(parse(options, name, arguments)))

    return decorate


def takes(*options: type) -> Callable[[Main], Main]:
    """Declare the options of a command that parses its arguments itself."""

    def decorate(run: Main) -> Main:
        run.__dict__["options"] = options
        return run

    return decorate


def require_above_zero(options: Any, *names: str) -> None:
    """Raise NapkinError for an option that is given and not a finite number above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise NapkinError(f"--{_option(name)} is {value}: use a number above 0")


def refuse_given(options: Any, names: Iterable[str], why: str) -> None:
    """Raise NapkinError for options that were given, but have no effect together with others."""
    defaults = {field.name: _default(field) for field in dataclasses.fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            negated = "no-" * (defaults[name] is True)
            raise NapkinError(f"--{negated}{_option(name)} {why}: leave it out")


def _option(field: str) -> str:
    return {"passes": "pass"}.get(field, field.replace("_", "-"))


class UnknownArgument(NapkinError):
    """An argument that the command does not have."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(message)
        self.argument = argument


_REGISTRY = ConstructorRegistry()


def parse(options: type[Options], command: str, arguments: Sequence[str], default: Options | None = None) -> Options:
    """Parse a command's options into its dataclass; `--help` shows its docstrings, types and defaults: all of them, or
    those that the dataclass names in `FIRST`; `--help SECTION` those of a group.

    Raises UnknownArgument for an option that it does not have or a superfluous argument, NapkinError for a value of the
    wrong type or a missing argument.
    """
    complaint = io.StringIO()
    first = getattr(options, "FIRST", None)
    shown, section = asked_section(arguments)
    if section == ALL:
        section = None
    call = functools.partial(
        tyro.cli,
        options,
        prog=f"napkin {command}",
        args=shown,
        default=default,
        registry=_REGISTRY,
        config=(tyro.conf.AvoidSubcommands,),
    )
    if section or (section is not None and first):
        # Boxes are always drawn, whatever the terminal's encoding: the text is divided at them.
        page = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with redirect_stdout(page), contextlib.suppress(SystemExit):
            call()
        page.seek(0)
        print(short_help(page.read(), section, first or (), f"napkin {command}"))
        raise SystemExit(0)
    try:
        with redirect_stderr(complaint):
            parsed, unknown = call(return_unknown_args=True)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise NapkinError(_explained(_first_paragraph(complaint.getvalue()), command)) from None
    assert parsed is not None
    if unknown:
        raise UnknownArgument(unknown[0].partition("=")[0], _unknown(unknown[0], options, command))
    return parsed


def _first_paragraph(box: str) -> str:
    """The text in tyro's error box up to its first rule, as one line."""
    lines: list[str] = []
    # The first line is the box's upper edge, with a title.
    for line in Text.from_ansi(box).plain.splitlines()[1:]:
        # Where the output is not UTF-8 the box is drawn in ASCII.
        line = line.strip("│| ")
        is_rule = not line.strip("─╰╯-+")
        if lines and is_rule:
            break
        lines += [] if is_rule else line.split()
    text = " ".join(lines).removeprefix("Error parsing ").removesuffix("(required)").rstrip(" .")
    first = text.partition(" ")[0].rstrip(":")
    # The name of a positional argument is in capitals.
    return text if first.isupper() and len(first) > 1 else text[:1].lower() + text[1:]


def _explained(complaint: str, command: str) -> str:
    """tyro's complaint with a way out: the nearest of an option's choices, or the help."""
    choice = _CHOICE.fullmatch(complaint)
    if not choice:
        return f"{complaint}: {_tells_more(command)}"
    before, value, listed = choice.groups()
    choices = re.findall(r"'([^']*)'", listed)
    near = near_names(value, choices)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{before}: use one of {', '.join(choices)}{hint}; {_tells_more(command)}"


_CHOICE = re.compile(r"(invalid choice '(.*)' for argument '[^']*')\. Expected one of \((.*)\)")


def _unknown(argument: str, options: type, command: str) -> str:
    if not argument.startswith("-"):
        return f"'{argument}' is one argument too many, or in the wrong place: {_tells_more(command)}"
    name = argument.partition("=")[0]
    names = list(option_choices(options))
    group, _, field = name.lstrip("-").rpartition(".")
    beside = [found.removeprefix(f"{group}.") for found in names if group and found.startswith(f"{group}.")]

    def initials(name: str) -> str:
        return "".join(word[:1] for word in name.rpartition(".")[2].split("-"))

    # A field is found by its own name, as --training.steps for --steps, and by its initials, as in lr. Within a
    # known group only the fields are compared: the common prefix would make any two of its options similar.
    near = (
        [found for found in names if found.rpartition(".")[2] == field]
        or [found for found in names if "-" in found and initials(found) == field]
        or [f"{group}.{found}" for found in near_names(field, beside)]
        or ([] if beside else near_names(name.lstrip("-"), names))
    )
    if near:
        return f"there is no option '{name}': did you mean --{near[0]}?"
    return f"there is no option '{name}': {_tells_more(command)}; write --option=VALUE for a value that begins with -"


def option_choices(options: type) -> dict[str, tuple[str, ...]]:
    """The names of a command's options, and the values of those that have few: for completion in a shell."""
    return dict(_choices(options))


def _choices(options: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    for field, hint in _fields(options):
        inner, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        name = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name.replace("_", "-"))
        if dataclasses.is_dataclass(inner):
            yield from _choices(typing.cast(type, inner), prefix if INLINED in marks else f"{prefix}{name}.")
        elif tyro.conf.Positional not in marks:
            kinds = [inner, *typing.get_args(inner)]
            values = [value for kind in kinds if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]
            yield prefix + name, tuple(str(value) for value in values)
            if inner is bool and tyro.conf.FlagCreatePairsOff not in marks:
                yield f"{prefix}no-{name}", ()


def _tells_more(command: str) -> str:
    return f"`napkin {command.partition(' [')[0]} --help` tells more"


@_REGISTRY.struct_rule
def _dataclass(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A dataclass whose help texts are paragraphs; the help of a group is the first paragraph of its docstring."""
    if not dataclasses.is_dataclass(info.type):
        return None
    cls = typing.cast(type, info.type)
    fields = []
    for field, hint in _fields(cls):
        default = getattr(info.default, field.name) if isinstance(info.default, cls) else _default(field)
        texts = field_docstrings(cls)
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        text = _paragraphs(inner.__doc__ or "")[0] if dataclasses.is_dataclass(inner) else texts.get(field.name, "")
        if (bounds := bounds_of(cls).get(field.name)) and bounds.most < MOST_STEPS:
            text += f" {bounds}."
        fields.append(StructFieldSpec(name=field.name, type=hint, default=default, helptext=text))
    return StructConstructorSpec(instantiate=cls, fields=tuple(fields))


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    # Keyword-only fields, such as --json, come last.
    return [
        (field, hints[field.name]) for field in sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)
    ]


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return tyro.MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


@functools.cache
def field_docstrings(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its base classes."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            # A class composed of others: its fields have the docstrings of theirs.
            continue
        (definition,) = ast.parse(inspect.cleandoc("\n" + source)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docstrings[name] = "\n\n".join(_paragraphs(text))
    return docstrings


def toml_comment(text: str) -> list[str]:
    """A text as lines of a TOML comment."""
    return textwrap.wrap(
        " ".join(text.split()), 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _paragraphs(docstring: str) -> list[str]:
    """A docstring's paragraphs, each as one line."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n")]


@_REGISTRY.primitive_rule
def _value(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Numbers, texts, and values that may be None, with error messages in plain words instead of Python's."""
    kinds: list[Any] = list(typing.get_args(info.type)) or [info.type]
    optional = type(None) in kinds
    kind: Any = next((kind for kind in kinds if kind is not type(None)), None)
    if kind not in _EXPECTED or len(kinds) > 1 + optional:
        return None

    # For a positional argument that is left out, tyro reports [[]] and takes the default.
    def read(texts: list[Any]) -> Any:
        if optional and texts[0] == "None":
            return None
        try:
            return kind(texts[0])
        except ValueError:
            raise ValueError(f"'{texts[0]}' is not {_EXPECTED[kind]}{' and not None' * optional}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper() + "|None" * optional,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind) or (optional and value is None),
        # Needed for the help alone, where a default comes from a recipe file.
        str_from_instance=lambda value: [printable(str(value))],
    )


@_REGISTRY.primitive_rule
def _train_files(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """One file, several, or several with weights."""
    if info.type != TrainFiles:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="FILE[=WEIGHT] ...",
        instance_from_str=read_files,
        is_instance=lambda value: isinstance(value, str | tuple | dict),
        str_from_instance=lambda value: [printable(each) for each in write_files(value)],
    )


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
    head, sections, box = list[str](), dict[str, Section](), None
    for line in text.splitlines():
        if title := _TITLE.match(line):
            box = sections[title[1].removesuffix(" options")] = Section()
        elif line.startswith("╰"):
            box = None
        elif box is None:
            head.append(line)
        else:
            box.add(line.removeprefix("│").removesuffix("│").rstrip())
    if section in sections:
        options = sections[section].options.values()
        return "\n".join([f"{command}: {section}", "", *sections[section].about, *itertools.chain(*options)])
    if section:
        near = near_names(section, sections)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise NapkinError(f"the help has no section '{section}'{hint}: use one of {', '.join([*sections, ALL])}")
    every = {name: lines for each in sections.values() for name, lines in each.options.items()}
    own = [name for name in sections[OWN].options if name != "--help"]
    chosen = [*(own if not {f"--{name}" for name in first} & {*own} else ()), *(f"--{name}" for name in first)]
    shown = [line for name in dict.fromkeys(chosen) for line in every.get(name, ())]
    widest = max(map(len, [*sections, ALL]))
    index = [f"all options: {command} --help SECTION"]
    for name, each in sections.items():
        about = " ".join(each.about) or "of the command itself"
        index += textwrap.wrap(
            f"  {name:<{widest}}  {len(each.options):>3}  {about}",
            max(shutil.get_terminal_size().columns, 40),
            subsequent_indent=" " * (widest + 9),
            break_on_hyphens=False,
        )
    index.append(f"  {ALL:<{widest}}  {sum(len(each.options) for each in sections.values()):>3}")
    return "\n".join([*head, "options used first:", *shown, "", *index])


class Section:
    """A box of the help: what it is about, and the lines of each option by the option's name."""

    def __init__(self) -> None:
        self.about: list[str] = []
        self.options: dict[str, list[str]] = {}

    def add(self, line: str) -> None:
        """Add a line of the box."""
        last = next(reversed(self.options.values()), None)
        if line.startswith(" -") and not (last and last[-1].endswith(",")):
            # In `-h, --help` and `--verify, --no-verify`, the first long form is the name.
            self.options[re.findall(r"--[\w.-]+", line)[0]] = [f" {line}"]
        elif last is not None:
            last.append(f" {line}")
        elif not line or line.strip("─ "):
            self.about.append(line.strip())


_EXPECTED: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}
