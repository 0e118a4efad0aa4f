"""manifest.json of a corpus: what was done, what came out, and checksums of every file. It is written last."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.runs.json_file import read_json

NAME = "manifest.json"
KIND = "napkin corpus"
SCHEMA_VERSION = 1


@dataclass
class Amount:
    """Documents, and their bytes: the UTF-8 of the text, and content of which no text was made yet."""

    documents: int = 0
    bytes: int = 0

    def add(self, n_bytes: int) -> None:
        """Count one more document."""
        self.documents += 1
        self.bytes += n_bytes

    def __iadd__(self, other: "Amount") -> "Amount":
        self.documents += other.documents
        self.bytes += other.bytes
        return self


@dataclass
class StageBooks:
    """What entered a stage, what it dropped by which rule, and what remained."""

    name: str
    version: int = 1
    entered: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    remained: Amount = field(default_factory=Amount)

    def __iadd__(self, other: "StageBooks") -> "StageBooks":
        self.entered += other.entered
        self.remained += other.remained
        for rule, amount in other.dropped.items():
            self.dropped[rule] = self.dropped.get(rule, Amount())
            self.dropped[rule] += amount
        return self


@dataclass(frozen=True)
class CorpusFile:
    """A file with documents."""

    name: str
    sha256: str
    file_bytes: int
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class InputBooks:
    """The files that were read, listed in inputs.jsonl."""

    files: int
    bytes: int
    read: Amount
    """Documents that entered the first stage, and their bytes."""


@dataclass(frozen=True)
class Manifest:
    """A corpus."""

    kind: str
    schema_version: int
    napkin: str
    """The version that wrote it."""
    pipeline: dict[str, Any]
    """Every option, as `pipeline_file.values_of` gives it."""
    input: InputBooks
    stages: tuple[StageBooks, ...]
    set_aside: dict[str, int]
    """By reason, how often something could not be read or processed; set_aside.jsonl lists them."""
    documents: int
    text_bytes: int
    files: tuple[CorpusFile, ...]
    """In `documents/`."""
    files_of_options: dict[str, str]
    """SHA-256 of each file that an option of a stage names, by path."""
    checksums: dict[str, str]
    """SHA-256 of each other file but meter.json, by its path in the corpus."""


def read_manifest(corpus: Path) -> Manifest:
    """The manifest of a finished corpus. Raises NapkinError where there is none, or it cannot be read."""
    manifest = read_json(corpus / NAME, Manifest)
    if manifest is None or manifest.kind != KIND:
        unfinished = (corpus / ".work").is_dir()
        way_out = "run its `napkin data` command again, which finishes it" if unfinished else "name a corpus"
        raise NapkinError(f"'{corpus}' is not a {'finished ' * unfinished}corpus of `napkin data`: {way_out}")
    if manifest.schema_version != SCHEMA_VERSION:
        raise NapkinError(
            f"'{corpus}' has version {manifest.schema_version} of a corpus's manifest, this napkin reads "
            f"{SCHEMA_VERSION}: use another napkin"
        )
    return manifest
