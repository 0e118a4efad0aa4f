"""The same bits each time: which forms are taken, what has none, and the price."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from napkin import count
from napkin.accounting.cuda.caching_allocator import rounded
from napkin.distributed.joining import join_ranks
from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget
from napkin.kernels.deterministic import CUBLAS_WORKSPACE, deterministic_algorithms, ordered_sums
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan, resolve
from napkin.planning.step.machine import machine_of
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step
from napkin.training import train
from oracles.tiny_run import tiny_recipe, write_tiny_text

MODEL = ModelConfig(vocab_size=500, d_model=128, n_layers=2, n_heads=2, context_length=128)


def recipe_of(model: ModelConfig = MODEL, **training: object) -> Recipe:
    settings = {"batch_size": 8, "micro_batch_size": 4, "precision": "bf16", "deterministic": True, **training}
    return Recipe(model=model, training=TrainingConfig(**settings))  # pyright: ignore[reportArgumentType]


def operators_that_raise() -> set[str]:
    """The functions of which torch's documentation says that they raise an error in its deterministic mode."""
    text = str(torch.use_deterministic_algorithms.__doc__)
    section = text.split("operations will throw a")[-1].split("In addition")[0]
    names = re.findall(r":(?:func|class):`torch\.([\w.]+)`", section)
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", name.split(".")[-1]).lower().rstrip("_") for name in names}


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("experts", [0, 4])
def test_a_step_on_a_gpu_calls_nothing_that_raises_in_deterministic_mode(kernels: str, experts: int) -> None:
    refused = operators_that_raise()
    assert {"put", "histc", "median", "max_unpool2d"} <= refused
    model = dataclasses.replace(MODEL, n_experts=experts, dropout=0.1)
    ledger = count_step(resolve(recipe_of(model, kernels=kernels), machine_of("H100", device="auto")))
    called = {row.operator.rstrip("_"): row for row in ledger.rows}
    # Of integers, its order does not matter.
    assert {name for name in refused & called.keys() if (name, called[name].format) != ("cumsum", "int64")} == set()
    assert "_scaled_dot_product_flash_attention_backward" in called
    assert not any("cudnn" in name for name in called)
    assert not torch.are_deterministic_algorithms_enabled()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(1, 256, 1, 64).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def test_flash_attention_has_a_sum_of_the_gradient_of_queries_for_each_multiprocessor() -> None:
    target = CudaTarget((8, 0), multiprocessors=1000)
    peaks = []
    for deterministic in (False, True):
        with deterministic_algorithms(deterministic):
            module, x = Attends().bfloat16(), torch.randn(1, 256, 64, dtype=torch.bfloat16, requires_grad=True)
            peaks.append(count(module, x, target=target).peak_bytes)
    # One head of one sequence: a sum for each of 1000 multiprocessors instead of one, and two workspaces of cuBLAS.
    one = 4 * 256 * 64
    assert peaks[1] - peaks[0] == rounded(1000 * one) - rounded(one) + 2 * (2**25 - 8_519_680)


def test_the_price_is_the_difference_of_two_plans() -> None:
    usual, same_bits = (plan(recipe_of(deterministic=wanted), on="A100") for wanted in (False, True))
    price = same_bits.deterministic
    assert usual.deterministic is None
    assert price is not None
    assert price.more_bytes == same_bits.peak_bytes - usual.peak_bytes >= 2 * (2**25 - 8_519_680)
    assert price.share > 0
    assert same_bits.seconds_per_step == pytest.approx(usual.seconds_per_step * (1 + price.share))
    assert price.describe().startswith("deterministic: +")
    # A CPU has the same bits anyway.
    assert plan(recipe_of(precision="fp32", kernels="plain")).deterministic is None


def test_an_operator_without_such_a_form_is_named_with_the_way_out() -> None:
    numbers = torch.zeros(3)
    expected = pytest.raises(NapkinError, match=r"put_ has no form.*leave out --training.deterministic")
    with expected, deterministic_algorithms(True):
        numbers.put_(torch.tensor([0, 0]), torch.ones(2))
    numbers.put_(torch.tensor([0, 0]), torch.ones(2))


def test_other_errors_and_settings_stay_as_they_are() -> None:
    expected = pytest.raises(RuntimeError, match="must match")
    with expected, deterministic_algorithms(True):
        torch.add(torch.zeros(2), torch.zeros(3))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":0:0", ":4096:8"), (":16:8", ":16:8")])
def test_cublas_is_told_before_its_first_product(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, before or "")
    with join_ranks(TrainingConfig()):
        assert os.environ[CUBLAS_WORKSPACE] == (before or "")
    with join_ranks(TrainingConfig(deterministic=True)):
        assert os.environ[CUBLAS_WORKSPACE] == after


def test_two_runs_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, "")
    write_tiny_text(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=3, checkpoint_every=3, evaluate_every=3, precision="fp32", deterministic=True)
    weights = [
        (train(recipe, tmp_path / name).checkpoint / "model.safetensors").read_bytes() for name in ("first", "second")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("n", [1, 2, 24, 25, 26, 1000])
def test_ordered_sums_are_the_cumulative_sums(n: int) -> None:
    weights = torch.rand(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    found = ordered_sums(weights)
    torch.testing.assert_close(found, weights.cumsum(dim=-1), rtol=1e-13, atol=0)
    assert bool((found.diff(dim=-1) >= 0).all())
