"""A corpus explained: the story of a document, found by its identity in the files of one shard, and a page with
samples of what each rule dropped, beside samples of what remained."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.engine.corpus_files import (
    DOCUMENTS,
    DROPPED_FOLDER,
    INPUTS,
    SAMPLES,
    SET_ASIDE,
    Manifest,
    Sample,
    read_manifest,
)
from napkin.curation.reading.bounded_stream import decompressed
from napkin.curation.stage import TraceEntry
from napkin.errors import NapkinError, first_line, import_extra, suggestion
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.report.xy_picture import COLOURS, FlowStep, flow_svg
from napkin.units import format_bytes, format_share

_RATIO = 2**20
"""Bytes per compressed byte; high, because these files are napkin's own."""
_MOST_NAMES = 10_000
_LONGEST = 500


@dataclass(frozen=True)
class Story:
    """A document's way through a pipeline: its source, what each stage did to it, and how it ended."""

    identity: str
    ending: str
    """The document's end, in words: its file, the rule that dropped it, or why it was set aside."""
    source: str = ""
    offset: int = 0
    address: str = ""
    licence: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    trace: list[TraceEntry] = field(default_factory=list)


def find_story(corpus: Path, identity: str) -> Story:
    """The story of a document. Raises NapkinError where the corpus is none, or has no such document."""
    manifest = read_manifest(corpus)
    source, _, number = identity.rpartition("#")
    parts = [line for line in _lines(corpus / INPUTS, source) if line["name"] == source] if source else []
    before = int(number) - 1 if number.isdecimal() else 0
    shard = max((line["shard"] for line in parts if line.get("number", 0) <= before), default=None)
    prefix = "" if shard is None else f"{shard:05d}"
    if story := next(_stories(corpus, manifest, prefix, identity), None):
        return story
    missing = f"there is no document '{identity}' in '{corpus}'"
    if shard is None:
        names = [line["name"] for line, _ in zip(_lines(corpus / INPUTS), range(_MOST_NAMES), strict=False)]
        way_out = suggestion(source, names) if source else "an identity is the name of a file, # and a number"
        raise NapkinError(f"{missing}: {way_out if len(way_out) < _LONGEST else f'{INPUTS} lists the files'}")
    if any(file.name.endswith(".txt") for file in manifest.files):
        raise NapkinError(f"{missing}, or it remains: in the format text documents have no identities")
    raise NapkinError(f"{missing}: '{source}' has others")


def _stories(corpus: Path, manifest: Manifest, prefix: str, identity: str) -> Iterator[Story]:
    """The document among those that were dropped, those that remain, and what was set aside."""
    for path in sorted((corpus / DROPPED_FOLDER).glob(f"{prefix}*")):
        for line in _rows(path, identity):
            yield _story(line, f"dropped by {line['stage']}: {line['rule']} ({line['detail']})")
    for file in manifest.files:
        if file.name.startswith(prefix):
            for line in _rows(corpus / DOCUMENTS / file.name, identity):
                yield _story(line, f"in {DOCUMENTS}/{file.name}")
    for line in _rows(corpus / SET_ASIDE, identity):
        ending = f"set aside: {line['reason']} ({line['detail']})"
        yield Story(identity, ending, identity.rpartition("#")[0], line["offset"])


def _story(line: dict[str, Any], ending: str) -> Story:
    said = {name: line[name] for name in ("source", "offset", "address", "licence", "fields") if name in line}
    trace = [TraceEntry(entry["stage"], entry["note"]) for entry in line["trace"]]
    return Story(line["identity"], ending, **said, trace=trace)


def _rows(path: Path, identity: str) -> Iterator[dict[str, Any]]:
    """The document with this identity in a file of the corpus, as JSON has it."""
    rows: Iterator[dict[str, Any]] = iter(())
    if path.suffix == ".parquet":
        table = import_extra("pyarrow.parquet", "a Parquet file").ParquetFile(path)
        columns = [name for name in table.schema_arrow.names if name != "text"]
        batches = table.iter_batches(columns=columns, use_threads=False)
        rows = (row | {"fields": msgspec.json.decode(row["fields"])} for batch in batches for row in batch.to_pylist())
    elif path.suffix != ".txt":
        rows = _lines(path, identity)
    yield from (row for row in rows if row["identity"] == identity)


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


def read_samples(corpus: Path) -> list[Sample]:
    """The documents that a corpus keeps for people to read. Raises NapkinError where they cannot be read."""
    try:
        with open(corpus / SAMPLES, "rb") as file:
            return [msgspec.json.decode(line, type=Sample) for line in file]
    except (OSError, ValueError, RecursionError) as error:
        raise NapkinError(f"'{corpus / SAMPLES}' cannot be read ({first_line(error)}): make the corpus again") from None


GENERATOR = b'<meta name="generator" content="napkin data">'


def write_sample_page(corpus: Path, path: Path) -> Path:
    """Write the page of a finished corpus to `path`, replacing an earlier one, and return the path.

    Raises NapkinError where the corpus is none, or `path` is anything but such a page.
    """
    manifest = read_manifest(corpus)
    refuse_unmarked(path, GENERATOR, "a page that `napkin data samples` wrote")
    samples = read_samples(corpus)
    rules: list[dict[str, Any]] = []
    for number, stage in enumerate(manifest.stages):
        for rule, amount in stage.dropped.items():
            share = format_share(amount.documents / stage.entered.documents)
            what = f"{amount.documents:,} documents, {share} of those that entered the stage"
            rules.append(
                {
                    "id": f"rule-{len(rules) + 1}",
                    "title": f"{stage.name}: {rule}",
                    "what": f"{what}, {format_bytes(amount.bytes)}",
                    "samples": [_shown(sample) for sample in samples if (sample.stage, sample.rule) == (number, rule)],
                }
            )
    steps = [
        FlowStep(each.name, each.remained.documents, {rule: float(n.documents) for rule, n in each.dropped.items()})
        for each in manifest.stages
    ]
    entered = manifest.input.read.documents
    page = render(
        "samples.html",
        colours=COLOURS,
        title=corpus.absolute().name,
        sections={"stages": "What each stage did"} | {rule["id"]: rule["title"] for rule in rules},
        statement=f"{manifest.documents:,} of {entered:,} documents remain, "
        f"{format_bytes(manifest.text_bytes)} of text.",
        flow=flow_svg("What entered, what each stage dropped, what remained", entered, steps, "documents"),
        rows=[
            [
                f"{number}. {stage.name}",
                f"{stage.entered.documents:,}",
                f"{sum(amount.documents for amount in stage.dropped.values()):,}",
                f"{stage.remained.documents:,}",
                format_bytes(stage.remained.bytes),
            ]
            for number, stage in enumerate(manifest.stages, start=1)
        ],
        rules=rules,
        kept=[_shown(sample) for sample in samples if sample.stage < 0],
        **WITHOUT_CHARTS,
    )
    atomic_write_text(path, page, overwrite=True)
    return path


def _shown(sample: Sample) -> dict[str, str]:
    return {
        "identity": sample.identity,
        "why": sample.detail,
        "address": sample.address,
        "text": sample.text,
        "more": f"{sample.characters - len(sample.text):,} more characters" * (sample.characters > len(sample.text)),
    }
