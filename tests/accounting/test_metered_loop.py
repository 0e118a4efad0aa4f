import dataclasses
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin import NapkinError, count
from napkin.accounting.metering import MeteredLoop, meter, reconcile
from napkin.accounting.pricing import price
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import Site
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.torch_models import GPT2


class _Loop:
    """A loop of a user's own, the same each time: autocast, two micro-batches per update, two optimizers, dropout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 100))
        embedding, *others = self.model.parameters()
        self.optimizers = [torch.optim.SGD([embedding], 0.1, momentum=0.9), torch.optim.AdamW(others)]
        self.losses: list[Tensor] = []

    def batch(self, number: int) -> Tensor:
        return torch.randint(0, 100, (2, 4, 16), generator=torch.Generator().manual_seed(number))

    def update(self, batch: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for micro_batch in batch:
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.model(micro_batch)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), micro_batch.flatten())
            loss.backward()
            self.losses.append(loss.detach())
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_metered_loop_computes_bit_for_bit_what_it_computes_alone() -> None:
    alone, metered = _Loop(), _Loop()
    torch.manual_seed(1)
    for number in range(5):
        alone.update(alone.batch(number))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    with meter(metered.model) as measured:
        for number in range(5):
            with measured.step():
                metered.update(metered.batch(number))
    assert measured.flops
    assert torch.equal(torch.stack(alone.losses), torch.stack(metered.losses))
    assert torch.equal(torch.get_rng_state(), after)
    for one, other in zip(_state(alone), _state(metered), strict=True):
        assert torch.equal(one, other)


def _state(loop: _Loop) -> list[Tensor]:
    moments = [value for o in loop.optimizers for state in o.state.values() for value in state.values()]
    return [*loop.model.parameters(), *(value for value in moments if isinstance(value, Tensor))]


def test_all_steps_are_timed_but_the_metered_one() -> None:
    loop = _Loop()
    with meter(loop.model) as measured:
        for number in range(6):
            with measured.step(tokens=128):
                loop.update(loop.batch(number))
    assert (measured.steps, len(measured.step_seconds), measured.tokens) == (6, 5, 768)
    assert measured.seconds_per_step == sorted(measured.step_seconds)[2]
    assert measured.tokens_per_second == 128 / sorted(measured.step_seconds)[2]
    assert list(measured.parts) == ["steps", "metered step", "between steps"]
    assert sum(measured.parts.values()) == pytest.approx(measured.seconds)
    assert min(measured.parts.values()) > 0


def test_all_micro_batches_and_optimizers_are_in_the_ledger() -> None:
    loop = _Loop()
    with meter(loop.model) as measured:
        for number in range(3):
            with measured.step():
                loop.update(loop.batch(number))
    assert measured.ledger is not None
    # Two linear layers: forward, and the gradients of weight and input, for each of two micro-batches of 64 tokens.
    assert measured.flops == 2 * 3 * 2 * 64 * (32 * 64 + 64 * 100)
    assert {row.phase for row in measured.ledger.rows} == {"forward", "backward", "optimizer"}
    moments = sum(t.nbytes for t in _state(loop)) - sum(p.nbytes for p in loop.model.parameters())
    assert measured.ledger.peak_by_category["optimizer state"] == moments
    assert not measured.ledger.unknown_operators


def _plain_loop(model: nn.Module, update: Callable[[], Any]) -> MeteredLoop:
    with meter(model) as measured:
        for _ in range(4):
            with measured.step():
                update()
    return measured


@pytest.mark.thorough
@pytest.mark.parametrize("clear_first", [True, False])
def test_the_peak_is_the_allocators_wherever_gradients_are_cleared(clear_first: bool) -> None:
    torch.manual_seed(0)
    model = GPT2(3000, 64, 1, 128, 2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = [torch.randint(0, 3000, (4, 64)) for _ in range(2)]

    def update() -> None:
        if clear_first:
            optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        if not clear_first:
            optimizer.zero_grad()

    unrelated = torch.zeros(10**7)
    measured = _plain_loop(model, update)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    # Gradients from before are freed before the peak; the oracle must not see that.
    optimizer.zero_grad()
    peak = storage_bytes([*model.parameters(), *moments, *batch]) + growth_at_peak(update)[0]
    assert measured.peak_bytes == pytest.approx(peak, rel=1e-3)
    counted = count(model, tuple(batch), optimizer=lambda p: torch.optim.AdamW(p, foreach=False))
    assert measured.peak_bytes == pytest.approx(counted.peak_bytes, rel=1e-3)
    assert measured.flops == counted.flops
    assert unrelated.nbytes > peak


def test_what_an_earlier_step_left_counts_until_it_is_freed() -> None:
    model = nn.Linear(64, 64)
    with meter(model) as measured:
        for _ in range(3):
            with measured.step():
                # The old one is freed only when the new one takes its name.
                hidden = torch.ones(1000, 64)  # noqa: F841
                model(torch.ones(1, 64)).sum().backward()
                model.zero_grad()
    weights = sum(p.nbytes for p in model.parameters())
    assert measured.peak_bytes == pytest.approx(weights + 2 * 1000 * 64 * 4, rel=1e-2)


def test_too_few_steps_leave_figures_out_and_say_so() -> None:
    loop = _Loop()
    with meter(loop.model) as measured:
        assert (measured.seconds_per_step, measured.flops, measured.peak_bytes, measured.ledger) == (None,) * 4
        assert "0 steps" in repr(measured)
        with measured.step():
            loop.update(loop.batch(0))
        assert measured.seconds_per_step is not None
    assert "too few steps" in repr(measured)
    counted = count(loop.model, torch.zeros(4, 16, dtype=torch.int64))
    table = reconcile(counted, measured)
    assert [row.meter for row in table][:3] == [counted.parameters, None, None]
    assert "FLOPs per step" in str(table)


def test_an_error_in_a_step_leaves_nothing_behind_and_the_next_step_is_metered_instead() -> None:
    loop = _Loop()
    hooks = _global_hooks()
    with meter(loop.model) as measured:
        for number in range(2):
            with measured.step():
                loop.update(loop.batch(number))
        with pytest.raises(IndexError), measured.step():
            loop.model(torch.tensor([100]))
        assert _global_hooks() == hooks
        assert not torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
        assert (measured.steps, measured.flops) == (2, None)
        with measured.step():
            loop.update(loop.batch(3))
        assert measured.flops
    with pytest.raises(ZeroDivisionError), meter(loop.model) as measured, measured.step():
        raise ZeroDivisionError
    assert _global_hooks() == hooks


def _global_hooks() -> tuple[int, ...]:
    modules, optimizers = import_module("torch.nn.modules.module"), import_module("torch.optim.optimizer")
    return (
        len(modules._global_forward_hooks),
        len(modules._global_forward_pre_hooks),
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
        torch._C._len_torch_dispatch_stack(),
    )


def test_a_profiler_that_runs_already_goes_on_running() -> None:
    loop = _Loop()
    with torch.profiler.profile() as profiler, meter(loop.model) as measured:
        for number in range(4):
            with measured.step():
                loop.update(loop.batch(number))
            assert torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    assert measured.peak_bytes
    assert any(event.key == "aten::embedding" for event in profiler.key_averages())


def test_steps_do_not_nest_and_end_with_the_loop() -> None:
    with (
        meter(nn.Linear(1, 1)) as measured,
        measured.step(),
        pytest.raises(NapkinError, match="inside a step"),
        measured.step(),
    ):
        pass
    with pytest.raises(NapkinError, match="has ended"), measured.step():
        pass
    with pytest.raises(NapkinError, match="on meta"), meter(nn.Linear(1, 1, device="meta")):
        pass


def test_rule_count_and_meter_of_a_loop_stand_side_by_side() -> None:
    torch.manual_seed(0)
    model = GPT2(3000, 64, 1, 128, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = tuple(torch.randint(0, 3000, (4, 64)) for _ in range(2))
    with meter(model) as measured:
        for _ in range(4):
            with measured.step(tokens=256):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    ledger = count(model, batch, optimizer=torch.optim.AdamW)
    priced = price(ledger, CatalogueCeilings(find_device("H100")))
    parameters, flops, peak, seconds = reconcile(ledger, measured, priced)
    assert parameters.exact
    assert flops.exact
    assert flops.rule == 6 * ledger.parameters * 256
    assert peak.meter_over_count == pytest.approx(1, rel=1e-3)
    assert (seconds.count, seconds.meter) == (priced.seconds, measured.seconds_per_step)
    assert [row.quantity for row in (parameters, flops, peak, seconds)] == [
        "parameters",
        "FLOPs per step",
        "peak bytes",
        "seconds per step",
    ]


def test_a_plan_is_reconciled_with_a_loop_too() -> None:
    model = nn.Linear(64, 64)
    ledger = count(model, torch.zeros(8, 64))
    site = Site("H100", matmul_peak=1e15, memory_bytes=80 * 10**9, bytes_per_second=3e12)
    priced = price(ledger, CatalogueCeilings(find_device("H100")))
    recipe = Recipe(model=ModelConfig(vocab_size=64), training=TrainingConfig(steps=4))
    plan = Plan(ResolvedRecipe(recipe, Precision("fp32", "cuda")), ledger, priced, site)
    measured = _plain_loop(model, lambda: model(torch.zeros(8, 64)).mean().backward())
    rows = {row.quantity: row for row in reconcile(plan, measured)}
    assert [dataclasses.replace(row, meter=None) for row in rows.values()] == plan.table()
    assert rows["FLOPs per step"].exact
    assert rows["parameters"].meter == 64 * 65
    assert rows["seconds per step"].meter == measured.seconds_per_step
    assert measured.seconds_per_step is not None
    # FLOPs over summed seconds, not over the median's.
    steps = measured.step_seconds
    assert rows["MFU"].meter == pytest.approx(len(steps) * ledger.flops / sum(steps) / 1e15, rel=1e-12)
    assert rows["seconds in all"].meter is None


@pytest.mark.thorough
def test_metering_writes_nothing_to_the_terminal() -> None:
    # Gradients from before the profile are freed in it, of which torch's allocator would warn.
    program = """
import torch
from napkin.accounting.metering import meter
model = torch.nn.Linear(8, 8)
with meter(model) as measured:
    for _ in range(4):
        with measured.step():
            model.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
assert measured.peak_bytes
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
