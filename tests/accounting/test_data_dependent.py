"""Steps that depend on data: routed tokens are counted as distributed evenly, all others by running."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin import Ledger, NapkinError, count
from oracles.expert_models import (
    GroupedExperts,
    HitExperts,
    ListedExperts,
    MaskedExperts,
    MixtureOfExperts,
    StackedExperts,
)
from oracles.torch_models import GPT2

X = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
ROUTERS = [StackedExperts, GroupedExperts, ListedExperts, HitExperts, MaskedExperts]


def in_autocast(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x)
    loss.backward()
    model.zero_grad()


def contractions(ledger: Ledger) -> list[tuple[Any, ...]]:
    return [(row.operator, row.phase, row.module, row.flops, row.contraction) for row in ledger.rows if row.contraction]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("step", [None, in_autocast], ids=["fp32", "autocast"])
@pytest.mark.parametrize("experts", ROUTERS)
def test_routed_tokens_are_counted_as_if_they_were_distributed_evenly(
    experts: type[nn.Module], step: Callable[..., None] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = MixtureOfExperts(experts, k=1 if experts is MaskedExperts else 2)
    traced, ran = count(model, X, step), count(model, X, step, by="running")
    assert contractions(traced) == contractions(ran)
    assert traced.flops == ran.flops > 0
    assert not traced.unknown_operators
    # Grouped products are as large however their rows are distributed.
    assert ("evenly" in traced.assumption) == (experts is not GroupedExperts)
    assert ("assumed" in repr(traced)) == bool(traced.assumption)
    assert (traced.source, ran.source) == ("trace", "run")
    assert ran.assumption == ""
    assert not caplog.records


@pytest.mark.parametrize("experts", [GroupedExperts, ListedExperts])
def test_the_traced_peak_of_experts_is_that_of_an_even_run(experts: type[nn.Module]) -> None:
    model = MixtureOfExperts(experts)
    adamw = torch.optim.AdamW
    traced, ran = count(model, X, optimizer=adamw), count(model, X, optimizer=adamw, by="running")
    assert traced.peak_bytes == pytest.approx(ran.peak_bytes, rel=0.01)


class NeedsData(nn.Module):
    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(16, 16), act

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return self.layer(x)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "act",
    [lambda x: x.sum().item(), lambda x: x[x > 0].sum(), lambda x: x.nonzero(), lambda x: 1 / (x.sum() > 0).long()],
    ids=["item", "mask", "nonzero", "number"],
)
def test_what_depends_on_data_is_counted_by_running_it(act: Callable[[Tensor], Any]) -> None:
    ledger = count(NeedsData(act), X, by="running")
    assert ledger.flops == count(NeedsData(lambda x: None), X).flops
    assert "of a step that ran" in repr(ledger)


def test_a_refusal_is_one_line_names_the_way_out_and_has_no_cause_to_print() -> None:
    with pytest.raises(NapkinError, match="by='running'") as refusal:
        count(NeedsData(lambda x: x.sum().item()), X)
    assert "\n" not in str(refusal.value)
    assert refusal.value.__suppress_context__
    with pytest.raises(NapkinError, match="use 'tracing' or 'running'"):
        count(nn.Linear(16, 4), X, by="hand")  # pyright: ignore[reportArgumentType]
    with pytest.raises(NapkinError, match="leave `target` out"):
        count(nn.Linear(16, 4), X, by="running", target="cuda")
    with FakeTensorMode():
        fake = nn.Linear(16, 4)
    for module in (fake, nn.Linear(16, 4, device="meta")):
        with pytest.raises(NapkinError, match="needs data"):
            count(module, X, by="running")


def test_a_run_counts_what_a_trace_counts() -> None:
    tokens = torch.randint(0, 300, (2, 64))
    model = GPT2(300, 64, 2, 64, 4)
    traced, ran = (count(model, (tokens, tokens), optimizer=torch.optim.AdamW, by=by) for by in ("tracing", "running"))
    assert [(row.operator, row.phase, row.module, row.flops, row.component) for row in traced.rows] == [
        (row.operator, row.phase, row.module, row.flops, row.component) for row in ran.rows
    ]
    assert ran.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.01)
    assert sum(ran.peak_by_category.values()) == ran.peak_bytes


def test_a_run_leaves_module_batch_and_random_state_untouched() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    module[0].weight.grad = torch.ones(16, 16)
    gradient, before, random_state = module[0].weight.grad, copy.deepcopy(module.state_dict()), torch.get_rng_state()

    def step(module: nn.Module, x: Tensor) -> None:
        module(x).sum().backward()
        x.zero_()

    x = X.clone()
    count(module, x, step, by="running")
    count(module, x, optimizer=torch.optim.SGD, by="running")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module[0].weight.grad is gradient
    assert module[1].weight.grad is None
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["tracing", "running"])
def test_compiled_modules_have_the_products_of_their_originals(by: Any) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

    plain, parts, itself = build(), build(), build()
    parts[0] = torch.compile(parts[0])  # pyright: ignore[reportArgumentType]
    parts[2].compile()
    itself.compile()
    expected = contractions(count(plain, X, by=by))
    assert contractions(count(torch.compile(build()), X, by=by)) == expected  # pyright: ignore[reportArgumentType]
    for module in (parts, itself):
        # torch runs a layer of its own that was compiled in place uncompiled, and what is in it has no names.
        found = contractions(count(module, X, by=by))
        assert [(*row[:2], *row[3:]) for row in found] == [(*row[:2], *row[3:]) for row in expected]
    assert type(parts[0]).__name__ == "OptimizedModule"


@pytest.mark.parametrize("by", ["tracing", "running"])
def test_a_module_without_parameters_is_counted_forward(by: Any) -> None:
    class Attends(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.transpose(-1, -2)).softmax(dim=-1) @ k

    q = torch.randn(2, 8, 16)
    ledger = count(Attends(), (q, q), optimizer=torch.optim.AdamW, by=by)
    assert ledger.flops == ledger.forward_flops == ledger.attention_flops == 2 * 2 * 2 * 8 * 8 * 16
    assert ledger.parameters == 0
    # An input may need its gradient all the same.
    trained = count(Attends(), (q.clone().requires_grad_(), q), by=by)
    assert trained.backward_flops == trained.forward_flops
