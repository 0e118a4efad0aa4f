"""The plan of a speedrun before it starts: the sizes that a number of minutes buys, and the seconds of each stage.

What remains of the corpus is planned from a sample of the pages that are read, and its seconds from two small corpora;
the tokenizer by the rate at which this machine trains and encodes on the texts of one of these; the ladder and
pre-training by the planner that every run has. The minutes are divided by `SHARES`.
"""

import dataclasses
import mimetypes
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from napkin.accounting.quantities import QuantityRow
from napkin.cli.common.files import open_documents
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.model.config import ModelConfig
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.units import format_share

if TYPE_CHECKING:
    from napkin.curation.engine.pipeline_file import Pipeline
    from napkin.curation.reading.input_file import InputFile
    from napkin.scaling.ladder import LadderFile

SHARES = {
    "corpus": 0.17,
    "tokenizer": 0.02,
    "tokens": 0.02,
    "ladder": 0.17,
    "pre-training": 0.24,
    "conversations": 0.01,
    "tuning": 0.12,
    "rewards": 0.12,
    "scores": 0.03,
    "chat": 0.01,
}
"""The part of the minutes that a stage may take; the rest is for planning and for the page."""
PIPELINE = (
    *("extract", "language", "gopher", "gopher-repetition", "duplicates", "near-duplicates"),
    *("duplicate-lines", "personal-data"),
)
VOCAB_SIZE = 2048
PATTERN = "qwen2"
"""Digits are pre-tokens of their own, so that sums are learned digit by digit."""
LEVELS, LEVEL_FACTOR = 3, 2.0
SHORT_MINUTES = 10
"""Below, of a machine without other programs, runs of the ladder are fewer and shorter."""
_TEXT_BYTES = 2**20
_HEAPS = 0.6
"""A text of n words has about n^0.6 different ones (Heaps 1978), which are what merging takes time for."""
_PASSES = 2
_PILOT_BYTES = (2**21, 2**23)
_CLOSE = 0.02
"""Relative tolerance: a share of the pages counts as full, and the seconds of a run as used up, once no more than this
part is left."""
_MOST_CHARACTERS = 2**19
"""The most characters that names of pages may take in pipeline.toml, whose size is limited."""

Rows = tuple[QuantityRow, ...]
Result = TypeVar("Result")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Design:
    """The sizes that were chosen."""

    corpus_share: float
    """The part of the pages' bytes that is read."""
    ladder_seconds: float
    tuning_seconds: float
    reward_seconds: float
    input_bytes: int
    """Bytes of the pages that are read."""
    core_seconds: float
    """Seconds of one core that the corpus takes, by its plan."""
    epochs: float
    """Tokens of pre-training over tokens of the corpus, by plan."""
    short: bool
    """True where the ladder has two sizes of models at each level, half the context and fewer held-out tokens."""
    crowding: float
    """Wall-clock seconds per second of processor time while this process planned: above 1 where other programs compute.
    Steps are planned for a quiet machine, and take this many times as long here."""


@dataclass(frozen=True)
class FirstPlan:
    """Everything that is decided before the first stage."""

    design: Design
    stages: dict[str, Rows]
    pipeline: "Pipeline"
    ladder: "LadderFile"
    recipe: Recipe


def base_recipe(folder: str, seed: int, *, short: bool) -> Recipe:
    """The recipe of every run of pre-training but for its shape and steps, which the ladder chooses."""
    tokens = f"{folder}/tokens"
    return Recipe(
        data=DataConfig(f"{tokens}/train.tokens", f"{tokens}/validation.tokens", f"{folder}/tokenizer.json"),
        model=ModelConfig(
            context_length=128 if short else 256, d_model=128, n_layers=2, n_heads=4, vocab_size=VOCAB_SIZE
        ),
        training=TrainingConfig(
            batch_size=4 if short else 8, evaluation_tokens=2048 if short else 4096, init_seed=seed, data_seed=seed
        ),
    )


def with_crowding(work: Callable[[], Result]) -> tuple[Result, float]:
    """Do some work of one thread, and return its result and the seconds that passed per second of a core that this
    process got."""
    begin, begin_of_core = time.perf_counter(), time.process_time()
    result = work()
    return result, max(1.0, (time.perf_counter() - begin) / max(time.process_time() - begin_of_core, 1e-3))


def seconds_row(planned: float, note: str = "") -> QuantityRow:
    """The row that every stage has."""
    return QuantityRow("seconds", "seconds", count=planned, note=note)


