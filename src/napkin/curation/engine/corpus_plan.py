"""The plan of a corpus, from a sample of the input: documents, bytes and tokens after each stage, the seconds of each,
disk and dollars, with intervals; and the corpus beside its plan.

Intervals are of 90%, by the differences among the sampled files: of Student's t, which is wide where they are few, on a
logarithmic scale, and narrowed by the part of the input that was read. A stage that compares documents finds few
duplicates in a sample: what it drops of the whole is at least what it drops of the sample, and at most what it drops if
every pair of duplicates is a pair of its own. The estimate is the square root of the product, as that of the
guaranteed-error estimator of distinct values (Charikar et al. 2000), and the interval has both.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.curation.engine.corpus_files import METER, CorpusWriter, read_manifest
from napkin.curation.engine.input_sample import SampledFile, read_sample
from napkin.curation.engine.pipeline_file import Pipeline
from napkin.curation.engine.shard_work import size_of
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.registry import Stage, apply_stages
from napkin.curation.stage import CorpusStage, Record
from napkin.errors import NapkinError
from napkin.json_files import read_json

BYTES_PER_TOKEN = 4.0
"""The rule where no tokenizer is given: of English text and vocabularies of some 50,000."""
SHARE = 0.001
"""The part of the input's bytes that a plan reads."""
_DRAWS = 1000
_LOW, _HIGH = 0.05, 0.95
_SEED = 20_11
_WARM_UP_RECORDS = 16
_WARM_UP_BYTES = 2**18
"""The size of the longest document on which a stage is warmed up."""
_EMPTY = Record("")

PerFile = NDArray[np.float64]
"""[sampled files]: an amount of what was read of each."""


@dataclass(frozen=True)
class Estimate:
    """A figure with the interval that has the true one in nine of ten cases."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Flow:
    """Documents, bytes and tokens at one place of a pipeline."""

    documents: Estimate
    bytes: Estimate
    tokens: Estimate


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and what remains after it."""

    name: str
    remained: Flow
    seconds: float
    """Seconds of one core."""
    dropped: dict[str, float] = field(default_factory=dict)
    """Documents that each rule drops, where a stage looks at one document at a time."""
    compares: bool = False
    """True if the stage compares documents with each other, so that a sample tells little."""


