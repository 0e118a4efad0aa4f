"""Every optimizer by its name: built for a model, counted, trained with, saved and resumed."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin import count
from napkin.checkpoint.restore import load_train_state
from napkin.checkpoint.writer import save_checkpoint
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.optim import base
from napkin.optim.registry import OPTIMIZERS, build_optimizer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.brute_force_flops import ScalarProducts

MODEL = ModelConfig(vocab_size=61, context_length=16, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
EVERY_NAME = pytest.mark.parametrize("name", OPTIMIZERS)
# What takes long is done with these by default.
SHORT = ("adamw", "lion", "muon")


def make_learner(name: str, products: Literal["fp32", "bf16"] = "fp32", **options: Any) -> TrainState:
    recipe = Recipe(
        model=MODEL,
        optimizer=OptimizerConfig(name=name, schedule="constant", warmup_steps=5, **options),
        training=TrainingConfig(steps=1000, batch_size=2),
    )
    return build_train_state(ResolvedRecipe(recipe, Precision(products, "cpu")))


def learn(train_state: TrainState, first: int, last: int, *, one_batch: bool = False) -> list[float]:
    losses = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(0 if one_batch else number)
        tokens = torch.randint(0, MODEL.vocab_size, (2, MODEL.context_length + 1), generator=generator)
        losses.append(train_state.step(number, tokens[:, :-1], tokens[:, 1:])[0].item())
        if losses[-1] < 0.05:
            break
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.torture) for name in OPTIMIZERS],
)
def test_it_drives_the_loss_on_one_batch_below_a_twentieth(name: str) -> None:
    assert learn(make_learner(name), 0, 500, one_batch=True)[-1] < 0.05


@pytest.mark.sampled(every=2)
@EVERY_NAME
def test_a_run_that_was_saved_and_loaded_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    through = make_learner(name)
    learn(through, 0, 3)
    checkpoint = save_checkpoint(tmp_path, through, step=3, seconds=1.0, tokenizer="t", train_tokens="d")
    resumed = make_learner(name)
    load_train_state(checkpoint, resumed)
    assert learn(resumed, 3, 7) == learn(through, 3, 7)
    for one, other in zip(resumed.model.parameters(), through.model.parameters(), strict=True):
        assert torch.equal(one, other)


def state_bytes_by_hand(name: str, model: nn.Module) -> int:
    """From names and shapes alone."""
    total = 0
    for path, parameter in model.named_parameters():
        if name == "adafactor" and parameter.ndim == 2:
            total += 4 * sum(parameter.shape)
        elif name == "muon" and (parameter.ndim < 2 or "blocks" not in path):
            total += 8 * parameter.numel()
        elif name == "adafactor":
            total += 4 * parameter.numel()
        else:
            total += OPTIMIZERS[name].state_bytes * parameter.numel()
    return total


@pytest.mark.sampled(every=4)
@EVERY_NAME
def test_the_bytes_of_state_that_its_docstring_states_are_those_that_are_counted_and_held(name: str) -> None:
    module, _, class_name = OPTIMIZERS[name].path.partition(".")
    text = getattr(importlib.import_module(f"napkin.optim.{module}"), class_name).__doc__
    assert f" {OPTIMIZERS[name].state_bytes} bytes per parameter" in " ".join(text.split())
    train_state = make_learner(name)
    learn(train_state, 0, 1)
    held = sum(tensor.nbytes for state in train_state.optimizer.state.values() for tensor in state.values())
    ledger = count_step(ResolvedRecipe(train_state.recipe, train_state.precision))
    assert ledger.parameters == sum(parameter.numel() for parameter in train_state.model.parameters())
    assert ledger.peak_by_category.get("optimizer state", 0) == held == state_bytes_by_hand(name, train_state.model)
    assert not ledger.unknown_operators


class Layers(nn.Module):
    """Enough matrices for several buckets, and vectors; the update takes more memory than all that precedes it."""

    def __init__(self, sizes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=dtype) for size in sizes)
        self.table = nn.Parameter(torch.zeros(sizes[0], dtype=dtype))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(parameter * scale).sum() for parameter in self.parameters()]).sum()


class Updating:
    """A step that is little more than the update; on fake tensors or on real ones."""

    def __init__(self, name: str, sizes: tuple[tuple[int, int], ...], dtype: torch.dtype, *, fused: bool) -> None:
        self.module = Layers(sizes, dtype)
        self.optimizer = build_optimizer(name, self.module, products=dtype, fused=fused)
        self.batch = (torch.ones((), dtype=dtype),)

    def step(self, module: nn.Module, batch: tuple[Tensor, ...]) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "fused"),
    [(name, False) for name in OPTIMIZERS] + [(name, True) for name, choice in OPTIMIZERS.items() if choice.fused],
)
def test_resident_and_peak_bytes_of_an_update_are_the_allocators(
    name: str, fused: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ((180, 140), (140, 180), (180, 140), (220, 200), (64, 64))
    monkeypatch.setattr(base, "_BUCKET_NUMEL", 2**16)
    with FakeTensorMode():
        fake = Updating(name, sizes, dtype, fused=fused)
        counted = count(fake.module, fake.batch, fake.step)
    assert not counted.unknown_operators

    real = Updating(name, sizes, dtype, fused=fused)
    real.step(real.module, real.batch)
    state = [tensor for tensors in real.optimizer.state.values() for tensor in tensors.values()]
    resident = storage_bytes([*real.module.parameters(), *real.batch, *state])
    assert counted.resident_bytes == pytest.approx(resident, abs=16)
    growth, _ = growth_at_peak(lambda: real.step(real.module, real.batch))
    assert counted.peak_bytes == pytest.approx(resident + growth, rel=1e-3)


@EVERY_NAME
def test_flops_of_an_update_equal_the_multiplications_and_additions_done_one_by_one(name: str) -> None:
    sizes = ((6, 4), (4, 6), (6, 4), (5, 5))
    real = Updating(name, sizes, torch.float64, fused=False)
    with FakeTensorMode():
        fake = Updating(name, sizes, torch.float64, fused=False)
        counted = count(fake.module, fake.batch, fake.step)
    with ScalarProducts() as oracle:
        real.step(real.module, real.batch)
    assert counted.flops == sum(row.flops for row in counted.rows if row.phase == "optimizer") == oracle.flops
    assert (oracle.flops > 0) == (name == "muon")


def test_the_flops_of_newton_schulz_are_those_of_its_docstring() -> None:
    train_state = make_learner("muon")
    ledger = count_step(ResolvedRecipe(train_state.recipe, train_state.precision))
    expected = 0
    for path, parameter in train_state.model.named_parameters():
        if "blocks" in path and parameter.ndim == 2:
            m, n = sorted(parameter.shape)
            expected += 5 * 2 * (2 * m * m * n + m**3)
    assert sum(row.flops for row in ledger.rows if row.phase == "optimizer") == expected


def test_muon_orthogonalises_the_matrices_of_the_blocks_alone() -> None:
    train_state = make_learner("muon")
    groups = train_state.optimizer.param_groups
    orthogonal = {p for group in groups if group["orthogonal"] for p in group["params"]}
    named = dict(train_state.model.named_parameters())
    assert orthogonal == {p for path, p in named.items() if path.startswith("blocks.") and p.ndim == 2}
    assert sorted(map(id, named.values())) == sorted(id(p) for group in groups for p in group["params"])
    assert {group["weight_decay"] for group in groups for p in group["params"] if p.ndim == 1} == {0.0}
    with pytest.raises(NapkinError, match=r"Linear.*nn.ModuleList"):
        build_optimizer("muon", nn.Linear(2, 2))


def test_muons_products_are_in_the_format_of_the_models() -> None:
    for products in ("fp32", "bf16"):
        train_state = make_learner("muon", products)
        ledger = count_step(ResolvedRecipe(train_state.recipe, train_state.precision))
        formats = {row.format for row in ledger.rows if row.phase == "optimizer" and row.flops}
        assert formats == {products}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamx", {}, "no optimizer 'adamx': use one of sgd"),
        ("sgd", {"momentum": 0.9}, "sgd takes no momentum: leave it out, or use one of learning_rate, weight_decay"),
        ("lion", {"fused": True}, "no fused kernel for Lion"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NapkinError, match=message):
        build_optimizer(name, nn.Linear(2, 2), **options)


def test_a_recipe_without_a_name_is_adamw_as_ever() -> None:
    chosen = dataclasses.asdict(OptimizerConfig().resolved)
    assert {name: chosen[name] for name in ("name", "learning_rate", "beta1", "beta2", "eps", "weight_decay")} == {
        "name": "adamw",
        "learning_rate": 3e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