def make_first_plan(paths: Sequence[str], folder: str, minutes: float, seed: int, progress: Progress) -> FirstPlan:
    """Plan a speedrun; nothing is written. Raises NapkinError where no page can be read or the minutes are too few."""
    budget = 60 * minutes
    shares = {name: share * budget for name, share in SHARES.items()}
    pipeline, corpus, share, texts = _plan_corpus(paths, shares["corpus"], progress)
    planned = corpus.plan
    remained = planned.stages[-1].remained
    text_bytes = remained.bytes.value
    if text_bytes < 1:
        raise NapkinError(
            "the filters leave nothing of a sample of the pages: name other pages"
            if share == 1
            else f"--minutes is {minutes:g}, too few for this machine as it is now: the filters leave nothing of the "
            f"{format_share(share)} of the pages that it would read: use more"
        )
    progress("timing the tokenizer")
    training_seconds, encoding_seconds, bytes_per_token = _plan_tokenizer(texts, text_bytes)
    tokens = text_bytes / bytes_per_token
    stages: dict[str, Rows] = {
        "corpus": (
            seconds_row(corpus.seconds, "by two small corpora of the pages"),
            QuantityRow("bytes of pages", "bytes", count=planned.input_bytes),
            QuantityRow("documents read", "count", count=round(planned.read.documents.value)),
            QuantityRow(
                "documents that remain",
                "count",
                count=round(remained.documents.value),
                note=f"90% from {remained.documents.low:,.0f} to {remained.documents.high:,.0f}",
            ),
            QuantityRow("bytes of text that remain", "bytes", count=int(text_bytes)),
        ),
        "tokenizer": (
            seconds_row(training_seconds, "the rate of this machine on the sample; merges grow as words^0.6 (Heaps)"),
            QuantityRow("vocabulary", "count", count=VOCAB_SIZE),
        ),
        "tokens": (
            seconds_row(encoding_seconds, "the rate of this machine on the sample"),
            QuantityRow("tokens", "count", count=round(tokens)),
            QuantityRow("bytes on disk", "bytes", count=2 * round(tokens), note="two bytes per token"),
        ),
    }
    early = sum(stages[name][0].count or 0 for name in stages)
    # Pre-training gets the time that the first stages do not need.
    left = max(0.0, shares["corpus"] + shares["tokenizer"] + shares["tokens"] - early)
    crowding = corpus.crowding
    short = minutes / crowding < SHORT_MINUTES
    recipe = base_recipe(folder, seed, short=short)
    seconds = shares["ladder"], shares["pre-training"] + left
    try:
        ladder, rows, n_tokens = _plan_ladder(recipe, 2 if short else 3, *seconds, crowding, progress)
    except NapkinError as error:
        # Its message suggests options of `napkin ladder`.
        why = str(error).partition(":")[0]
        raise NapkinError(
            f"--minutes is {minutes:g}, too few for the smallest ladder on this machine as it is now ({why}): use more"
        ) from None
    stages |= rows
    for name in ("conversations", "tuning", "rewards", "scores", "chat"):
        note = f"{SHARES[name]:.0%} of the minutes"
        if name in ("tuning", "rewards"):
            note += "; its own planner chooses its steps once its model exists"
        stages[name] = (seconds_row(shares[name], note),)
    design = Design(
        share,
        shares["ladder"],
        shares["tuning"],
        shares["rewards"],
        planned.input_bytes,
        corpus.seconds * planned.workers,
        n_tokens / tokens,
        short,
        crowding,
    )
    return FirstPlan(design, stages, pipeline, ladder, recipe)


