"""A pipeline as TOML: where documents come from, the stages that they go through, and what is written.

    [input]
    paths = ["crawl/*.warc.gz", "notes/"]

    [[stage]]
    name = "length"
    least = 200

    [output]
    format = "jsonl.zst"

Paths are relative to the folder in which the command runs.
"""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from napkin.curation.reading.bounded_stream import ReadLimits
from napkin.curation.reading.input_file import InputFormat
from napkin.curation.registry import MEMORY_BYTES, Stage, make_stage, stage_options
from napkin.errors import NapkinError, suggestion
from napkin.files import StrPath, regular
from napkin.toml_files import read_toml

OutputFormat = Literal["jsonl.zst", "jsonl.gz", "jsonl", "parquet", "text"]

_LARGEST_BYTES = 2**50


@dataclass(frozen=True)
class InputOptions:
    """The table [input]: where documents come from."""

    paths: tuple[str, ...] = ()
    """Files, folders, patterns such as `crawl/*.warc.gz`, and addresses that fsspec knows."""
    format: InputFormat = "auto"
    """Format of the files; `auto` takes it from the end of each name."""
    text_field: str = "text"
    """The field of JSON lines, or column of Parquet, that is the text."""
    licence: str = ""
    """Licence of documents that do not say their own."""
    shard_bytes: int = 2**26
    """Bytes of files that one worker reads at a time. A larger file of JSON lines or text is divided, if it is not
    compressed."""
    document_bytes: int = ReadLimits.document_bytes
    """A larger document is set aside."""
    ratio: int = ReadLimits.ratio
    """A file that gives more decompressed bytes per compressed byte is set aside from there on."""

    @property
    def limits(self) -> ReadLimits:
        return ReadLimits(self.document_bytes, self.ratio)


@dataclass(frozen=True)
class OutputOptions:
    """The table [output]: what is written."""

    format: OutputFormat = "jsonl.zst"
    """Format of the documents. In `text` they are divided by lines with only `<|endoftext|>`."""
    shard_bytes: int = 2**28
    """Bytes of text after which a new file begins."""
    samples: int = 20
    """Number of documents kept for people to read, for each rule that drops some and for those that remain."""


@dataclass(frozen=True)
class Pipeline:
    """Everything that decides on the bytes of a corpus, besides the input files themselves."""

    input: InputOptions
    stages: tuple[Stage, ...]
    output: OutputOptions = field(default_factory=OutputOptions)
    memory_bytes: int = MEMORY_BYTES
    """Most memory of a stage that has to see all shards."""

    def __post_init__(self) -> None:
        if not self.input.paths:
            raise NapkinError("input.paths is empty: name files, folders, patterns or addresses")
        for name, value, least in (
            ("memory_bytes", self.memory_bytes, 2**20),
            ("input.shard_bytes", self.input.shard_bytes, 1),
            ("input.document_bytes", self.input.document_bytes, 1),
            ("input.ratio", self.input.ratio, 1),
            ("output.shard_bytes", self.output.shard_bytes, 1),
            ("output.samples", self.output.samples, 0),
        ):
            if not least <= value <= _LARGEST_BYTES:
                raise NapkinError(f"{name} is {value}: use a number from {least} to {_LARGEST_BYTES}")
        for path in self.input.paths:
            if not path or "\0" in path:
                raise NapkinError(f"input.paths has {path[:100]!r}: name a file, a folder, a pattern or an address")


def read_pipeline(path: StrPath) -> Pipeline:
    """Read a pipeline from a TOML file; what is not in it has its default.

    Raises NapkinError for a missing file, TOML that cannot be read, and an unknown stage, option or value.
    """
    path = Path(path)
    values = read_toml(path, "a pipeline, a TOML file with [input] and [[stage]]")
    try:
        return pipeline_of(values)
    except NapkinError as error:
        raise NapkinError(f"'{path}': {error}") from None


def pipeline_of(values: dict[str, Any]) -> Pipeline:
    """The pipeline that these values of TOML or JSON are. Raises NapkinError."""
    _refuse_unknown(values, ("input", "stage", "output", "memory_bytes"), "")
    stages = values.get("stage", [])
    if not isinstance(stages, list) or not all(isinstance(each, dict) for each in stages):
        raise NapkinError("stage is not a list of tables: write [[stage]] above each")
    made: list[Stage] = []
    table = _table(values, "input", InputOptions)
    for number, options in enumerate(stages, start=1):
        name = options.get("name")
        if not isinstance(name, str):
            raise NapkinError(f'stage {number} has no name: write name = "length", or another')
        made.append(make_stage(name, {option: value for option, value in options.items() if option != "name"}))
    memory_bytes = _converted(values.get("memory_bytes", MEMORY_BYTES), int, "memory_bytes")
    return Pipeline(table, tuple(made), _table(values, "output", OutputOptions), memory_bytes)


def values_of(pipeline: Pipeline) -> dict[str, Any]:
    """A pipeline as JSON has it, with every option; `pipeline_of` reads it."""
    return {
        "input": dataclasses.asdict(pipeline.input) | {"paths": list(pipeline.input.paths)},
        "stage": [{"name": stage.name, **stage_options(stage)} for stage in pipeline.stages],
        "output": dataclasses.asdict(pipeline.output),
        "memory_bytes": pipeline.memory_bytes,
    }


def files_of_options(pipeline: Pipeline) -> dict[str, str]:
    """The SHA-256 of each file that options of stages name, of folders that of each file in them, by path.

    A stage's class variable `reads` says which options these are.
    """
    checksums: dict[str, str] = {}
    values = (getattr(stage, option) for stage in pipeline.stages for option in getattr(type(stage), "reads", ()))
    for name in (name for value in values for name in ([value] if isinstance(value, str) else value or ())):
        named = Path(name)
        files = sorted(path for path in named.rglob("*") if path.is_file()) if named.is_dir() else [named]
        for path in files:
            try:
                with open(path, "rb", opener=regular) as file:
                    checksums[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name another file") from None
    return checksums


def _table(values: dict[str, Any], name: str, kind: Any) -> Any:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise NapkinError(f"{name} is not a table: write [{name}] above its options")
    _refuse_unknown(table, [each.name for each in dataclasses.fields(kind)], f"{name}.")
    return _converted(table, kind, name)


def _converted(value: Any, kind: Any, name: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        how = str(error).replace("`$.", f"`{name}.").replace("`$", f"`{name}")
        raise NapkinError(f"{how}: correct it" if "`" in how else f"{name}: {how}: correct it") from None


def _refuse_unknown(values: dict[str, Any], known: Any, prefix: str) -> None:
    for name in values:
        if name not in known:
            raise NapkinError(f"unknown field '{prefix}{name}': {suggestion(name, known, prefix=prefix)}")
