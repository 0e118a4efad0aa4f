"""A loop of one's own is planned, metered and reconciled, and computes what it computes alone."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import napkin
from napkin import NapkinError
from napkin.accounting.ledger import Ledger
from napkin.hooks import WatchedLoop, watch
from napkin.hooks.fake_step import random_states_kept
from napkin.report.comparison import read_run
from napkin.report.page import write_report


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(F.gelu(self.up(self.embedding(ids)))))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """Clips, and asks for the values of labels: only what is not padding (0) has a loss."""
    logits = model(ids[:, :-1])
    labels = ids[:, 1:]
    kept = labels != 0
    loss = F.cross_entropy(logits[kept], labels[kept], reduction="sum") / kept.sum().item()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def batches(n: int, lengths: tuple[int, ...] = (9,)) -> Iterator[Tensor]:
    for number in range(n):
        generator = torch.Generator().manual_seed(number)
        yield torch.randint(0, 64, (4, lengths[number % len(lengths)]), generator=generator)


def parts() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def watched_run(n: int = 6, lengths: tuple[int, ...] = (9,), **options: Any) -> tuple[WatchedLoop, list[Tensor]]:
    model, optimizer = parts()
    losses = []
    with watch(model, optimizer, **options) as watched:
        for ids in watched.data(batches(n, lengths)):
            if not watched.steps:
                watched.plan_step(train_step, ids)
            with watched.step(tokens=ids.numel(), size=ids.shape):
                losses.append(train_step(model, optimizer, ids))
            watched.log(loss=losses[-1])
    return watched, losses


@pytest.fixture(autouse=True)
def quick_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device of the catalogue: nothing is calibrated and timed."""
    monkeypatch.setattr("napkin.hooks.program_plan._machine", _on_a_device)


def _on_a_device(device_type: str, on: str | None, n_devices: int) -> Any:
    from napkin.planning.step.machine import CatalogueMachine, machine_of

    machine = machine_of(on or "H100", device="cpu")
    assert isinstance(machine, CatalogueMachine)
    return machine


