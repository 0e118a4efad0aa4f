"""Training on a GPU, beside the same on the CPU."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.kernels import fused_linear_cross_entropy, linear_cross_entropy
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.recipe import Recipe
from napkin.runs.metrics import read_metrics
from napkin.training.run import train
from oracles.tiny_run import tiny_recipe, write_tiny_text

pytestmark = pytest.mark.gpu
PATHS = os.pathsep.join(filter(None, sys.path))
MODELS = {
    "llama": ModelConfig(vocab_size=512, context_length=64, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2),
    "gpt2": ModelConfig(
        vocab_size=512, context_length=64, d_model=128, n_layers=2, n_heads=4, norm="layer", feed_forward="gelu_tanh",
        biases="all", positions="learned",
    ),
    "experts": ModelConfig(
        vocab_size=512, context_length=64, d_model=128, n_layers=2, n_heads=4, n_experts=4, experts_per_token=2
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_tiny_text(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_cpu_in_fp64(device: str, name: str) -> None:
    torch.manual_seed(0)
    exact = Transformer(MODELS[name]).double()
    ids = torch.randint(512, (4, 65))
    on_device = Transformer(MODELS[name]).to(device)
    on_device.load_state_dict(exact.state_dict())
    losses = []
    for model in (exact, on_device):
        where = model.head_weight.device
        loss = model.loss(ids[:, :-1].to(where), ids[:, 1:].to(where))
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for (where, expected), parameter in zip(exact.named_parameters(), on_device.parameters(), strict=True):
        assert expected.grad is not None
        assert parameter.grad is not None, where
        difference = (parameter.grad.cpu().double() - expected.grad).abs().max()
        assert difference <= 1e-4 * expected.grad.abs().max(), where


def losses_of(recipe: Recipe, folder: Path) -> list[float]:
    train(recipe, folder)
    return [metrics.loss for metrics in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp8", "int8"])
def test_losses_follow_those_of_the_cpu(device: str, texts: Path, tmp_path: Path, precision: str) -> None:
    recipe = tiny_recipe(texts, steps=12, precision=precision, log_every=1)
    cpu = losses_of(with_device(recipe, "cpu", "fp32"), tmp_path / "cpu")
    found = losses_of(with_device(recipe, device), tmp_path / "device")
    assert found == pytest.approx(cpu, rel=1e-4 if precision == "fp32" else 0.03)


def with_device(recipe: Recipe, device: str, precision: str | None = None) -> Recipe:
    changes = {"device": device} | ({"precision": precision} if precision else {})
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **changes))


def test_a_resumed_run_ends_as_one_that_was_not_stopped(device: str, texts: Path, tmp_path: Path) -> None:
    whole = with_device(tiny_recipe(texts, steps=8, precision="fp32", log_every=1, checkpoint_every=4), device)
    expected = losses_of(whole, tmp_path / "whole")
    folder = tmp_path / "stopped"
    seen: list[int] = []

    class Stop(Exception):
        pass

    def stop(metrics: object) -> None:
        seen.append(1)
        if len(seen) == 6:
            raise Stop

    with pytest.raises(Stop):
        train(whole, folder, on_step=stop)
    assert losses_of(whole, folder) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [linear_cross_entropy, fused_linear_cross_entropy])
def test_the_heads_gradient_in_bf16_adds_up_in_fp32(device: str, loss: Any) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 64).bfloat16().double(), torch.randn(1000, 64).bfloat16().double()
    targets = torch.randint(1000, (700,))
    weight.requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden @ weight.T, targets), [weight])
    given = weight.detach().to(device, torch.float32).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss(hidden.to(device, torch.float32), given, targets.to(device), chunk_size=128).backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad.cpu().double(), expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))


TRAINS = """
import sys
from oracles.tiny_run import tiny_recipe
from napkin.training.run import train

texts, folder, device, precision = sys.argv[1:]
train(tiny_recipe(texts, steps=12, precision=precision, device=device, deterministic=True), folder)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_have_the_same_bits(device: str, texts: Path, tmp_path: Path, precision: str) -> None:
    weights = []
    for name in ("first", "second"):
        # cuBLAS is told of its workspaces before the first product of a process.
        arguments = [sys.executable, "-c", TRAINS, str(texts), str(tmp_path / name), device, precision]
        subprocess.run(arguments, check=True, cwd=Path(__file__).parents[1], env=os.environ | {"PYTHONPATH": PATHS})
        (found,) = (tmp_path / name / "checkpoints").glob("*12/model.safetensors")
        weights.append(found.read_bytes())
    assert weights[0] == weights[1]
