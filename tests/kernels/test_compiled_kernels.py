"""The compiled kernels of a CPU beside the formulas in float64, forward and backward."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin.accounting.recording import record
from napkin.kernels.loss.cross_entropy import linear_cross_entropy, target_log_probabilities
from napkin.kernels.norms.normalization import compiled_layer_norm, compiled_rms_norm
from napkin.kernels.operator_forms import pinned_forms
from napkin.kernels.operators import FOR_TRAINING, KERNELS
from napkin.kernels.pointwise.activations import compiled_gelu_tanh, compiled_swiglu, gelu_tanh, swiglu_reference
from napkin.kernels.pointwise.rotary import (
    compiled_rotate_halves,
    compiled_rotate_interleaved,
    rotate_halves,
    rotate_interleaved,
)
from napkin.model.positions import RotaryEmbedding

EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["fp32", "bf16"])


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def layer_norm_formula(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, gain.shape, gain, bias, EPS)


def rms_norm_formula(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gain


def compare(compiled: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Results and gradients, of the largest number of each, within the resolution of the format."""
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    result, expected = compiled(*ours), formula(*theirs)
    gradient = drawn(*expected.shape, dtype=result.dtype, seed=99)
    result.backward(gradient)
    expected.backward(gradient.double())
    pairs = [(result, expected), *((x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))]
    for got, wanted in pairs:
        assert got is not None
        assert wanted is not None
        assert (got.double() - wanted).abs().max() <= 2 * TOLERANCES[inputs[0].dtype] * wanted.abs().max()


@DTYPES
def test_gelu_and_swiglu_equal_their_formulas(dtype: torch.dtype) -> None:
    for shape in ((3, 1), (5, 1026), (2, 70, 64)):
        compare(compiled_gelu_tanh, gelu_tanh, drawn(*shape, dtype=dtype))
    for shape in ((3, 2), (7, 130), (2, 70, 2048)):
        compare(compiled_swiglu, swiglu_reference, drawn(*shape, dtype=dtype))


def test_activations_of_the_largest_and_smallest_numbers() -> None:
    z = torch.tensor([0.0, -0.0, 1e-30, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, torch.inf, torch.nan])
    assert torch.equal(compiled_gelu_tanh(z).isnan(), gelu_tanh(z).isnan())
    torch.testing.assert_close(compiled_gelu_tanh(z)[:7], gelu_tanh(z)[:7], rtol=1e-6, atol=1e-6)
    gate_up = torch.stack((z, torch.ones_like(z)), dim=1)
    expected = swiglu_reference(gate_up)
    torch.testing.assert_close(compiled_swiglu(gate_up)[:9], expected[:9], rtol=1e-6, atol=1e-6)
    assert compiled_swiglu(gate_up)[10].isnan()


@DTYPES
def test_norms_equal_their_formulas(dtype: torch.dtype) -> None:
    for n_rows, n in ((1, 3), (131, 64), (257, 100)):
        x, gain, bias = drawn(n_rows, n, dtype=dtype), drawn(n, seed=1), drawn(n, seed=2)
        compare(lambda x, g: compiled_rms_norm(x, g, EPS), rms_norm_formula, x, gain)
        compare(lambda x, g, b: compiled_layer_norm(x, g, b, EPS), layer_norm_formula, x, gain, bias)


def test_a_narrow_norm_writes_what_autocast_would_read() -> None:
    x, gain, bias = drawn(40, 64), drawn(64, seed=1), drawn(64, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = compiled_layer_norm(x, gain, bias, EPS, narrow=True)
        wide = compiled_layer_norm(x, gain, bias, EPS)
    assert wide.dtype == torch.float32
    assert torch.equal(narrow, wide.bfloat16())


@DTYPES
def test_rotations_equal_the_plain_form_on_slices_of_heads(dtype: torch.dtype) -> None:
    heads = drawn(2, 9, 5, 16, dtype=dtype)
    for compiled, plain, pairing in (
        (compiled_rotate_halves, rotate_halves, "halves"),
        (compiled_rotate_interleaved, rotate_interleaved, "interleaved"),
    ):
        tables = RotaryEmbedding(16, 9, pairing=pairing)(9)
        ours, theirs = heads.clone().requires_grad_(), heads.clone().requires_grad_()
        # Queries and keys lie beside values.
        result, expected = compiled(ours[:, :, :3], *tables), plain(theirs[:, :, :3], *tables)
        torch.testing.assert_close(result, expected, rtol=2 * TOLERANCES[dtype], atol=TOLERANCES[dtype])
        gradient = drawn(2, 9, 3, 16, dtype=dtype, seed=3)
        result.backward(gradient)
        expected.backward(gradient)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2 * TOLERANCES[dtype], atol=2 * TOLERANCES[dtype])


