"""Corpora of `napkin data` below a folder: what each stage dropped, documents to read, and thresholds to move.

What a threshold does is computed on the documents that the corpus keeps as samples, with the text that they had when
they were dropped, or that remained; of longer texts their beginning. Each rule's samples stand for all
documents that it dropped, so that shares of the sample are weighted by the rules' counts.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.engine.corpus_files import LONGEST_TEXT, METER, NAME, SAMPLES, Manifest, Sample, read_manifest
from napkin.curation.engine.document_story import find_story, read_samples
from napkin.curation.filters.document_stages import Length
from napkin.curation.filters.rule_passages import Passage, passages_of
from napkin.curation.filters.web_rules import Comparison, RuleStage
from napkin.curation.registry import make_stage, stage_options
from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.json_files import read_if_present
from napkin.studio.named_paths import NamedPaths

MOST_CORPORA = 500
REMAINS = -1
"""The stage of samples that remained."""
Key = tuple[int, str]
"""A stage's number and a rule; of what remained, REMAINS and no rule."""


def corpora_below(folder: StrPath) -> NamedPaths:
    """The corpora with samples below a folder."""
    return NamedPaths(
        Path(folder), "corpus", lambda path: (path / NAME).is_file() and (path / SAMPLES).is_file(), MOST_CORPORA
    )


def flow(corpus: Path) -> dict[str, Any]:
    """The flow of documents: how many entered a pipeline, each stage dropped by each rule, and remained, with the
    seconds of each stage."""
    manifest = read_manifest(corpus)
    n_samples = Counter((sample.stage, sample.rule) for sample in _samples(corpus))
    seconds = _seconds(corpus)
    stages = [
        {
            "name": stage.name,
            "entered": stage.entered,
            "remained": stage.remained,
            "dropped": [
                {"rule": rule, "documents": amount.documents, "bytes": amount.bytes, "samples": n_samples[number, rule]}
                for rule, amount in sorted(stage.dropped.items(), key=lambda each: -each[1].documents)
            ],
            "seconds": seconds[number] if number < len(seconds) else None,
            "has_thresholds": _has_thresholds(manifest, number),
        }
        for number, stage in enumerate(manifest.stages)
    ]
    return {
        "read": manifest.input.read,
        "files": manifest.input.files,
        "stages": stages,
        "set_aside": manifest.set_aside,
        "documents": manifest.documents,
        "bytes": manifest.text_bytes,
        "samples": n_samples[REMAINS, ""],
    }


def documents(corpus: Path, stage: int, rule: str) -> list[dict[str, Any]]:
    """The samples of a rule of a stage, or of what remained; their texts in parts, of which some are the reason."""
    return [
        {
            "identity": sample.identity,
            "address": sample.address,
            "why": sample.detail,
            "parts": _parts(sample.text, passages_of(rule, sample.detail, sample.text)),
            "more": max(0, sample.characters - len(sample.text)),
        }
        for sample in _samples(corpus)
        if (sample.stage, sample.rule) == (stage, rule)
    ]


def story(corpus: Path, identity: str) -> dict[str, Any]:
    """A document's way through the pipeline. Raises NapkinError where the corpus has no such document."""
    return msgspec.to_builtins(find_story(corpus, identity))


def thresholds(corpus: Path, number: int) -> dict[str, Any]:
    """The rules of a stage with their limits and options, and the values of the sampled documents that entered it.

    Raises NapkinError for a stage whose rules are not comparisons with a threshold.
    """
    stage, manifest = _stage(corpus, number), read_manifest(corpus)
    samples = _entered(corpus, number)
    weights = _weights(corpus, manifest)
    options = _options_of_rules(stage)
    found = [[*stage.comparisons(stage.counted(sample.text))] for sample in samples]
    rules = [
        {"rule": rule, "how": how, "limit": limit, "option": option, "index": index}
        for (rule, _, how, limit), (option, index) in zip(stage.comparisons(stage.counted("")), options, strict=True)
    ]
    return {
        "stage": stage.name,
        "rules": rules,
        "longest": LONGEST_TEXT,
        "entered": manifest.stages[number].entered.documents,
        "documents": [
            {
                "identity": sample.identity,
                "values": [value for _, value, _, _ in comparisons],
                "weight": weights[sample.stage, sample.rule],
                "is_cut": sample.characters > len(sample.text),
                "before": sample.rule if sample.stage == number else None,
            }
            for sample, comparisons in zip(samples, found, strict=True)
        ],
    }


