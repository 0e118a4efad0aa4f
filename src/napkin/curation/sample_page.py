"""A page with samples of what each rule dropped, beside samples of what remained."""

from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.manifest import Manifest, read_manifest
from napkin.curation.samples import Sample
from napkin.curation.shard_log import SAMPLES
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.report.colours import COLOURS
from napkin.report.flow_picture import FlowStep, flow_svg
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.units import format_bytes, format_share

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