@dataclass(frozen=True)
class CorpusPlan:
    """The prediction of a corpus. Seconds are of one core of this machine."""

    input_files: int
    input_bytes: int
    sampled_files: int
    sampled_share: float
    """The part of the documents' bytes that was read."""
    tokens_are_counted: bool
    """True if a tokenizer counted them; otherwise a token is `BYTES_PER_TOKEN` bytes."""
    read: Flow
    stages: tuple[PlannedStage, ...]
    read_seconds: float
    write_seconds: float
    workers: int
    corpus_bytes: float
    """Bytes of the documents as they are written."""
    dollars: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds from start to end, with all workers busy."""
        work = self.read_seconds + self.write_seconds + sum(stage.seconds for stage in self.stages)
        return work / self.workers


class _Totals:
    """Amounts of sampled files as amounts of the input, and how sure they are."""

    def __init__(self, sample: Sequence[SampledFile], share: float) -> None:
        self._weights = np.array([each.weight for each in sample])
        n = len(sample)
        generator = np.random.Generator(np.random.PCG64(_SEED))
        self._error = (n / max(1, n - 1) * max(0.0, 1 - share)) ** 0.5
        self._draws = generator.standard_t(max(1, n - 1), size=_DRAWS)
        # The position of a comparing stage within its interval, the same for documents, bytes and tokens.
        self.places = generator.uniform(size=_DRAWS)

    def __call__(self, amounts: PerFile, factor: float = 1.0, factors: PerFile | float = 1.0) -> Estimate:
        """The total of an amount times `factor`; `factors` has that of each draw."""
        weighted = amounts * self._weights
        total = float(weighted.sum())
        if not total:
            return Estimate(0.0, 0.0, 0.0)
        error = self._error * float(((weighted - weighted.mean()) ** 2).sum()) ** 0.5
        # Amounts per file are skewed: their sums are nearer to a log-normal distribution than to a normal one.
        low, high = np.quantile(total * np.exp(self._draws * error / total) * factors, [_LOW, _HIGH])
        value = total * factor
        return Estimate(value, min(float(low), value), max(float(high), value))


def plan_corpus(
    pipeline: Pipeline,
    *,
    share: float = SHARE,
    count_tokens: Callable[[str], int] | None = None,
    workers: int = 1,
    dollars_per_core_hour: float | None = None,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
) -> CorpusPlan:
    """Predict what a pipeline makes of its input, from a sample of it.

    `share` of the input's bytes are read, at least 8 MB and at most 268 MB of them. `count_tokens` counts those of a
    text; None takes the rule of `BYTES_PER_TOKEN`. `on_progress` is called with the number of steps that are done, that
    of all, and what is done.

    Raises NapkinError where there is no input, none of it can be read, or a stage cannot be run.
    """
    if not 0 < share <= 1:
        raise NapkinError(f"a sample of {share:g} of the input is not possible: use a share above 0, at most 1")
    files = [file for file in find_files(pipeline.input.paths, pipeline.input.format) if isinstance(file, InputFile)]
    input_bytes = sum(file.bytes for file in files)
    sample = read_sample(
        files, pipeline.input, share, lambda done, of: on_progress(done, of, f"reading a sample, {done:,} of {of:,}")
    )
    sample = [each for each in sample if each.read_bytes]
    records = [(number, record) for number, each in enumerate(sample) for record in each.records]
    if not records:
        raise NapkinError("no document of the sample can be read: name other input, or its format")
    text_bytes = np.array([sum(size_of(record) for record in each.records) for each in sample])
    # Files that were read in vain, such as binary files, are not part of the sample.
    sampled_share = float(text_bytes.sum() / (text_bytes * [each.weight for each in sample]).sum())
    run = _SampleRun(sample, count_tokens, sampled_share, workers)
    read = run.flow(records)
    stages: list[PlannedStage] = []
    for number, stage in enumerate(pipeline.stages):
        on_progress(number, len(pipeline.stages), f"sample: {stage.name}")
        records, planned = run.through(records, stage)
        stages.append(planned)
    write_seconds, written = _write(pipeline, [record for _, record in records])
    remained = stages[-1].remained if stages else read
    per_byte = written / max(1, sum(size_of(record) for _, record in records))
    plan = CorpusPlan(
        input_files=len(files),
        input_bytes=input_bytes,
        sampled_files=len(sample),
        sampled_share=sampled_share,
        tokens_are_counted=count_tokens is not None,
        read=read,
        stages=tuple(stages),
        read_seconds=sum(each.seconds * each.weight for each in sample),
        write_seconds=write_seconds * remained.bytes.value / max(1, sum(size_of(record) for _, record in records)),
        workers=workers,
        corpus_bytes=per_byte * remained.bytes.value,
    )
    if dollars_per_core_hour is None:
        return plan
    if not dollars_per_core_hour >= 0:
        raise NapkinError(f"{dollars_per_core_hour:g} dollars per core and hour are not possible: use 0 or more")
    return replace(plan, dollars=plan.seconds * plan.workers / 3600 * dollars_per_core_hour)


class _SampleRun:
    """Runs stages on the sample, and extrapolates to the whole."""

    def __init__(
        self, sample: Sequence[SampledFile], count_tokens: Callable[[str], int] | None, share: float, workers: int
    ) -> None:
        self._n_files, self._workers = len(sample), workers
        self._totals = _Totals(sample, share)
        self._count_tokens, self._share = count_tokens, share
        self._kept, self._kept_of_draws = [1.0] * 3, np.ones((3, _DRAWS))
        """The parts of documents, bytes and tokens that comparing stages leave, as the sample says, and for each
        draw."""

    def flow(self, records: Sequence[tuple[int, Record]]) -> Flow:
        """The flow after the stages so far, of which `records` remain of the sample."""
        each = zip(self._amounts(records), self._kept, self._kept_of_draws, strict=True)
        return Flow(*(self._totals(amounts, kept, kept_of_draws) for amounts, kept, kept_of_draws in each))

    def through(self, records: list[tuple[int, Record]], stage: Stage) -> tuple[list[tuple[int, Record]], PlannedStage]:
        """The records that remain, and the planned stage."""
        files = {record.identity: number for number, record in records}
        records = self._thinned(records, getattr(stage, "planned_on", 0))
        before = sum(size_of(record) for _, record in records)
        whole_before = self._kept[1] * self._totals(self._amounts(records)[1]).value
        drops: dict[str, PerFile] = {}

        def dropped(record: Record, _: str, why: object) -> None:
            rule = str(getattr(why, "rule", why))
            drops.setdefault(rule, np.zeros(self._n_files))[files[record.identity]] += 1

        with _without_its_index(stage) as used:
            self._warm_up([record for _, record in records], used, whole_before)
        with _without_its_index(stage) as used:
            begin = time.perf_counter()
            remaining = list(apply_stages((record for _, record in records), [used], dropped))
            seconds = time.perf_counter() - begin
        of_files = [(files[record.identity], record) for record in remaining]
        compares = isinstance(stage, CorpusStage)
        if compares:
            self._compare(records, of_files)
        planned = PlannedStage(
            stage.name,
            self.flow(of_files),
            seconds * whole_before / max(1, before),
            {} if compares else {rule: self._kept[0] * self._totals(each).value for rule, each in drops.items()},
            compares,
        )
        return of_files, planned

    def _thinned(self, records: list[tuple[int, Record]], most: int) -> list[tuple[int, Record]]:
        """At most this many of the records, evenly chosen, for a slow stage; 0 is all. Those that remain stand for the
        others."""
        if not most or len(records) <= most:
            return records
        chosen = [records[len(records) * place // most] for place in range(most)]
        for number, (was, remains) in enumerate(zip(self._amounts(records), self._amounts(chosen), strict=True)):
            factor = self._totals(was).value / max(self._totals(remains).value, 1e-30)
            self._kept[number] *= factor
            self._kept_of_draws[number] *= factor
        return chosen

    def _warm_up(self, records: Sequence[Record], stage: Stage, whole_bytes: float) -> None:
        """Run a stage on some of the sample, so that what is loaded and compiled at first use is not timed."""
        if getattr(stage, "planned_on", 0):
            shortest = min(records, key=size_of, default=_EMPTY)
            list(apply_stages([replace(shortest, fields={**shortest.fields}, trace=[*shortest.trace])], [stage]))
            return
        if type(stage).__module__.startswith("napkin.curation.filters."):
            from napkin.curation.filters.document_counts import expect_bytes

            # In a large corpus, nearly everything is counted by machine code.
            expect_bytes(int(whole_bytes / self._workers))
        chosen = {id(record): record for record in records[:: max(1, len(records) // _WARM_UP_RECORDS)]}
        longest: dict[str, Record] = {}
        for record in records:
            if size_of(longest.get(record.media_type, _EMPTY)) <= size_of(record) <= _WARM_UP_BYTES:
                longest[record.media_type] = record
        chosen |= {id(record): record for record in longest.values()}
        # Twice, so that a stage that compares finds something.
        copies = (
            replace(record, identity=f"{record.identity}{again}", fields={**record.fields}, trace=[*record.trace])
            for again in ("", " again")
            for record in chosen.values()
        )
        list(apply_stages(copies, [stage]))

    def _amounts(self, records: Sequence[tuple[int, Record]]) -> NDArray[np.float64]:
        """Documents, bytes and tokens of each sampled file: [3, files]."""
        amounts = np.zeros((3, self._n_files))
        for file, record in records:
            n_bytes = size_of(record)
            tokens = self._count_tokens(record.text) if self._count_tokens else n_bytes / BYTES_PER_TOKEN
            amounts[:, file] += (1, n_bytes, tokens)
        return amounts

    def _compare(self, before: Sequence[tuple[int, Record]], after: Sequence[tuple[int, Record]]) -> None:
        """Note what a stage that compares documents leaves of the whole, beyond what it leaves of the sample."""
        from scipy import stats

        n, n_dropped = len(before), len(before) - len(after)
        # Where this few were found, more may have been expected.
        likely = float(stats.chi2.ppf(_HIGH, 2 * (n_dropped + 1))) / 2
        for number, (was, remains) in enumerate(zip(self._amounts(before), self._amounts(after), strict=True)):
            total = self._totals(was).value
            kept = self._totals(remains).value / total if total else 1.0
            least = 1 - kept
            if kept <= 0 or self._share >= 1:
                continue
            smallest = max(least, 0.5 / n)
            most = min(1.0, max(least, 1 / n) * likely / max(1, n_dropped) / self._share)
            most = max(smallest, least + (most - least) * (1 - self._share))
            estimate = (smallest * most) ** 0.5
            drawn = smallest ** (1 - self._totals.places) * most**self._totals.places
            self._kept[number] *= (1 - estimate) / kept
            self._kept_of_draws[number] *= (1 - drawn) / kept


@contextmanager
def _without_its_index(stage: Stage) -> Iterator[Stage]:
    """The stage with an index of its own that has what is in the user's: a sample must not get into that."""
    index = getattr(stage, "index", "")
    if not index:
        yield stage
        return
    with tempfile.TemporaryDirectory() as folder:
        for each in Path(index).iterdir() if Path(index).is_dir() else ():
            if not each.name.startswith("."):
                (Path(folder) / each.name).symlink_to(each.resolve())
        yield replace(cast(Any, stage), index=folder)


