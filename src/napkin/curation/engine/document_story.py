"""A document's story in a corpus: found by its identity in the files of one shard.

A page with samples of what each rule dropped, beside samples of what remained.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.engine.corpus_folder import DOCUMENTS, DROPPED_FOLDER, INPUTS
from napkin.curation.engine.corpus_writer import Manifest, read_manifest
from napkin.curation.engine.samples import Sample
from napkin.curation.engine.shard_work import SAMPLES, SET_ASIDE
from napkin.curation.reading.bounded_stream import decompressed
from napkin.curation.stage import TraceEntry
from napkin.errors import NapkinError, suggestion
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.report.xy_picture import COLOURS, FlowStep, flow_svg
from napkin.units import format_bytes, format_share

_RATIO = 2**20
"""The files are the project's own."""
_MOST_NAMES = 10_000
_LONGEST = 500


@dataclass(frozen=True)
class Story:
    """A document's way through a pipeline: its source, what each stage did to it, and how it ended."""

    identity: str
    ending: str
    """How it ended, in words: its file, the rule that dropped it, or why it was set aside."""
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
        from napkin.errors import import_extra

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


GENERATOR = b'<meta name="generator" content="napkin data">'


def write_sample_page(corpus: Path, path: Path) -> Path:
    """Write the page of a finished corpus to `path`, replacing an earlier one, and return the path.

    Raises NapkinError where the corpus is none, or `path` is anything but such a page.
    """
    manifest = read_manifest(corpus)
    refuse_unmarked(path, GENERATOR, "a page that `napkin data samples` wrote")
    with open(corpus / SAMPLES, "rb") as file:
        samples = [msgspec.json.decode(line, type=Sample) for line in file]
    rules = _rules(manifest, samples)
    kept = [_shown(sample) for sample in samples if sample.stage < 0]
    page = render(
        "samples.html",
        colours=COLOURS,
        title=corpus.absolute().name,
        sections={"stages": "What each stage did"} | {rule["id"]: rule["title"] for rule in rules},
        statement=f"{manifest.documents:,} of {manifest.input.read.documents:,} documents remain, "
        f"{format_bytes(manifest.text_bytes)} of text.",
        flow=_flow(manifest),
        rows=_stage_rows(manifest),
        rules=rules,
        kept=kept,
        **WITHOUT_CHARTS,
    )
    atomic_write_text(path, page, overwrite=True)
    return path


def _flow(manifest: Manifest) -> str:
    """The picture of what went through the stages, in documents."""
    steps = [
        FlowStep(
            stage.name,
            stage.remained.documents,
            {rule: float(amount.documents) for rule, amount in stage.dropped.items()},
        )
        for stage in manifest.stages
    ]
    return flow_svg(
        "What entered, what each stage dropped, what remained", manifest.input.read.documents, steps, "documents"
    )


def _rules(manifest: Manifest, samples: list[Sample]) -> list[dict[str, Any]]:
    """Each rule that dropped documents, by stage, with its samples."""
    rules: list[dict[str, Any]] = []
    for number, stage in enumerate(manifest.stages):
        for rule, amount in stage.dropped.items():
            share = format_share(amount.documents / stage.entered.documents)
            rules.append(
                {
                    "id": f"rule-{len(rules) + 1}",
                    "title": f"{stage.name}: {rule}",
                    "what": f"{amount.documents:,} documents, {share} of those that entered the stage, "
                    f"{format_bytes(amount.bytes)}",
                    "samples": [_shown(sample) for sample in samples if (sample.stage, sample.rule) == (number, rule)],
                }
            )
    return rules


def _shown(sample: Sample) -> dict[str, str]:
    return {
        "identity": sample.identity,
        "why": sample.detail,
        "address": sample.address,
        "text": sample.text,
        "more": f"{sample.characters - len(sample.text):,} more characters" * (sample.characters > len(sample.text)),
    }


def _stage_rows(manifest: Manifest) -> list[list[str]]:
    return [
        [
            f"{number}. {stage.name}",
            f"{stage.entered.documents:,}",
            f"{sum(amount.documents for amount in stage.dropped.values()):,}",
            f"{stage.remained.documents:,}",
            format_bytes(stage.remained.bytes),
        ]
        for number, stage in enumerate(manifest.stages, start=1)
    ]
