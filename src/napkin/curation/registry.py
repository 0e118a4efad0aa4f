"""The stages of pipelines by name, which is that of their commands, too. A stage is imported when it is used; to add
one, add a line to `STAGES`.

A stage is a frozen dataclass whose fields are its options, each with a docstring below it and a default where one is
sensible; TOML values, checked in `__post_init__`. Its class is imported for the help and for completion in a shell, so
its module imports numpy, numba and other heavy libraries where it uses them. No option may be named as one of
`RESERVED`, which every command of a stage has.
"""

import dataclasses
import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from napkin.curation.stage import CorpusStage, RecordStage
from napkin.errors import NapkinError
from napkin.near_names import suggestion

Stage = RecordStage | CorpusStage

RESERVED = frozenset({"paths", "out", "input_format", "output_format", "text_field", "workers", "memory_bytes", "json"})


@dataclass(frozen=True)
class StageEntry:
    """Where a stage is, as "module:Class", and what it does, for the list of commands."""

    where: str
    about: str


STAGES = {
    "duplicates": StageEntry(
        "napkin.curation.deduplication.document_stages:Duplicates", "drop documents whose text another has"
    ),
    "near-duplicates": StageEntry(
        "napkin.curation.deduplication.document_stages:NearDuplicates",
        "drop documents that are nearly another, by MinHash",
    ),
    "duplicate-lines": StageEntry(
        "napkin.curation.deduplication.line_stage:DuplicateLines", "remove lines that stand earlier in the corpus"
    ),
    "duplicate-substrings": StageEntry(
        "napkin.curation.deduplication.passage_stage:DuplicateSubstrings",
        "remove passages that stand earlier in the corpus",
    ),
    "decontaminate": StageEntry(
        "napkin.curation.deduplication.decontamination_stage:Decontaminate", "drop documents with questions of tasks"
    ),
    "best-share": StageEntry(
        "napkin.curation.filters.best_share:BestShare", "keep the documents with the highest scores"
    ),
    "c4": StageEntry("napkin.curation.filters.c4:C4", "keep lines that are sentences, by the rules of C4"),
    "classifier": StageEntry(
        "napkin.curation.filters.classifier:Classifier", "score documents by a model that was trained on your texts"
    ),
    "fineweb": StageEntry("napkin.curation.filters.fineweb:FineWeb", "drop lists and menus, by FineWeb's own rules"),
    "gopher": StageEntry("napkin.curation.filters.gopher:Gopher", "drop what is not prose, by Gopher's rules"),
    "gopher-repetition": StageEntry(
        "napkin.curation.filters.gopher:GopherRepetition", "drop documents that repeat themselves, by Gopher's rules"
    ),
    "host-list": StageEntry(
        "napkin.curation.filters.host_list:HostList", "drop documents of hosts in a list, or keep only those"
    ),
    "extract": StageEntry("napkin.curation.extraction.stage:Extract", "make text of HTML pages and PDFs"),
    "language": StageEntry(
        "napkin.curation.languages.language_stage:Language", "find the language of documents, keep some languages"
    ),
    "length": StageEntry("napkin.curation.length:Length", "drop documents with too few or too many characters"),
    "personal-data": StageEntry(
        "napkin.curation.filters.personal_data:PersonalData", "mask mail addresses, numbers of persons, and keys"
    ),
    "refinedweb": StageEntry(
        "napkin.curation.filters.refinedweb:RefinedWeb", "remove lines of menus and counters, by RefinedWeb's rules"
    ),
    "word-list": StageEntry("napkin.curation.filters.word_list:WordList", "drop documents with words of a list"),
}


def stage_class(name: str) -> type[Any]:
    """The class of a stage. Raises NapkinError, with the nearest name, for one that does not exist."""
    if name not in STAGES:
        raise NapkinError(f"there is no stage '{name}': {suggestion(name, STAGES)}")
    module, _, cls = STAGES[name].where.partition(":")
    return getattr(importlib.import_module(module), cls)


def make_stage(name: str, options: Mapping[str, Any]) -> Stage:
    """A stage with these options, TOML values.

    Raises NapkinError for an unknown stage or option, a missing option, and a value of the wrong type or range.
    """
    cls = stage_class(name)
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            way_out = suggestion(option, known) if known else "it has none"
            raise NapkinError(f"stage '{name}' has no option '{option}': {way_out}")
    try:
        return msgspec.convert(dict(options), cls)
    except msgspec.ValidationError as error:
        how = str(error).replace("`$.", "`").replace("Object missing", "it is missing the")
        raise NapkinError(f"stage '{name}': {how}: `napkin data {name} --help` lists its options") from None
    except NapkinError as error:
        raise NapkinError(f"stage '{name}': {error}") from None


def stage_options(stage: Stage) -> dict[str, Any]:
    """All options of a stage with their values, as JSON has them."""
    return {
        field.name: msgspec.to_builtins(getattr(stage, field.name))
        for field in dataclasses.fields(typing.cast(Any, stage))
    }


def files_of(stage: Stage) -> list[str]:
    """The files and folders that its options name, those in its class variable `reads`, in order."""
    named: list[str] = []
    for option in getattr(type(stage), "reads", ()):
        value = getattr(stage, option)
        named += [value] if isinstance(value, str) else [*(value or ())]
    return named


def stage_version(stage: Stage) -> int:
    """The version of what a stage does, its class variable `version`: 1 unless it has one."""
    return getattr(type(stage), "version", 1)