def _plan_corpus(
    paths: Sequence[str], seconds: float, progress: Progress
) -> "tuple[Pipeline, _CorpusPlan, float, list[str]]":
    """The pipeline over as many of the pages as the seconds allow, its plan, their share, and texts of a small corpus.

    What is planned is a sample of the pages that are read: whole folders can differ much from all.
    """
    from napkin.curation.engine.corpus_plan import plan_corpus
    from napkin.curation.engine.pipeline_file import InputOptions, Pipeline
    from napkin.curation.reading.input_file import InputFile, find_files
    from napkin.curation.registry import make_stage

    stages = tuple(make_stage(name, {"keep": ["en"]} if name == "language" else {}) for name in PIPELINE)
    # Shards that are small enough for all cores to have some.
    whole = Pipeline(InputOptions(tuple(paths), shard_bytes=2**23), stages)
    files = [file for file in find_files(paths) if isinstance(file, InputFile) and _may_be_page(file.name)]
    total = sum(file.bytes for file in files)
    if not total:
        raise NapkinError("the pages are empty: name pages of HTML, WARC, PDF or text")
    progress("making two small corpora")
    fixed, per_byte, texts = _pilot(whole, paths, files, total)
    if not texts:
        raise NapkinError("the filters leave nothing of a sample of the pages: name other pages of HTML, WARC or text")
    share = min(1.0, max(seconds - fixed, 0.1 * seconds) / (per_byte * total))
    pipeline = whole
    if share < 1:
        chosen, n_bytes = chosen_pages(paths, files, share)
        share = n_bytes / total
        pipeline = dataclasses.replace(whole, input=dataclasses.replace(whole.input, paths=chosen))
    plan, crowding = with_crowding(
        lambda: plan_corpus(pipeline, workers=usable_cores(), on_progress=lambda done, of, what: progress(what))
    )
    return pipeline, _CorpusPlan(plan, fixed + share * total * per_byte, crowding), share, texts


def _may_be_page(name: str) -> bool:
    """True but for names of pictures, fonts, sounds and films, which stand among pages and hold no text."""
    kind = (mimetypes.guess_type(name)[0] or "").partition("/")[0]
    return kind not in ("image", "font", "audio", "video")


def _pilot(
    whole: "Pipeline", paths: Sequence[str], files: "Sequence[InputFile]", total: int
) -> tuple[float, float, list[str]]:
    """Seconds that a corpus takes whatever its size, and per byte of its pages, by making two small ones; and texts of
    the larger.

    The corpus planner counts seconds of a core in its sample; a corpus of many small pages also takes the time that
    processes need to start, to open files and to wait for each other.
    """
    from napkin.curation.engine.corpus_files import read_manifest
    from napkin.curation.engine.pipeline_run import curate

    sizes, texts = list[tuple[int, float]](), list[str]()
    for n_bytes in _PILOT_BYTES:
        chosen, read = chosen_pages(paths, files, min(1.0, n_bytes / total))
        part = dataclasses.replace(whole, input=dataclasses.replace(whole.input, paths=chosen))
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "corpus"
            begin = time.perf_counter()
            curate(part, corpus, workers=usable_cores())
            sizes.append((read, time.perf_counter() - begin))
            if read_manifest(corpus).documents:
                texts = _first_texts(corpus)
    (small, first), (large, second) = sizes
    # Two corpora of the same few pages, or noise, would give seconds per byte that are far too low.
    per_byte = max((second - first) / max(large - small, 1), 0.25 * second / large)
    return max(0.0, second - per_byte * large), per_byte, texts


def _first_texts(corpus: Path) -> list[str]:
    """The first documents of a corpus, with as many bytes as the tokenizer is timed on."""
    texts, n_bytes = list[str](), 0
    for document in open_documents([str(corpus)]):
        if n_bytes >= _TEXT_BYTES:
            break
        texts.append(document.text)
        n_bytes += len(document.text.encode())
    return texts


@dataclass(frozen=True)
class _CorpusPlan:
    """The corpus planner's figures for the pages that are read, and the seconds that the pilots predict for them."""

    plan: Any
    seconds: float
    crowding: float


def chosen_pages(paths: Sequence[str], files: "Sequence[InputFile]", share: float) -> tuple[tuple[str, ...], int]:
    """Folders and files with about this share of the bytes of all, and their bytes.

    Every folder of the first level that has several gives its share: in the order of a hash as many whole folders
    below it as fit, so that near-duplicates, which stand side by side, stay together.
    """
    sizes, within = Counter[str](), defaultdict[str, set[str]](set)
    for file in files:
        path = file.name
        sizes[path] += file.bytes
        while "://" not in path and (parent := os.path.dirname(path)) not in ("", path):
            within[parent].add(path)
            sizes[parent] += file.bytes
            path = parent

    def order(path: str) -> bytes:
        return blake2b(path.encode(errors="surrogateescape"), digest_size=8).digest()

    given = {os.path.normpath(path) if path not in sizes else path for path in paths}
    top = sorted(given) if given <= sizes.keys() else [file.name for file in files]
    while len(top) == 1 and within[top[0]]:
        top = sorted(within[top[0]])
    # Files beside folders, or in the only folder, give their share together.
    parts = [[each] for each in top if within[each]] + [[each for each in top if not within[each]]]
    chosen, total = list[str](), 0
    for part in parts:
        wanted = share * sum(sizes[each] for each in part)
        left, waiting = wanted, sorted(part, key=order, reverse=True)
        while waiting and left > _CLOSE * wanted:
            path = waiting.pop()
            if sizes[path] <= left:
                chosen.append(path)
                left, total = left - sizes[path], total + sizes[path]
            else:
                waiting += sorted(within[path], key=order, reverse=True)
    if not chosen:
        # A share of less than any file.
        smallest = min(files, key=lambda file: (file.bytes, file.name))
        chosen, total = [smallest.name], smallest.bytes
    kept, n_characters = list[str](), 0
    for path in sorted(chosen, key=order):
        n_characters += len(path.encode(errors="surrogateescape")) + 8
        if n_characters > _MOST_CHARACTERS:
            total -= sizes[path]
        else:
            kept.append(path)
    return tuple(sorted(kept)), total