def test_tables_that_were_cast_with_their_model_are_rotated_by_as_the_plain_form_does() -> None:
    heads = drawn(2, 9, 3, 16, dtype=torch.bfloat16)
    tables = tuple(table.bfloat16() for table in RotaryEmbedding(16, 9)(9))
    assert torch.equal(compiled_rotate_halves(heads, *tables), rotate_halves(heads, *tables))


LOSSES = [{}, {"z_weight": 1e-2}, {"logit_softcap": 5.0}, {"z_weight": 1e-2, "logit_softcap": 5.0}]


@pytest.mark.parametrize("settings", LOSSES, ids=["plain", "z", "softcap", "both"])
@DTYPES
def test_the_loss_equals_that_of_full_logits(settings: dict[str, Any], dtype: torch.dtype) -> None:
    hidden, weight = drawn(50, 32, dtype=dtype, scale=0.5), drawn(301, 32, dtype=dtype, seed=1)
    targets = torch.randint(301, (50,), generator=torch.Generator().manual_seed(2))
    targets[::7] = -1
    ours, theirs = ([x.clone().requires_grad_() for x in (hidden, weight)] for _ in range(2))
    found = linear_cross_entropy(ours[0], ours[1], targets, chunk_size=16, compiled=True, **settings)
    expected = full_loss(theirs[0].double(), theirs[1].double(), targets, **settings)
    torch.testing.assert_close(found.double(), expected, rtol=2 * TOLERANCES[dtype], atol=1e-6)
    with torch.no_grad():
        assert linear_cross_entropy(ours[0], ours[1], targets, chunk_size=16, compiled=True, **settings) == found
    found.backward()
    expected.backward()
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.double() - y.grad.double()).norm() <= 4 * TOLERANCES[dtype] * y.grad.double().norm()


def full_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float = 0, logit_softcap: float | None = None
) -> Tensor:
    logits = hidden @ weight.T
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    kept = targets != -1
    return F.cross_entropy(logits[kept], targets[kept]) + z_weight * logits[kept].logsumexp(dim=-1).square().mean()


def test_a_loss_of_huge_logits_is_finite_and_one_of_nan_is_nan() -> None:
    hidden, weight = 1000 * drawn(8, 16), drawn(50, 16, seed=1)
    targets = torch.arange(8)
    found = linear_cross_entropy(hidden, weight, targets, compiled=True)
    torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.T, targets), rtol=1e-5, atol=0)
    hidden[3, 3] = torch.nan
    assert linear_cross_entropy(hidden, weight, targets, compiled=True).isnan()


@pytest.mark.parametrize("settings", LOSSES, ids=["plain", "z", "softcap", "both"])
@pytest.mark.parametrize("sizes", [(50, 32, 301), (1, 64, 1), (37, 96, 1100), (16, 288, 1024)], ids=str)
def test_a_loss_without_a_gradient_in_tiles_is_that_of_exact_logits(
    settings: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    n, width, vocab_size = sizes
    hidden, weight = (
        drawn(rows, width, dtype=torch.bfloat16, scale=scale, seed=rows) for rows, scale in ((n, 0.5), (vocab_size, 2))
    )
    targets = torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(2))
    targets[1::7] = -1
    expected = full_loss(hidden.double(), weight.double(), targets, **settings)
    found = loss_in_tiles(hidden, weight, targets, **settings)
    # Logits are not rounded to bf16, so that only sums in fp32 differ.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def loss_in_tiles(hidden: Tensor, weight: Tensor, targets: Tensor, **settings: Any) -> Tensor:
    with torch.no_grad(), pinned_forms({"head_without_gradient": "tiles"}):
        return linear_cross_entropy(hidden, weight, targets, compiled=True, **settings)