def _write(pipeline: Pipeline, records: Sequence[Record]) -> tuple[float, int]:
    """Seconds and bytes of writing the documents that remain of a sample."""
    # The first is not counted: libraries are imported at first use.
    for some in (records[:1], records):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            writer = CorpusWriter(Path(folder), 0, pipeline.output.format, pipeline.output.shard_bytes)
            for record in some:
                writer.write(record, record.text.encode())
            writer.close()
            seconds, n_bytes = time.perf_counter() - begin, sum(file.file_bytes for file in writer.files)
    return seconds, n_bytes


@dataclass(frozen=True)
class ReconciledRow:
    """A planned figure and the metered one."""

    place: str
    what: str
    planned: Estimate
    metered: float

    @property
    def is_inside(self) -> bool:
        """True if the metered figure is in the planned interval."""
        return self.planned.low <= self.metered <= self.planned.high


@dataclass(frozen=True)
class Reconciliation:
    """Plan and meter of a corpus."""

    rows: tuple[ReconciledRow, ...]
    stage_seconds: tuple[tuple[str, float, float], ...]
    """Names of stages that look at one document at a time, with planned and metered seconds of one core."""


def read_plan(path: Path) -> CorpusPlan:
    """The plan that `napkin data plan --out` wrote. Raises NapkinError for another file."""
    plan = read_json(path, CorpusPlan)
    if plan is None:
        raise NapkinError(f"'{path}' is not a plan: make one with `napkin data plan PIPELINE --out {path}`")
    return plan


