"""What the training loop adds to its steps: beside the bare `TrainState.step` on the same batches, in the same minutes.

A run is trained by `napkin.training.run.train_run` as `napkin train` calls it: metrics, progress line, live report, a
checkpoint each 10 steps. After each of its steps a second train state takes the bare step of the same batch,
untimed by the first; so whatever else the machine does falls on both. Two witnesses of the overhead: by the parts that
the loop itself meters, all of a step's time that is not forward, backward, optimizer, evaluation or the copy for a
checkpoint; and, independent of them, the median difference between the loop's step and the bare one.

    python benchmarks/loop_overhead.py        # some three minutes on two quiet cores

The table is also written to benchmarks/results/.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import napkin.training.loop
from library_text import library_text
from napkin.accounting.ledger import METERED_STEP
from napkin.accounting.metering import Stopwatch
from napkin.cli.common.progress import progress_line
from napkin.model.config import ModelConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.report.page import live_report
from napkin.runs.metrics import StepMetrics
from napkin.train_step.step import build_train_state
from napkin.training.pretraining import Pretraining
from napkin.training.run import create_run, train_run
from napkin.units import format_seconds
from result_files import heading, write_result
from turns import BRACKETS, ratio_spread, spread

VOCAB_SIZE, CHECKPOINT_EVERY = 8192, 10
COMPUTED = ("forward", "backward", "optimizer")
NOT_THE_LOOP = (*COMPUTED, "evaluation", "checkpoints", "metering")
# As in benchmarks/training.py, and one whose steps are so short that whatever is done once per step shows most.
MODELS: dict[str, tuple[ModelConfig, int]] = {
    "d 256, 4 layers, 256 × 16": (
        ModelConfig(
            VOCAB_SIZE, 256, d_model=256, n_layers=4, n_heads=4, positions="learned", norm="layer",
            feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
        ),
        16,
    ),
    "d 64, 2 layers, 128 × 8": (ModelConfig(VOCAB_SIZE, 128, d_model=64, n_layers=2, n_heads=2), 8),
}  # fmt: skip


class Diary(Stopwatch):
    """The loop's stopwatch; it also keeps when each part was."""

    parts: ClassVar[list[tuple[str, float, float]]] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what happens in the block, as a part of that name."""
        begin = time.perf_counter()
        try:
            with super().__call__(part):
                yield
        finally:
            self.parts.append((part, begin, time.perf_counter()))


def main() -> None:
    """Train both models; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=[42, 202], help="of the larger and of the tiny model")
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    lines = heading(
        "What the loop adds to a step",
        "The loop's overhead is all of a step's time but forward, backward, optimizer, evaluation and the copy for a "
        "checkpoint; waiting for data is a part of it. A checkpoint was written each "
        f"{CHECKPOINT_EVERY} steps, a line of metrics and of progress each step. {BRACKETS}",
    )
    data = library_text(VOCAB_SIZE)
    setattr(napkin.training.loop, "Stopwatch", Diary)  # noqa: B010
    lines += [
        "| model | step | overhead | of the step | of it data | of the step | loop − bare step | of the step | "
        "a checkpoint takes | of all steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, (model, batch_size)), steps in zip(MODELS.items(), options.steps, strict=True):
        training = TrainingConfig(
            steps=steps, batch_size=batch_size, precision=options.precision, checkpoint_every=CHECKPOINT_EVERY
        )
        recipe = Recipe(data=data, model=model, optimizer=OptimizerConfig(learning_rate=1e-3), training=training)
        lines.append(f"| {name} | {overhead(recipe)} |")
    print("\n".join(lines[-len(MODELS) - 2 :]))
    write_result("loop-overhead", lines)


def overhead(recipe: Recipe) -> str:
    """The cells of one model's line."""
    with tempfile.TemporaryDirectory() as folder:
        steps, checkpoints = watched_steps(recipe, Path(folder) / "run")
    whole, bare, loop, data = ([step[part] for step in steps] for part in ("whole", "bare", "loop", "data"))
    saved = [step["checkpoints"] for step in checkpoints]
    cells = [
        spread(whole, format_seconds),
        spread(loop, format_seconds),
        ratio_spread(loop, whole, "{:.2%}".format),
        spread(data, format_seconds),
        ratio_spread(data, whole, "{:.2%}".format),
        spread([one - other for one, other in zip(whole, bare, strict=True)], _signed),
        ratio_spread([one - other for one, other in zip(whole, bare, strict=True)], bare, "{:.2%}".format),
        spread(saved, format_seconds),
        f"{sum(saved) / sum(step['whole'] for step in (*steps, *checkpoints)):.2%}",
    ]
    return " | ".join(cells)


def watched_steps(recipe: Recipe, folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds of each step, by part; those without a checkpoint, and those with one. The first ones are left out."""
    Diary.parts = []
    preparation, run = create_run(recipe, folder)
    bare = build_train_state(preparation.resolved)
    windows: list[tuple[float, float, float]] = []
    begin = 0.0

    def on_step(metrics: StepMetrics) -> None:
        nonlocal begin
        line(metrics.step, recipe.training.steps, f"loss {metrics.loss:.3f}")
        live()
        end = time.perf_counter()
        assert isinstance(preparation, Pretraining)
        batch = preparation.batches[metrics.step - 1]
        start = time.perf_counter()
        loss, _ = bare.step(metrics.step - 1, *batch)
        loss.item()
        windows.append((begin, end, time.perf_counter() - start))
        begin = time.perf_counter()

    with progress_line("training") as line, live_report(run.path, print) as live:
        train_run(preparation, run, on_step=on_step)
    found = [_by_part(*window) for window in windows[METERED_STEP + 1 : -1]]
    return [step for step in found if not step["checkpoints"]], [step for step in found if step["checkpoints"]]


def _by_part(begin: float, end: float, bare: float) -> dict[str, float]:
    spent: dict[str, Any] = dict.fromkeys((*NOT_THE_LOOP, "data"), 0.0)
    for part, start, stop in Diary.parts:
        if begin <= start and stop <= end:
            spent[part] += stop - start
    whole = end - begin
    return {**spent, "whole": whole, "loop": whole - sum(spent[part] for part in NOT_THE_LOOP), "bare": bare}


def _signed(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0 else f"−{format_seconds(-seconds)}"


if __name__ == "__main__":
    main()