def tried(corpus: Path, number: int, options: dict[str, Any]) -> list[str | None]:
    """The rule by which the stage, with some options changed, drops each document of `thresholds`; None for those that
    it lets go on. Raises NapkinError for options that the stage does not have."""
    stage = _stage(corpus, number)
    changed: Any = make_stage(stage.name, stage_options(stage) | options)
    results = (changed.apply(Record(each.identity, each.text)) for each in _entered(corpus, number))
    return [result.rule if isinstance(result, Dropped) else None for result in results]


def text_of(corpus: Path, number: int, identity: str, rule: str) -> dict[str, Any]:
    """A sampled document that entered a stage, with what a rule counts in it."""
    for sample in _entered(corpus, number):
        if sample.identity == identity:
            return {"parts": _parts(sample.text, passages_of(rule, "", sample.text) if rule else [])}
    raise NapkinError(f"the samples of '{corpus}' have no document '{identity[:200]}'")


def _samples(corpus: Path) -> list[Sample]:
    try:
        changed = (corpus / SAMPLES).stat().st_mtime
    except OSError:
        changed = 0.0
    return _read(corpus, changed)


@functools.lru_cache(maxsize=4)
def _read(corpus: Path, changed: float) -> list[Sample]:
    return read_samples(corpus)


def _entered(corpus: Path, number: int) -> list[Sample]:
    """The samples that a stage saw: what it or a later one dropped, and what remained."""
    return [sample for sample in _samples(corpus) if sample.stage >= number or sample.stage == REMAINS]


def _weights(corpus: Path, manifest: Manifest) -> dict[Key, float]:
    """How many documents each sample represents, by stage and rule."""
    counts: dict[Key, int] = {(REMAINS, ""): manifest.documents}
    for number, stage in enumerate(manifest.stages):
        counts |= {(number, rule): amount.documents for rule, amount in stage.dropped.items()}
    sampled = Counter((sample.stage, sample.rule) for sample in _samples(corpus))
    return {key: counts.get(key, 0) / n for key, n in sampled.items()}


def _has_thresholds(manifest: Manifest, number: int) -> bool:
    try:
        return any(option for option, _ in _options_of_rules(_made(manifest, number)))
    except NapkinError:
        return False


def _stage(corpus: Path, number: int) -> Any:
    return _made(read_manifest(corpus), number)


def _made(manifest: Manifest, number: int) -> Any:
    """A stage of rules, which has `counted`, `comparisons` and `apply`. Raises NapkinError for another."""
    if not 0 <= number < len(manifest.stages):
        raise NapkinError(f"stage is {number}: use 0 to {len(manifest.stages) - 1}")
    options = dict(manifest.pipeline["stage"][number])
    name = options.pop("name")
    stage = make_stage(name, options)
    if not isinstance(stage, RuleStage | Length):
        raise NapkinError(f"the stage '{name}' has no thresholds that can be moved: choose another")
    return stage


def _options_of_rules(stage: Any) -> list[tuple[str | None, int | None]]:
    """The option that is the limit of each rule, and its place in an option of several numbers; None for a rule whose
    limit is fixed."""
    counts = stage.counted("")
    limits = _limits(stage.comparisons(counts))
    options: list[tuple[str | None, int | None]] = [(None, None)] * len(limits)
    for option, value in stage_options(stage).items():
        for index, changed in _changes(value):
            other = _limits(dataclasses.replace(stage, **{option: changed}).comparisons(counts))
            for place, (before, after) in enumerate(zip(limits, other, strict=False)):
                if before != after:
                    options[place] = option, index
    return options


def _changes(value: Any) -> Iterator[tuple[int | None, Any]]:
    """Another value of an option, which is allowed if the given one is; of several numbers, each changed in turn."""
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            for _, changed in _changes(each):
                yield index, (*value[:index], changed, *value[index + 1 :])
    elif isinstance(value, float):
        yield None, value / 2 if value else 0.5
    elif isinstance(value, int) and not isinstance(value, bool):
        yield None, value + 1


def _limits(comparisons: Any) -> list[float]:
    comparisons_left: list[Comparison] = [*comparisons]
    return [limit for _, _, _, limit in comparisons_left]


def _parts(text: str, passages: list[Passage]) -> list[tuple[str, bool]]:
    """A text in parts, and whether each is one of the passages."""
    parts, at = [], 0
    for begin, end in passages:
        parts += [(text[at:begin], False), (text[begin:end], True)]
        at = end
    return [part for part in [*parts, (text[at:], False)] if part[0]]


def _seconds(corpus: Path) -> list[float]:
    try:
        return msgspec.json.decode(read_if_present(corpus / METER) or b"{}", type=_Meter).stage_seconds
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


class _Meter(msgspec.Struct):
    stage_seconds: list[float] = []
