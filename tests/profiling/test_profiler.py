"""The profile of a step against other witnesses: the ledger, a trace on fake tensors, torch's own sums."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils.checkpoint import checkpoint

import napkin
from napkin.accounting.pricing import price
from napkin.errors import NapkinError
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import find_device
from napkin.profiling.operator_calls import ENGINE, PYTHON
from napkin.profiling.profiler import assembled, measured_steps
from napkin.profiling.step_profile import StepProfile, as_values

CEILINGS = CatalogueCeilings(find_device("A100"))
"""Any machine: roofs are arithmetic."""


class Square(torch.autograd.Function):
    """A function of one's own, whose Python torch shows as one event."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # pyright: ignore
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Square.apply(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
        logits = x @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def training() -> tuple[Model, Callable[[], None], Tensor]:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(11, (2, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        model(ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step, ids


@cache
def example() -> StepProfile:
    model, step, _ = training()
    measured = measured_steps(step, model, torch.device("cpu"), steps=3, warm_up=1)
    return assembled(measured, torch.device("cpu"), CEILINGS, price(measured.ledger, CEILINGS))


@pytest.mark.thorough
def test_rows_and_what_is_in_none_add_up_to_the_step() -> None:
    found = example()
    outside = sum(row.seconds for row in found.outside)
    assert found.total.seconds + outside == pytest.approx(found.seconds, rel=1e-9)
    assert found.seconds == pytest.approx(sum(found.profiled_seconds) / 3, rel=1e-9)
    assert {PYTHON, "Python in Square", "Python in SquareBackward"} <= {row.name for row in found.outside}
    nowhere = sum(row.seconds for row in found.outside if row.name in (PYTHON, ENGINE) and row.module == "")
    assert found.located == pytest.approx(1 - nowhere / found.seconds)
    assert found.explained < found.located < 1
    assert all(sum(each.seconds for each in found.by(by).values()) == pytest.approx(found.total.seconds) for by in BYS)


BYS = ("operator", "module", "phase")


def test_the_overhead_is_the_median_of_steps_side_by_side() -> None:
    found = replace(example(), profiled_seconds=(2.0, 11.0, 3.3), plain_seconds=(1.0, 10.0, 3.0))
    assert found.overheads == pytest.approx([0.1, 0.1, 1.0])
    assert found.overhead == pytest.approx(0.1)
    assert len(example().plain_seconds) == len(example().profiled_seconds) == 3


def test_calls_are_those_of_the_ledger_operator_by_operator() -> None:
    found = example()
    # Recording a step under activation checkpointing makes more views.
    counted = Counter((row.operator, row.module, row.phase) for row in found.ledger.rows if row.bytes_written)
    profiled = {(row.operator, row.module, row.phase): row.figures.calls for row in found.rows}
    assert sum(counted.values()) > 100
    assert {site: calls for site, calls in profiled.items() if site in counted} == dict(counted)
    # What checkpointing calls last when it recomputes ends in an exception of its own, before it computes.
    alone = {(row.operator, row.phase) for row in found.rows if row.figures.calls and not row.figures.counted_calls}
    assert alone == {("addmm", "recompute")}


def test_flops_calls_and_planned_seconds_are_those_of_a_trace_on_fake_tensors() -> None:
    model, _, ids = training()

    def step(model: nn.Module, ids: Tensor) -> None:
        model(ids).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    traced = napkin.count(model, ids, step, warm_up=0)
    found = example()
    for phase in ("forward", "recompute", "backward"):
        rows = [row for row in traced.rows if row.phase == phase]
        assert found.by("phase")[phase].flops == sum(row.flops + row.recomputed_flops for row in rows) > 0
        contractions = Counter(row.operator for row in rows if row.flops)
        profiled = Counter[str]()
        for row in found.rows:
            if row.phase == phase and row.figures.flops:
                profiled[row.operator] += round(row.figures.calls)
        assert profiled == contractions
    assert found.price is not None
    assert found.total.planned_seconds == pytest.approx(found.price.seconds)


def test_products_are_as_many_as_torch_says_itself() -> None:
    _, step, _ = training()
    step()
    with torch_profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    counts = {each.key: each.count for each in profiler.key_averages()}
    found = example().by("operator")
    for name in ("mm", "addmm", "native_layer_norm", "native_layer_norm_backward", "embedding", "_log_softmax"):
        assert found[name].calls == counts[f"aten::{name}"]


def test_each_module_has_its_own_products() -> None:
    rows = [row for row in example().rows if row.operator == "addmm"]
    places = {(row.module, row.phase): row.figures.calls for row in rows}
    blocks = [f"blocks.{number}.{part}" for number in range(2) for part in ("up", "down")]
    assert places == {(block, phase): 1 for block in blocks for phase in ("forward", "recompute")} | {
        key: calls for key, calls in places.items() if key[1] == "recompute"
    }


def test_roofs_are_arithmetic() -> None:
    (row,) = [row for row in example().rows if row.operator == "mm" and row.module == "" and row.phase == "forward"]
    flops, touched = 2 * 16 * 16 * 11, 4 * (16 * 16 + 16 * 11 + 16 * 11)
    by_flops, by_bytes = flops / CEILINGS.matmul_peak("fp32"), touched / CEILINGS.bandwidth(touched)
    assert row.figures.flops == flops
    assert row.figures.bytes_touched == touched
    assert row.figures.roof_seconds == pytest.approx(max(by_flops, by_bytes))
    assert row.figures.bound == ("FLOPs" if by_flops > by_bytes else "bytes")
    assert row.figures.roof_share == pytest.approx(max(by_flops, by_bytes) / row.figures.seconds)


@pytest.mark.thorough
def test_profiling_changes_nothing_that_is_computed() -> None:
    model, step, _ = training()
    measured_steps(step, model, torch.device("cpu"), steps=2, warm_up=1)
    witness, other, _ = training()
    for _ in range(1 + 4 * 2 + 2):
        other()
    for left, right in zip(model.parameters(), witness.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_step_without_its_module_has_rows_all_the_same() -> None:
    linear = nn.Linear(4, 4)
    found = napkin.profile(lambda: linear(torch.ones(2, 4)).sum().backward(), steps=1, ceilings=CEILINGS)
    assert found.by("operator")["addmm"].calls == 1
    assert {row.module for row in found.rows if row.operator == "addmm"} == {"Linear"}
    assert found.total.planned_seconds > 0
    assert "in operators" in repr(found)
    assert set(as_values(found)) >= {"rows", "outside", "seconds", "explained", "overhead"}


def test_a_format_without_a_measured_peak_has_no_roof_for_its_flops() -> None:
    linear = nn.Linear(4, 4).double()
    inputs = torch.ones(2, 4).double()
    ceilings = CatalogueCeilings(find_device("T4"))
    found = napkin.profile(lambda: linear(inputs).sum().backward(), linear, steps=1, ceilings=ceilings)
    assert found.price is None
    assert found.roofs is not None
    assert found.roofs.peaks == {}
    assert found.by("operator")["addmm"].flops == 2 * 2 * 4 * 4


def test_a_compiled_step_is_profiled_too() -> None:
    linear = nn.Linear(4, 4)
    # Compiled by autograd's own backend: operators as they are, in compiled functions.
    linear.compile(backend="aot_eager")
    found = napkin.profile(lambda: linear(torch.ones(2, 4)).sum().backward(), linear, steps=1, ceilings=CEILINGS)
    outside = sum(row.seconds for row in found.outside)
    assert found.total.seconds + outside == pytest.approx(found.seconds, rel=1e-9)
    assert found.by("operator")["addmm"].calls == 1


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(NapkinError, match=r"0 steps.*3.*warm-up: use.*1"):
        napkin.profile(lambda: None, steps=0)
    with pytest.raises(NapkinError, match=r"CPU.*CUDA device"):
        napkin.profile(lambda: None, nn.Linear(1, 1, device="meta"))
    with (
        torch_profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.raises(NapkinError, match="a profiler is running already"),
    ):
        napkin.profile(lambda: None, steps=1, ceilings=CEILINGS)


def test_the_module_is_as_it_was() -> None:
    linear = nn.Linear(4, 4)
    before = set(linear.__dict__)
    napkin.profile(lambda: linear(torch.ones(2, 4)).sum().backward(), linear, steps=1, ceilings=CEILINGS)
    assert set(linear.__dict__) == before
    assert not linear._forward_hooks
