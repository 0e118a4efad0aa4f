"""Compiled loops read addresses and check nothing: whatever the layout of their tensors, results are the plain forms',
and what those refuse is refused."""

import subprocess
import sys

import pytest
import torch

from napkin.kernels.attention.by_rows import compiled_attention
from napkin.kernels.loss.cross_entropy import HEAD, linear_cross_entropy, target_log_probabilities
from napkin.kernels.norms.normalization import compiled_layer_norm, compiled_rms_norm, layer_norm, rms_norm
from napkin.kernels.operator_forms import pinned_forms

N, WORDS, WIDTH = 48, 4096, 64

LAYOUTS = {
    "strided": lambda x: torch.stack([x, x + 7], dim=-1)[..., 0],
    "int32": lambda x: x.int(),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["tiles", "chunks"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_loss_reads_targets_of_any_layout(layout: str, form: str, trains: bool) -> None:
    hidden, weight = torch.randn(N, WIDTH).bfloat16().requires_grad_(trains), torch.randn(WORDS, WIDTH).bfloat16()
    targets = LAYOUTS[layout](torch.randint(WORDS, (N,)))
    with pinned_forms({HEAD: form}):
        loss = linear_cross_entropy(hidden, weight, targets, compiled=True)
        assert loss == linear_cross_entropy(hidden, weight, targets.long().clone(), compiled=True)
    plain = torch.nn.functional.cross_entropy(hidden.float() @ weight.float().T, targets.long())
    assert loss.item() == pytest.approx(plain.item(), rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_those_of_targets_of_any_layout(layout: str) -> None:
    logits = torch.randn(N, WORDS).bfloat16()
    targets = LAYOUTS[layout](torch.randint(WORDS, (N,)))
    plain = torch.log_softmax(logits.float(), dim=1).gather(1, targets.long()[:, None])[:, 0]
    torch.testing.assert_close(target_log_probabilities(logits, targets), plain)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["tiles", "rows"])
def test_attention_reads_first_keys_of_any_layout(layout: str, form: str) -> None:
    queries, keys, values = torch.randn(3, 3, 2, N, 32).bfloat16().unbind()
    first_keys = LAYOUTS[layout](torch.minimum(torch.randint(N, (3, N)), torch.arange(N)))
    with pinned_forms({"compiled_attention": form}):
        mixed = compiled_attention(queries, keys, values, first_keys=first_keys)
    plain = compiled_attention(queries.float(), keys.float(), values.float(), first_keys=first_keys.long().clone())
    torch.testing.assert_close(mixed.float(), plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", ["tiles", "rows"])
def test_attention_of_no_queries_is_empty(form: str) -> None:
    nothing = torch.empty(2, 2, 0, 32).bfloat16()
    with pinned_forms({"compiled_attention": form}):
        assert compiled_attention(nothing, nothing, nothing).shape == nothing.shape


def test_norms_read_gains_and_biases_of_any_layout() -> None:
    x, gain = torch.randn(5, WIDTH), torch.randn(2 * WIDTH)[::2]
    torch.testing.assert_close(compiled_rms_norm(x, gain, 1e-5), rms_norm(x, gain, 1e-5))
    torch.testing.assert_close(compiled_layer_norm(x, gain, gain, 1e-5), layer_norm(x, gain, gain, 1e-5))


def test_what_the_plain_forms_refuse_is_refused() -> None:
    # In a process of its own, as users run it: here a type checker refuses other shapes first.
    program = """
import torch
from napkin.kernels.norms.normalization import compiled_rms_norm
from napkin.kernels.pointwise.activations import compiled_swiglu
from napkin.kernels.pointwise.rotary import compiled_rotate_halves
for compute, arguments in (
    (compiled_rms_norm, (torch.randn(5, 64), torch.randn(8), 1e-5)),
    (compiled_swiglu, (torch.randn(5, 7),)),
    (compiled_rotate_halves, (torch.randn(2, 6, 3, 8), torch.randn(4, 8), torch.randn(4, 8))),
):
    try:
        compute(*arguments)
    except RuntimeError as error:
        print("size of tensor" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True"] * 3
