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
_MOST_NAMED = 20


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
    if story is None:
        raise _not_found(corpus, identity, source, is_file=shard is not None)
    return story


def _not_found(corpus: Path, identity: str, source: str, *, is_file: bool) -> NapkinError:
    if is_file:
        return NapkinError(
            f"there is no document '{identity}' in '{corpus}': '{source}' has fewer documents, or others"
        )
    names = [line["name"] for line, _ in zip(_lines(corpus / INPUTS), range(10_000), strict=False)]
    way_out = (
        suggestion(source, names[:_MOST_NAMED] if len(names) <= _MOST_NAMED else names)
        if source
        else ("an identity is the name of a file, # and a number")
    )
    if len(way_out) > 500:
        way_out = f"{INPUTS} lists the files"
    return NapkinError(f"there is no document '{identity}' in '{corpus}': {way_out}")


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