def test_a_loss_in_tiles_of_huge_logits_is_finite_one_of_nan_is_nan_and_no_target_is_outside() -> None:
    hidden, weight = 1000 * drawn(11, 32, dtype=torch.bfloat16), drawn(700, 32, dtype=torch.bfloat16, seed=1)
    targets = 60 * torch.arange(11)
    expected = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    torch.testing.assert_close(loss_in_tiles(hidden, weight, targets).double(), expected, rtol=1e-5, atol=0)
    for place in ((3, 3), (10, 31)):
        broken = hidden.clone()
        broken[place] = torch.nan
        assert loss_in_tiles(broken, weight, targets).isnan()
    with pytest.raises(IndexError, match="outside of a vocabulary of 700"):
        loss_in_tiles(hidden, weight, targets + 700)


def test_the_products_of_a_loss_in_tiles_are_counted_as_those_of_chunks() -> None:
    hidden, weight = drawn(40, 64, dtype=torch.bfloat16), drawn(130, 64, dtype=torch.bfloat16, seed=1)
    targets = torch.arange(40)
    tiles = record(nn.Module(), lambda: loss_in_tiles(hidden, weight, targets))
    with torch.no_grad():
        chunks = record(nn.Module(), lambda: linear_cross_entropy(hidden, weight, targets, chunk_size=16))
    assert "compiled_head_rows" in {row.operator for row in tiles.rows}
    assert not tiles.unknown_operators
    assert tiles.flops == chunks.flops == 2 * 40 * 64 * 130


@DTYPES
def test_log_probabilities_of_targets_are_those_of_a_softmax(dtype: torch.dtype) -> None:
    logits, targets = drawn(300, 1001, dtype=dtype), torch.arange(300) * 3
    wanted = logits.double().log_softmax(dim=-1)[torch.arange(300), targets]
    found = target_log_probabilities(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("target", [-2, 50])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match="outside of a vocabulary of 50"):
        linear_cross_entropy(drawn(1, 16), drawn(50, 16), torch.tensor([target]), compiled=True)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, gain, bias = drawn(1000, 128).requires_grad_(), drawn(128, seed=1).requires_grad_(), drawn(128, seed=2)
    found: list[list[Tensor]] = []
    operators = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            normed = compiled_layer_norm(x, gain, bias, EPS)
            # Its products have one number that is not 0 in each sum: torch's own order of sums depends on threads.
            loss = linear_cross_entropy(normed, torch.eye(600, 128), torch.arange(1000) % 600, compiled=True)
            loss.backward()
            assert x.grad is not None
            assert gain.grad is not None
            found.append([loss.detach(), x.grad, gain.grad])
            x.grad = gain.grad = None
            narrow = drawn(1000, 64, dtype=torch.bfloat16), drawn(600, 64, dtype=torch.bfloat16, seed=3)
            found[-1].append(loss_in_tiles(*narrow, torch.arange(1000) % 600))
    finally:
        torch.set_num_threads(operators)
    assert all(map(torch.equal, *found))


def test_a_team_with_fewer_threads_than_parts_computes_all_of_them() -> None:
    from napkin.kernels import operators

    team = operators._team()
    if team is None:
        pytest.skip("torch is not built with GNU's OpenMP")
    KERNELS.load(*FOR_TRAINING)
    from napkin.kernels.loss.numba_loss import add_narrow

    total, part = torch.zeros(100), drawn(100, dtype=torch.bfloat16)
    parts = [(total.data_ptr(), part.data_ptr(), start, start + 20, 0) for start in range(0, 100, 20)]
    for n_threads in (1, 2):
        team.run(add_narrow, parts, n_threads)
        assert torch.equal(total, n_threads * part.float())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_computes_loops_of_all_sizes_on_no_more_threads_than_torch_has() -> None:
    program = """
import os, threading
import numpy as np, torch
from napkin.kernels.pointwise.activations import compiled_gelu_tanh
torch.set_num_threads(4)
parts = [torch.randn(n * 2**18) for n in (1, 2, 3, 4)]
before = [compiled_gelu_tanh(part).numpy() for part in parts]
if not os.fork():
    same = [np.array_equal(compiled_gelu_tanh(part).numpy(), wanted) for part, wanted in zip(parts, before)]
    print(all(same), threading.active_count() - 1 <= 4, flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
