"""A document's story in a corpus: found by its identity in the files of one shard."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.corpus_folder import DOCUMENTS, DROPPED_FOLDER, INPUTS
from napkin.curation.manifest import Manifest, read_manifest
from napkin.curation.reading.bounded_stream import decompressed
from napkin.curation.record import TraceEntry
from napkin.curation.shard_log import SET_ASIDE
from napkin.errors import NapkinError
from napkin.near_names import suggestion

_RATIO = 2**20
"""The files are the project's own."""
_MOST_NAMES = 10_000
_LONGEST = 500


@dataclass(frozen=True)
class Story:
    """Where a document comes from, what each stage did to it, and how it ended."""

    identity: str
    ending: str
    """In words: in which file it is, or which rule of which stage dropped it, or why it was set aside."""
    source: str = ""
    offset: int = 0
    address: str = ""
    licence: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    trace: list[TraceEntry] = field(default_factory=list)


def find_story(corpus: Path, identity: str) -> Story:
    """The story of a document. Raises NapkinError where the corpus is none, or has no such document."""
    manifest = read_manifest(corpus)
    source = identity.rpartition("#")[0]
    shard = _shard_of(corpus, source) if source else None
    prefix = "" if shard is None else f"{shard:05d}"
    story = (
        _among_dropped(corpus, prefix, identity)
        or _among_documents(corpus, manifest, prefix, identity)
        or _set_aside(corpus, identity)
    )
    if story is not None:
        return story
    missing = f"there is no document '{identity}' in '{corpus}'"
    if shard is None:
        raise NapkinError(f"{missing}: {_other_file(corpus, source)}")
    if any(file.name.endswith(".txt") for file in manifest.files):
        raise NapkinError(f"{missing}, or it remains: in the format text documents have no identities")
    raise NapkinError(f"{missing}: '{source}' has others")


def _other_file(corpus: Path, source: str) -> str:
    """The way out of the name of a file that the corpus does not have."""
    names = [line["name"] for line, _ in zip(_lines(corpus / INPUTS), range(_MOST_NAMES), strict=False)]
    way_out = suggestion(source, names) if source else "an identity is the name of a file, # and a number"
    return way_out if len(way_out) < _LONGEST else f"{INPUTS} lists the files"


def _shard_of(corpus: Path, source: str) -> int | None:
    return next((line["shard"] for line in _lines(corpus / INPUTS) if line["name"] == source), None)


def _among_dropped(corpus: Path, prefix: str, identity: str) -> Story | None:
    for path in sorted((corpus / DROPPED_FOLDER).glob(f"{prefix}*")):
        for line in _lines(path, identity):
            if line["identity"] == identity:
                ending = f"dropped by {line['stage']}: {line['rule']} ({line['detail']})"
                return _story(line, ending)
    return None


def _among_documents(corpus: Path, manifest: Manifest, prefix: str, identity: str) -> Story | None:
    for file in manifest.files:
        if not file.name.startswith(prefix):
            continue
        path = corpus / DOCUMENTS / file.name
        for line in _rows(path, identity):
            if line["identity"] == identity:
                return _story(line, f"in {DOCUMENTS}/{file.name}")
    return None


def _set_aside(corpus: Path, identity: str) -> Story | None:
    for line in _lines(corpus / SET_ASIDE, identity):
        if line["identity"] == identity:
            ending = f"set aside: {line['reason']} ({line['detail']})"
            return Story(identity, ending, identity.rpartition("#")[0], line["offset"])
    return None


def _story(line: dict[str, Any], ending: str) -> Story:
    trace = [TraceEntry(entry["stage"], entry["note"]) for entry in line["trace"]]
    return Story(
        line["identity"],
        ending,
        line["source"],
        line["offset"],
        line["address"],
        line.get("licence", ""),
        line.get("fields", {}),
        trace,
    )


def _rows(path: Path, identity: str) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        from napkin.curation.extra import import_extra

        table = import_extra("pyarrow.parquet", "a Parquet file").ParquetFile(path)
        columns = [name for name in table.schema_arrow.names if name != "text"]
        for batch in table.iter_batches(columns=columns, use_threads=False):
            for row in batch.to_pylist():
                yield row | {"fields": msgspec.json.decode(row["fields"])}
    elif path.suffix != ".txt":
        yield from _lines(path, identity)


def _lines(path: Path, containing: str = "") -> Iterator[dict[str, Any]]:
    """The lines of a file of the corpus that have this text in them, as JSON has it."""
    wanted = msgspec.json.encode(containing)[1:-1]
    rest = b""
    with open(path, "rb") as file:
        stream = decompressed(file, _RATIO)
        while block := stream.read(2**20):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if wanted in line:
                    yield msgspec.json.decode(line)
