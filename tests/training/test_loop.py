import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from napkin.accounting.pricing import ALONE
from napkin.checkpoint.folder import checkpoint_bytes, checkpoint_paths, read_checkpoint
from napkin.errors import NapkinError
from napkin.hardware.competition import Watch
from napkin.hardware.conditions import Conditions
from napkin.planning.step.plan_file import writes_in_background
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.runs.metrics import StepMetrics, read_metrics
from napkin.runs.run_folder import RunFolder
from napkin.training.pretraining import Pretraining
from napkin.training.run import Outcome, create_run, open_run, train_run
from oracles.clock import Clock, ProcessorClock
from oracles.tiny_run import TRAINING, tiny_recipe, write_tiny_text

STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_tiny_text(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[Clock]:
    """A second for each reading, in the loop and its stopwatch."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as context:
        for module in ("napkin.training.loop", "napkin.training.metered_step", "napkin.accounting.metering"):
            context.setattr(f"{module}.time", clock)
        yield clock


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, RunFolder, Pretraining]:
    """A run that was never stopped; copy it before you change it."""
    recipe = tiny_recipe(text, steps=STEPS, checkpoint_every=5, evaluate_every=4, keep_best=True)
    preparation, run = create_run(recipe, tmp_path_factory.mktemp("finished") / "run")
    assert isinstance(preparation, Pretraining)
    return train_run(preparation, run), run, preparation


def lines(run: RunFolder) -> list[StepMetrics]:
    return list(read_metrics(run.path / "metrics.jsonl"))


def losses(run: RunFolder) -> list[tuple[int, float, float, float | None]]:
    return [(line.step, line.loss, line.gradient_norm, line.validation_loss) for line in lines(run)]


def stop_after(step: int) -> Callable[[StepMetrics], None]:
    """What Ctrl-C and `kill` do, from within."""
    return lambda metrics: signal.raise_signal(signal.SIGTERM) if metrics.step == step else None


def plan_of(preparation: Pretraining) -> Plan:
    assert preparation.plan is not None
    return preparation.plan


def meters(table: list) -> dict[str, object]:
    return {row.quantity: row.meter for row in table}


@pytest.mark.thorough
def test_a_run_ends_with_its_books_kept(finished: tuple[Outcome, RunFolder, Pretraining]) -> None:
    outcome, run, preparation = finished
    assert (outcome.first_step, outcome.step, outcome.interrupted_by) == (0, STEPS, None)
    assert outcome.checkpoint == run.checkpoints / f"step-{STEPS:08d}"
    assert outcome.measurement is not None
    assert outcome.measurement.steps == STEPS
    assert outcome.measurement.flops == plan_of(preparation).ledger.flops
    assert None not in meters(outcome.table).values()
    assert {"plan.json", "measurement.json", "metrics.jsonl"} <= {path.name for path in run.path.iterdir()}


@pytest.mark.thorough
@pytest.mark.parametrize("others", [0, 3])
def test_a_run_beside_other_processes_tells_the_seconds_of_a_step_without_them(
    others: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation, run = create_run(tiny_recipe(text, steps=6), tmp_path / "run")
    monkeypatch.setattr("napkin.hardware.timing.time", ProcessorClock(0.5, others=others))
    monkeypatch.setattr(Watch, "conditions", lambda self, **_: Conditions(2, 2, others / 2))
    table = train_run(preparation, run).table
    rows = {row.quantity: row for row in table}
    assert (ALONE in rows) is (others > 0)
    if others:
        assert rows[ALONE].meter == 0.5
        assert rows[ALONE].count == rows["seconds per step"].count
        assert "1.5 of 2 cores" in rows[ALONE].note
        assert [row.quantity for row in table].index(ALONE) == 1 + [row.quantity for row in table].index(
            "seconds per step"
        )
        assert ALONE in (run.path / "measurement.json").read_text()


def test_metrics_tell_every_step_and_the_evaluations_that_were_due(
    finished: tuple[Outcome, RunFolder, Pretraining],
) -> None:
    _, run, preparation = finished
    found = lines(run)
    assert [line.step for line in found] == list(range(1, STEPS + 1))
    assert [line.step for line in found if line.validation_loss is not None] == [4, 8, 12]
    assert [line.tokens for line in found] == [line.step * preparation.recipe.tokens_per_step for line in found]
    clock = [0.0, *(line.seconds for line in found)]
    assert all(before < after for before, after in itertools.pairwise(clock))


def test_each_second_falls_to_the_part_that_took_it(finished: tuple[Outcome, RunFolder, Pretraining]) -> None:
    measurement = finished[0].measurement
    assert measurement is not None
    parts = dict(measurement.seconds_by_part)
    # Writing a checkpoint asks for the time, and so does what stands between the parts.
    assert parts.pop("checkpoints") > 0
    assert parts.pop("other") > 0
    # A second passes between the reading at a part's begin and the one at its end; one step is metered instead.
    steps = dict.fromkeys(("forward", "backward", "optimizer"), STEPS - 1)
    assert parts == {"data": STEPS, "metering": 1, "evaluation": 3, **steps}


def test_only_the_lines_asked_for_are_logged_and_the_last_one_always(text: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(text, steps=11, log_every=3, evaluate_every=5)
    preparation, run = create_run(recipe, tmp_path / "run")
    train_run(preparation, run)
    assert [line.step for line in lines(run)] == [3, 5, 6, 9, 10, 11]


@pytest.mark.thorough
def test_a_stopped_run_says_what_it_measured_and_nothing_of_the_whole(
    finished: tuple[Outcome, RunFolder, Pretraining], tmp_path: Path
) -> None:
    _, whole, _ = finished
    preparation, run = create_run(whole.recipe, tmp_path / "run")
    stopped = train_run(preparation, run, on_step=stop_after(7))
    assert (stopped.step, stopped.interrupted_by) == (7, signal.SIGTERM)
    assert stopped.measurement is not None
    assert stopped.measurement.steps == 7
    figures = meters(stopped.table)
    assert figures.pop("seconds in all") is None
    assert None not in figures.values()
    kept = json.loads((run.path / "measurement.json").read_text())
    assert [row["quantity"] for row in kept["table"] if row["meter"] is None] == ["seconds in all"]

    resumed = train_run(*open_run(run.path))
    assert (resumed.first_step, resumed.step, resumed.interrupted_by) == (7, STEPS, None)
    assert resumed.measurement is not None
    assert resumed.measurement.steps == STEPS - 7
    # The clock of the run goes on where it stopped; that of this process is shorter.
    assert resumed.measurement.seconds > stopped.measurement.seconds
    assert sum(resumed.measurement.seconds_by_part.values()) < resumed.measurement.seconds
    clock = [line.seconds for line in lines(run)]
    assert clock == sorted(clock)
    assert losses(run) == losses(whole)


@pytest.mark.thorough
def test_a_run_that_is_stopped_after_every_step_is_the_run_that_never_was(
    finished: tuple[Outcome, RunFolder, Pretraining], tmp_path: Path
) -> None:
    whole_outcome, whole, _ = finished
    preparation, run = create_run(whole.recipe, tmp_path / "run")
    for step in range(1, STEPS):
        outcome = train_run(preparation, run, on_step=stop_after(step))
        assert outcome.step == step
        # One step alone is timed, and none is left to be metered.
        assert outcome.measurement is None
        assert outcome.table == []
    outcome = train_run(preparation, run)
    assert losses(run) == losses(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (outcome.checkpoint / name).read_bytes() == (whole_outcome.checkpoint / name).read_bytes()


def test_a_finished_run_has_nothing_left_to_do_and_stays_as_it_is(
    finished: tuple[Outcome, RunFolder, Pretraining], tmp_path: Path
) -> None:
    _, whole, preparation = finished
    run = RunFolder(tmp_path / "run")
    shutil.copytree(whole.path, run.path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    outcome = train_run(preparation, run)
    assert (outcome.first_step, outcome.step, outcome.measurement) == (STEPS, STEPS, None)
    assert "complete" in repr(outcome)
    assert "quantity" not in repr(outcome)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_the_last_step_alone_keeps_the_measurement_of_those_before(
    finished: tuple[Outcome, RunFolder, Pretraining], tmp_path: Path
) -> None:
    _, whole, _ = finished
    preparation, run = create_run(whole.recipe, tmp_path / "run")
    train_run(preparation, run, on_step=stop_after(STEPS - 1))
    before = (run.path / "measurement.json").read_bytes()
    outcome = train_run(preparation, run)
    assert (outcome.first_step, outcome.step, outcome.measurement) == (STEPS - 1, STEPS, None)
    assert (run.path / "measurement.json").read_bytes() == before


def test_training_asks_nothing_of_the_random_state_of_torch(text: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    train_run(*create_run(tiny_recipe(text, steps=4), tmp_path / "run"))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plan_that_a_kill_prevented_is_written_on_resuming(
    finished: tuple[Outcome, RunFolder, Pretraining], tmp_path: Path
) -> None:
    _, whole, preparation = finished
    run = RunFolder(tmp_path / "run")
    shutil.copytree(whole.path, run.path)
    (run.path / "plan.json").unlink()
    (run.path / ".plan.json.0123456789abcdef.tmp").touch()
    train_run(preparation, run)
    plans = [json.loads((folder.path / "plan.json").read_text()) for folder in (run, whole)]
    assert [plan["steps"] for plan in plans] == [STEPS, STEPS]
    assert plans[0].keys() == plans[1].keys()
    assert not list(run.path.glob(".plan*"))


def test_a_copy_for_checkpoints_is_made_where_it_fits_beside_the_step(
    finished: tuple[Outcome, RunFolder, Pretraining],
) -> None:
    plan = plan_of(finished[2])
    needed = plan.ledger.peak_bytes + checkpoint_bytes(plan.ledger)

    def decide(free: int, writing: str) -> bool:
        site = dataclasses.replace(plan.site, memory_bytes=free)
        resolved = plan.resolved.with_training(checkpoint_writing=writing)
        return writes_in_background(dataclasses.replace(plan, site=site, resolved=resolved))

    assert decide(needed, "auto")
    assert not decide(needed - 1, "auto")
    assert not decide(needed, "wait")
    with pytest.raises(NapkinError, match="use 'wait' or 'auto'"):
        decide(needed - 1, "background")


def diverging(text: Path) -> Recipe:
    """Weights grow a thousandfold a step, until they or the loss are not numbers any more."""
    recipe = tiny_recipe(text, checkpoint_every=1, keep_checkpoints=100)
    return dataclasses.replace(
        recipe,
        optimizer=dataclasses.replace(recipe.optimizer, learning_rate=10.0, weight_decay=100.0, final_fraction=1.0),
    )


def test_a_loss_that_is_no_number_ends_the_run_and_no_checkpoint_is_made_of_it(text: Path, tmp_path: Path) -> None:
    preparation, run = create_run(diverging(text), tmp_path / "run")
    with pytest.raises(NapkinError, match=r"\d+: .*lower learning_rate.*recipe.toml") as caught:
        train_run(preparation, run)
    failed = int(str(caught.value).split(":")[0].removeprefix("step "))
    assert 1 < failed <= TRAINING.steps
    kept = [read_checkpoint(path).state.step for path in checkpoint_paths(run.checkpoints)]
    assert kept == list(range(failed - 1, 0, -1))
    assert all(math.isfinite(line.loss + line.gradient_norm) for line in lines(run))
    with pytest.raises(NapkinError) as again:
        train_run(preparation, run)
    assert str(again.value) == str(caught.value)


@pytest.mark.torture
def test_the_best_evaluated_weights_are_kept_though_no_checkpoint_of_their_step_was_due(
    text: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(text, steps=12, checkpoint_every=7, evaluate_every=2, keep_best=True)
    # It rises to where nothing is learned any more: the loss of step 2 is a third of the later ones.
    optimizer = dataclasses.replace(recipe.optimizer, learning_rate=1.0, warmup_steps=11)
    recipe = dataclasses.replace(recipe, optimizer=optimizer)
    outcomes = {}
    for name, last in (("whole", None), ("best", 2), ("resumed", 5)):
        preparation, run = create_run(recipe, tmp_path / name)
        outcomes[name] = train_run(preparation, run, on_step=stop_after(last) if last else lambda metrics: None)
    assert train_run(*open_run(tmp_path / "resumed")).first_step == 5
    for name in ("whole", "resumed"):
        run = RunFolder.open(tmp_path / name)
        found = {line.step: line.validation_loss for line in lines(run) if line.validation_loss is not None}
        assert min(found, key=found.__getitem__) == 2
        kept = [read_checkpoint(path).state.step for path in checkpoint_paths(run.checkpoints)]
        assert kept == [12, 7, 2]
        for file in ("model.safetensors", "optimizer.safetensors"):
            best = run.checkpoints / "step-00000002" / file
            assert best.read_bytes() == (outcomes["best"].checkpoint / file).read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["altered", "shrunk"])
def test_tokens_that_change_under_the_run_are_noticed_before_the_next_step_and_the_steps_before_are_saved(
    text: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(text, tmp_path / "text")
    tokens = tmp_path / "text" / "train.tokens"
    preparation, run = create_run(tiny_recipe(tmp_path / "text"), tmp_path / "run")

    def spoil(metrics: StepMetrics) -> None:
        if metrics.step == 11:
            with open(tokens, "r+b") as file:
                file.write(b"\x05\x00")
            if change == "shrunk":
                # A page's worth: what is still mapped can be read.
                os.truncate(tokens, tokens.stat().st_size - 2)

    with pytest.raises(NapkinError, match=r"train\.tokens.*step 11.*saved"):
        train_run(preparation, run, on_step=spoil)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000006", "step-00000011"]
    with pytest.raises(NapkinError, match=r"train\.tokens"):
        open_run(run.path)
    shutil.copy(text / "train.tokens", tokens)
    assert train_run(*open_run(run.path)).step == TRAINING.steps


@pytest.mark.torture
def test_memory_stays_flat_over_thousands_of_steps(text: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(text, steps=5000, checkpoint_every=500, evaluate_every=250, log_every=10)
    preparation, run = create_run(recipe, tmp_path / "run")
    train_run(preparation, run)
    settled, *_, last = [line.bytes for line in lines(run) if line.step >= 500]
    assert last <= 1.01 * settled
