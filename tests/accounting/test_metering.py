import gc

import pytest
import torch
from torch import Tensor

from napkin import count
from napkin.accounting.metering import Stopwatch, meter_step
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.clock import Clock
from oracles.torch_models import GPT2


class _Run:
    """The same run each time: weights, batch and optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT2(3000, 64, 1, 128, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.batch = tuple(torch.randint(0, 3000, (4, 64)) for _ in range(2))
        self.step()

    def step(self) -> Tensor:
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_metering_a_step_does_not_change_what_it_does():
    plain, metered = _Run(), _Run()
    loss = plain.step()
    results: list[Tensor] = []
    meter_step(metered.model, lambda: results.append(metered.step()))
    assert torch.equal(results[0], loss)
    for one, other in zip(plain.model.parameters(), metered.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_metered_step_has_the_counts_flops_and_the_allocators_peak():
    run = _Run()
    metered = meter_step(run.model, run.step)
    counted = count(run.model, run.batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    assert [row.operator for row in metered.ledger.rows if row.flops] == [
        row.operator for row in counted.rows if row.flops
    ]
    assert (metered.ledger.flops, metered.ledger.hardware_flops) == (counted.flops, counted.hardware_flops)

    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    resident = storage_bytes([*run.model.parameters(), *moments, *run.batch])
    peak = resident + growth_at_peak(run.step)[0]
    assert metered.peak_bytes == pytest.approx(peak, rel=1e-3)
    assert metered.ledger.peak_bytes == pytest.approx(peak, rel=1e-3)
    assert counted.peak_bytes == pytest.approx(peak, rel=1e-3)


@pytest.mark.thorough
def test_what_was_garbage_before_a_step_is_no_part_of_it_though_it_is_freed_within():
    gc.disable()
    run, other = _Run(), _Run()
    garbage: list[object] = [torch.zeros(10_000_000)]
    garbage.append(garbage)
    del garbage

    def step_and_collect() -> None:
        run.step()
        gc.collect()

    try:
        metered = meter_step(run.model, step_and_collect)
    finally:
        gc.enable()
    assert metered.peak_bytes == meter_step(other.model, other.step).peak_bytes


def test_a_stopwatch_keeps_the_parts_apart_also_where_one_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("napkin.accounting.metering.time", Clock())
    watch = Stopwatch()
    with watch("data"):
        pass
    with pytest.raises(KeyError), watch("data"):
        raise KeyError("own")
    with watch("forward"):
        pass
    assert watch.seconds == {"data": 2, "forward": 1}
