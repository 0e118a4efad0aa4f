"""A sweep trains ordinary runs: the same weights as alone, continued after a stop, the failed ones told."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from napkin.accounting.ledger import Row
from napkin.errors import NapkinError
from napkin.hardware.host import detect_host
from napkin.planning.planner import SharedPlans, resolve, step_key
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.scaling.sweep import Sweep, ranked
from napkin.scaling.sweep_workers import Ended
from napkin.scaling.trials import Trial, grid, read_axis, with_values
from napkin.train_step.step_ledger import count_step
from napkin.training.run import train
from oracles.tiny_run import tiny_recipe, write_tiny_text


@pytest.fixture
def base(tmp_path: Path) -> Recipe:
    write_tiny_text(tmp_path)
    return tiny_recipe(tmp_path, steps=6, checkpoint_every=2)


def rates(base: Recipe, text: str = "1e-3,3e-3") -> tuple[Trial, ...]:
    return grid(base, [read_axis("--optimizer.learning-rate", text)])


def weights(run: Path) -> bytes:
    return (max((run / "checkpoints").iterdir()) / "model.safetensors").read_bytes()


@pytest.mark.torture
def test_a_run_of_a_sweep_has_the_weights_of_the_same_recipe_trained_alone(base: Recipe, tmp_path: Path) -> None:
    trials = rates(base)
    sweep = Sweep.plan(trials, tmp_path / "sweep", at_once=1)
    ends: list[Ended] = []
    assert sweep.run(on_end=lambda trial, ended: ends.append(ended)) is None
    assert [ended.state for ended in ends] == ["finished", "finished"]
    assert sweep.planned.n_counted == 1
    train(trials[1].recipe, tmp_path / "alone")
    assert weights(sweep.folder.run(trials[1])) == weights(tmp_path / "alone")
    assert weights(sweep.folder.run(trials[0])) != weights(tmp_path / "alone")
    names = {"plan.json", "measurement.json", "metrics.jsonl", "report.html"}
    assert names <= {path.name for path in sweep.folder.run(trials[0]).iterdir()}


@pytest.mark.thorough
def test_the_same_sweep_again_goes_on_where_it_was_stopped(base: Recipe, tmp_path: Path) -> None:
    trials = rates(base)
    sweep = Sweep.plan(trials, tmp_path / "sweep", at_once=1)

    def stop(trial: Trial, metrics: object) -> None:
        if trial.name != trials[0].name:
            os.kill(os.getpid(), signal.SIGTERM)

    assert sweep.run(on_step=stop) == signal.SIGTERM
    again = Sweep.plan(trials, tmp_path / "sweep", at_once=1)
    assert [trial.name for trial in again.unfinished] == [trials[1].name]
    before = weights(sweep.folder.run(trials[0]))
    assert again.run() is None
    train(trials[1].recipe, tmp_path / "alone")
    assert weights(again.folder.run(trials[1])) == weights(tmp_path / "alone")
    assert weights(again.folder.run(trials[0])) == before
    assert Sweep.plan(trials, tmp_path / "sweep", at_once=1).unfinished == ()
    # New values may be added to a sweep, and none taken away.
    more = Sweep.plan(rates(base, "1e-3,2e-3,3e-3"), tmp_path / "sweep")
    assert [trial.name for trial in more.unfinished] == ["learning_rate=0.002"]
    with pytest.raises(NapkinError, match=r"sweep.*2.*learning_rate=0.001"):
        Sweep.plan(rates(base, "2e-3,3e-3"), tmp_path / "sweep")
    other = dataclasses.replace(base, training=dataclasses.replace(base.training, batch_size=8))
    with pytest.raises(NapkinError, match=r"training\.batch_size.*4.*8"):
        Sweep.plan(rates(other), tmp_path / "sweep")


@pytest.mark.torture
def test_a_run_that_fails_is_told_and_the_others_go_on(base: Recipe, tmp_path: Path) -> None:
    trials = rates(base, "1e-3,2e-3")
    sweep = Sweep.plan(trials, tmp_path / "sweep", at_once=1)
    in_the_way = tmp_path / "sweep" / "learning_rate=0.001"
    in_the_way.parent.mkdir()
    in_the_way.write_text("a letter")
    ends: dict[str, str] = {}
    assert sweep.run(on_end=lambda trial, ended: ends.update({trial.name: ended.state})) is None
    assert ends == {"learning_rate=0.001": "failed", "learning_rate=0.002": "finished"}
    again = Sweep.plan(trials, tmp_path / "sweep", at_once=1)
    assert again.unfinished == ()
    assert "exists and is not overwritten" in again.file.failed["learning_rate=0.001"]
    assert [each.loss is None for each in again.standings()] == [True, False]
    in_the_way.unlink()
    retried = Sweep.plan(trials, tmp_path / "sweep", at_once=1, retry=True)
    assert [trial.name for trial in retried.unfinished] == ["learning_rate=0.001"]
    assert retried.run() is None
    assert retried.file.failed == {}
    assert [trial.name for trial in ranked_trials(retried)] == ["learning_rate=0.002", "learning_rate=0.001"]


def ranked_trials(sweep: Sweep) -> list[Trial]:
    return [each.trial for each in ranked(sweep.standings())]


def test_steps_that_share_a_plan_have_the_same_operators(base: Recipe) -> None:
    machine = ThisMachine()
    first = resolve(base, machine)
    expected = rows_of(first)
    for changes in (
        {"optimizer.learning_rate": 1e-2, "training.steps": 77, "training.init_seed": 3},
        {"optimizer.schedule": "linear", "optimizer.final_fraction": 0.2, "optimizer.beta1": 0.8},
        {"optimizer.clip_norm": 3.0, "optimizer.weight_decay": 0.7, "training.evaluation_tokens": 3000},
        {"model.init_std": 0.5, "data.windows": "fixed", "training.data_seed": 7, "training.checkpoint_every": 3},
        {"training.loss_chunk_size": 64},
        {"model.n_layers": 2},
        {"data.separate_documents": True},
        {"optimizer.average_decay": 0.9},
        {"training.recompute": "full"},
    ):
        resolved = resolve(with_values(base, changes), machine)
        same = rows_of(resolved) == expected
        assert (step_key(resolved.recipe) == step_key(first.recipe)) == same, changes


def rows_of(resolved: ResolvedRecipe) -> list[Row]:
    """The operators of a step, without their arguments: a learning rate is one of them."""
    return [dataclasses.replace(row, call=None) for row in count_step(resolved).rows]


def test_a_shared_plan_is_for_the_recipe_of_its_run(base: Recipe) -> None:
    machine, shared = ThisMachine(), SharedPlans()
    first = shared(resolve(base, machine), machine)
    resolved = resolve(with_values(base, {"training.steps": 9, "optimizer.learning_rate": 1e-2}), machine)
    found = shared(resolved, machine)
    assert shared.n_counted == 1
    assert found.recipe.training.steps == found.steps == 9
    assert found.recipe.optimizer.learning_rate == 1e-2
    assert found.recipe.training.compile == "off"
    assert found.seconds_per_step == first.seconds_per_step


def test_what_is_not_a_sweep_is_not_touched(base: Recipe, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(NapkinError, match=r"empty.*sweep"):
        Sweep.plan(rates(base), tmp_path / "full")
    with pytest.raises(NapkinError, match="is not a folder"):
        Sweep.plan(rates(base), tmp_path / "full" / "letter.txt")
    with pytest.raises(NapkinError, match="--at-once is 64"):
        Sweep.plan(grid(base, [read_axis("--training.init-seed", ",".join(map(str, range(64))))]), "new", at_once=64)
    assert os.listdir(tmp_path / "full") == ["letter.txt"]


@pytest.mark.torture
def test_runs_side_by_side_have_the_weights_of_runs_one_after_the_other(base: Recipe, tmp_path: Path) -> None:
    trials = rates(base, "1e-3,2e-3,3e-3")
    Sweep.plan(trials, tmp_path / "one", at_once=1).run()
    sweep = Sweep.plan(trials, tmp_path / "two")
    # As many as have cores, because the recipe says that each has one thread.
    assert sweep.planned.at_once == min(3, detect_host().cores)
    assert sweep.run() is None
    for trial in trials:
        assert weights(tmp_path / "one" / trial.name) == weights(tmp_path / "two" / trial.name)