def test_a_watched_loop_computes_bit_for_bit_what_it_computes_alone_and_leaves_the_random_states() -> None:
    model, optimizer = parts()
    np.random.seed(1)
    alone = [train_step(model, optimizer, ids) for ids in batches(6)]
    states = torch.get_rng_state(), np.random.rand()
    np.random.seed(1)
    watched, losses = watched_run()
    assert watched.plan is not None, watched.obstacle
    assert all(torch.equal(a, b) for a, b in zip(alone, losses, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.random.rand() == states[1]


def test_random_states_are_kept_where_a_step_draws() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with random_states_kept():
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


@pytest.mark.thorough
def test_the_plan_is_the_step_that_runs_masks_and_clipping_included() -> None:
    watched, _ = watched_run()
    assert watched.plan is not None
    assert watched.measurement is not None
    planned, measured = watched.plan.ledger, watched.measurement.ledger
    assert planned.flops == measured.flops > 0
    assert planned.peak_bytes == pytest.approx(watched.measurement.peak_bytes, rel=0.01)
    # The labels' values are known, so that the masked rows are as many as they are.
    assert not planned.assumption
    (ids,) = batches(1)
    rows = int((ids[:, 1:] != 0).sum())
    head = [row for row in planned.rows if row.operator == "index" and row.phase == "forward"]
    assert any(row.bytes_written == rows * 64 * 4 for row in head)


@pytest.mark.thorough
def test_steps_of_sizes_that_nobody_counted_are_in_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.hooks.watched_loop.RECORDING_SHARE", 0.0)
    watched, _ = watched_run(12, lengths=(9, 17))
    assert watched.plan is not None
    planned, other = torch.Size([4, 9]), torch.Size([4, 17])
    watched.recorded.pop(other, None)
    counted = len(watched.step_seconds[planned]) * watched.plan.ledger.flops
    seconds = sum(watched.step_seconds[planned])
    assert watched.flops_of(other) is None
    assert watched.mfu == pytest.approx(counted / seconds / watched.plan.matmul_peak)


@pytest.mark.thorough
def test_each_size_is_recorded_while_that_takes_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.hooks.watched_loop.RECORDING_SHARE", 1.0)
    watched, _ = watched_run(12, lengths=(9, 17, 33))
    assert set(watched.recorded) == {torch.Size([4, length]) for length in (9, 17, 33)}
    flops = [watched.flops_of(torch.Size([4, length])) or 0 for length in (9, 17, 33)]
    assert all(flops)
    assert flops == sorted(flops)


@pytest.mark.thorough
def test_its_run_is_listed_beside_others_and_has_a_report(tmp_path: Path) -> None:
    watched, losses = watched_run(run=tmp_path / "runs" / "mine", steps=6, on="H100", settings={"width": 32})
    run = read_run(tmp_path / "runs" / "mine", training=False)
    assert (run.summary.state, run.summary.step, run.summary.tokens) == ("finished", 6, 6 * 4 * 9)
    assert run.recipe["program.width"] == 32
    assert run.summary.dollars is not None
    assert run.summary.mfu == watched.mfu
    page = write_report(tmp_path / "runs" / "mine").read_text()
    assert "H100" in page
    last = json.loads((tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] == pytest.approx(float(losses[-1]))
    quantities = {row.quantity: row for row in watched.table()}
    assert quantities["FLOPs per step"].exact
    assert quantities["parameters"].exact
    assert quantities["dollars"].meter is not None
    assert quantities["energy"].meter is not None
    with pytest.raises(NapkinError, match="exists"), watch(Model(), run=tmp_path / "runs" / "mine"):
        pass


@pytest.mark.thorough
def test_seconds_of_the_parts_add_up_to_those_of_the_loop() -> None:
    model, optimizer = parts()
    with watch(model, optimizer) as watched:
        for ids in watched.data(batches(8)):
            with watched.step(tokens=ids.numel()):
                train_step(model, optimizer, ids)
            with watched.part("evaluation"):
                torch.randn(100, 100).sum()
    spent = watched.spent
    parts_ = spent.steps + spent.recorded + spent.data + sum(spent.other.values())
    assert parts_ == pytest.approx(watched.seconds, rel=0.2)
    assert spent.other["evaluation"] > 0


@pytest.mark.thorough
def test_waiting_is_said_with_its_share_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = watched_run(8)
    watched.n_workers = 0
    watched.spent.data = 0.31 * (watched.seconds - watched.spent.recorded)
    (said,) = [each for each in watched.verdict() if "waits" in each]
    assert said.startswith("waits for data 31.0% of the time")
    assert "num_workers" in said


@pytest.mark.thorough
def test_a_step_that_raises_is_not_counted_and_leaves_no_recorder() -> None:
    model, optimizer = parts()
    with watch(model, optimizer) as watched:
        for number, ids in enumerate(watched.data(batches(6))):
            try:
                with watched.step(tokens=ids.numel()):
                    logits = model(ids)
                    if number == 2:  # the one that is recorded
                        raise ValueError("no")
                    logits.sum().backward()
                    optimizer.step()
            except ValueError:
                assert _get_current_dispatch_mode() is None
                assert watched.measurement is None
    assert watched.steps == 5
    assert _get_current_dispatch_mode() is None
    # Of the next step, which has a backward pass and an update: of the one that failed nothing was kept.
    assert watched.measurement is not None
    assert {"forward", "backward", "optimizer"} <= set(watched.measurement.ledger.flops_by("phase"))


@pytest.mark.thorough
def test_a_loop_that_is_left_within_its_recorded_step_leaves_no_recorder() -> None:
    model, optimizer = parts()
    with watch(model, optimizer) as watched:
        for number, ids in enumerate(watched.data(batches(6))):
            watched.begin_step(ids.shape)
            if number == 2:
                break
            train_step(model, optimizer, ids)
            watched.end_step(ids.numel())
    assert _get_current_dispatch_mode() is None
    assert watched.measurement is None
    assert watched.steps == 2


def test_where_recording_fails_the_loop_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no profiler here")

    monkeypatch.setattr("napkin.accounting.metering.allocator_events", failing)
    watched, losses = watched_run(6)
    assert len(losses) == watched.steps == 6
    assert "no profiler here" in watched.obstacle


@pytest.mark.thorough
def test_a_step_that_cannot_be_traced_is_metered_and_the_reason_is_said() -> None:
    model, optimizer = parts()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        raise OSError("reads a file")

    with watch(model, optimizer) as watched:
        assert watched.plan_step(step, next(batches(1))) is None
        for ids in batches(4):
            with watched.step(tokens=ids.numel()):
                train_step(model, optimizer, ids)
    assert "reads a file" in watched.obstacle
    assert "reads a file" in repr(watched)
    assert watched.measurement is not None
    assert watched.mfu is None


def test_a_mask_of_unknown_values_picks_all_and_the_count_says_so() -> None:
    model, optimizer = parts()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        logits = model(ids)
        logits[~torch.isnan(logits)].mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with watch(model, optimizer) as watched:
        watched.plan_step(step, next(batches(1)))
        for ids in batches(4):
            with watched.step(tokens=ids.numel()):
                step(model, optimizer, ids)
    assert watched.plan is not None, watched.obstacle
    assert watched.measurement is not None
    assert "masks made of such numbers pick all" in watched.plan.ledger.assumption
    assert watched.plan.ledger.flops == watched.measurement.ledger.flops


def test_a_step_that_samples_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.hooks.fake_step.MOST_SECONDS", 0.0)
    model, optimizer = parts()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        while not model(ids).sum() > 0:  # of a fake tensor never
            pass

    with watch(model, optimizer) as watched:
        assert watched.plan_step(step, next(batches(1))) is None
    assert "traced for 0 s" in watched.obstacle
    assert _get_current_dispatch_mode() is None


def test_the_count_is_that_of_napkin_count_for_a_plain_step() -> None:
    model, optimizer = parts()
    (ids,) = batches(1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        output = model(ids)
        loss = output.float().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    with watch(model, optimizer) as watched:
        plan = watched.plan_step(step, ids)
    assert plan is not None
    expected: Ledger = napkin.count(model, ids, optimizer=torch.optim.AdamW)
    assert (plan.ledger.flops, plan.ledger.peak_bytes) == (expected.flops, expected.peak_bytes)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