def _plan_tokenizer(texts: Sequence[str], text_bytes: float) -> tuple[float, float, float]:
    """Seconds of training and of encoding a corpus of so many bytes, and bytes per token, by those of a sample."""
    from napkin.tokenizer.bpe_training import train_bpe

    # Once for what is compiled at first use.
    train_bpe(texts[:1], 300, pattern=PATTERN, threads=usable_cores())
    sample_bytes = sum(len(text.encode()) for text in texts)
    counted: list[float] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "merging" and not counted:
            counted.append(time.perf_counter())

    begin = time.perf_counter()
    tokenizer = train_bpe(texts, VOCAB_SIZE, pattern=PATTERN, progress=progress, threads=usable_cores())
    end = time.perf_counter()
    middle = counted[0] if counted else end
    _ = tokenizer.encode(texts[0])
    start = time.perf_counter()
    n_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    encoding = time.perf_counter() - start
    factor = text_bytes / sample_bytes
    training = (middle - begin) * factor + (end - middle) * factor**_HEAPS
    return training, encoding * factor, sample_bytes / max(n_tokens, 1)


def _plan_ladder(
    base: Recipe, sizes: int, ladder_seconds: float, train_seconds: float, crowding: float, progress: Progress
) -> "tuple[LadderFile, dict[str, Rows], float]":
    """The ladder, the run after it that takes `train_seconds`, the rows of both, and the tokens of that run."""
    from napkin.scaling.ladder import Design as LadderDesign
    from napkin.scaling.ladder import Ladder, ladder_file_of
    from napkin.scaling.sweep import run_seconds

    ladder_seconds, train_seconds = ladder_seconds / crowding, train_seconds / crowding
    design = LadderDesign(levels=LEVELS, sizes=sizes, level_factor=LEVEL_FACTOR)
    ladder = Ladder.within(base, seconds=ladder_seconds, design=design, progress=progress)
    largest = max(rung.level for rung in ladder.rungs)
    times = max(1.01, train_seconds / ladder_seconds * sizes * sum(LEVEL_FACTOR**-level for level in range(LEVELS)))
    larger = ladder.rung(times * largest, progress=progress)
    for _ in range(_PASSES):
        if abs(run_seconds(larger.plan) / train_seconds - 1) < _CLOSE:
            break
        times = max(1.01, times * train_seconds / run_seconds(larger.plan))
        larger = ladder.rung(times * largest, progress=progress)
    plan = larger.plan
    n_tokens = plan.steps * plan.tokens_per_step
    crowded = f"; {crowding:.2f} times the planner's seconds, as other programs compute" if crowding > 1.05 else ""
    rows: dict[str, Rows] = {
        "ladder": (
            seconds_row(crowding * sum(run_seconds(rung.plan) for rung in ladder.rungs), f"all runs{crowded}"),
            QuantityRow("runs", "count", count=len(ladder.rungs)),
            QuantityRow("FLOPs", "FLOP", count=sum(rung.flops for rung in ladder.rungs)),
        ),
        "pre-training": (
            seconds_row(crowding * run_seconds(plan), f"steps, and the evaluation at the end{crowded}"),
            QuantityRow("parameters", "count", count=plan.ledger.parameters),
            QuantityRow("tokens", "count", count=n_tokens),
            QuantityRow("FLOPs", "FLOP", count=larger.flops),
            QuantityRow("peak bytes", "bytes", count=plan.peak_bytes),
        ),
    }
    return ladder_file_of(ladder.rungs, larger), rows, float(n_tokens)