def reconcile(corpus: Path, plan: CorpusPlan) -> Reconciliation:
    """Compare a finished corpus with a plan. Raises NapkinError where it has other stages than the plan."""
    manifest = read_manifest(corpus)
    planned, made = [stage.name for stage in plan.stages], [stage.name for stage in manifest.stages]
    if planned != made:
        raise NapkinError(
            f"the plan is for the stages {', '.join(planned) or 'none'}, '{corpus}' was made by "
            f"{', '.join(made) or 'none'}: name the plan of its pipeline"
        )
    places = [("read", plan.read, manifest.input.read)]
    places += [(old.name, old.remained, new.remained) for old, new in zip(plan.stages, manifest.stages, strict=True)]
    rows: list[ReconciledRow] = []
    for place, before, after in places:
        rows.append(ReconciledRow(place, "documents", before.documents, after.documents))
        rows.append(ReconciledRow(place, "bytes", before.bytes, after.bytes))
    try:
        seconds = msgspec.json.decode((corpus / METER).read_bytes(), type=dict[str, list[float]])["stage_seconds"]
    except (OSError, msgspec.MsgspecError, KeyError):
        seconds = []
    both = zip(plan.stages, seconds, strict=False)
    alone = ((stage.name, stage.seconds, metered) for stage, metered in both if not stage.compares)
    return Reconciliation(tuple(rows), tuple(alone))
