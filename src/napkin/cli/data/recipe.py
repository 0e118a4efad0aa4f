"""`napkin data recipe`."""

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

import tomli_w
import tyro

from napkin.cli.common.options import command, field_docstrings
from napkin.cli.common.terminal import print_verbatim
from napkin.curation.engine.pipeline_file import InputOptions, OutputOptions, Pipeline
from napkin.curation.registry import STAGES, stage_class

STANDARD = (
    "extract",
    "language",
    "gopher",
    "gopher-repetition",
    "fineweb",
    "duplicates",
    "near-duplicates",
    "duplicate-lines",
    "personal-data",
)
"""In the order in which they run: what is cheap and drops much comes first, what compares documents later, and what
changes a text last."""
_CHANGED: dict[str, dict[str, Any]] = {"input": {"paths": ["pages/"]}, "language": {"keep": ["en"]}}
"""Where a pipeline to begin with is not at its defaults: the rules of `gopher` are for English."""
_INTRODUCTION = """A pipeline for `napkin data plan` and `napkin data run`, from raw pages to a corpus. Stages run in \
this order; those at the end, before [output], are not in use: move one to its place and take away its first #. \
Options have their defaults, but for input.paths and the languages that are kept, and one that is left out has its \
default, too. Dots stand where an option has no default."""


@dataclass(frozen=True)
class PipelineRecipeOptions:
    """Print a pipeline as TOML, with a comment on each option: napkin data recipe > pipeline.toml. Without the name of
    a stage it is a complete one for web pages, with the stages that it does not use behind it as comments."""

    stages: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STAGE ...")] = ()
    """Stages of the pipeline, in order: napkin data recipe length near-duplicates."""


@command("data recipe", PipelineRecipeOptions)
def main(options: PipelineRecipeOptions) -> None:
    print_verbatim(commented_pipeline(options.stages).removesuffix("\n"))


def commented_pipeline(stages: tuple[str, ...] = ()) -> str:
    """A pipeline of these stages as TOML; of none, the standard one, and the other stages as comments.

    Raises NapkinError for an unknown stage.
    """
    memory = field_docstrings(Pipeline)["memory_bytes"]
    blocks = [
        _comment(_INTRODUCTION),
        [*_comment(memory), *_assigned("memory_bytes", Pipeline.memory_bytes)],
        ["[input]", *_options(InputOptions, "input")],
        *(_stage(name) for name in stages or STANDARD),
        *([f"# {line}".rstrip() for line in _stage(name)] for name in STAGES if not stages and name not in STANDARD),
        ["[output]", *_options(OutputOptions, "output")],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _stage(name: str) -> list[str]:
    cls = stage_class(name)
    about = STAGES[name].about
    return [*_comment(f"{about[0].upper()}{about[1:]}."), "[[stage]]", f'name = "{name}"', *_options(cls, name)]


def _options(cls: type[Any], name: str) -> list[str]:
    """A line for each field, below its docstring; as a comment where it is None."""
    docs, lines = field_docstrings(cls), list[str]()
    for field in dataclasses.fields(cls):
        text = docs.get(field.name, "")
        if field.default is not dataclasses.MISSING:
            value = _CHANGED.get(name, {}).get(field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value, text = None, f"To be given: {text[0].lower()}{text[1:]}"
        lines += _comment(text)
        lines += [f"# {field.name} = ..."] if value is None else _assigned(field.name, value)
    return lines


def _assigned(name: str, value: Any) -> list[str]:
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, list):
        return [f"{name} = [{', '.join(_assigned('x', each)[0].removeprefix('x = ') for each in value)}]"]
    return tomli_w.dumps({name: value}).rstrip("\n").split("\n")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
