"""Products of a block's decoding step as compiled for compute capability 8.0 and 9.0, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from napkin.kernels.decoding.block_step import (
    HeadForm,
    NewSlots,
    Norm,
    Product,
    add_product,
    project_activation,
    project_heads,
)
from napkin.model.quantized import Int8Linear
from oracles.ptx.launches import executing_ptx


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("n", "rows", "columns", "int8", "capability"),
    [(17, 40, 129, False, 80), (3, 24, 80, False, 90), (3, 24, 80, True, 80)],
)
def test_compiled_products_behind_a_norm_and_before_a_residual(
    n: int, rows: int, columns: int, int8: bool, capability: int
) -> None:
    x, gain, shift, bias = (
        drawn(*shape, seed=s) for s, shape in enumerate([(n, columns), (columns,), (columns,), (2 * rows,)])
    )
    if int8:
        tensors = Int8Linear.quantized(drawn(2 * rows, columns, seed=5, dtype=torch.float32))
        matrix = [tensors["values"], tensors["scales"].float()]
        weight = matrix[0].double() * matrix[1].double()[:, None]
    else:
        matrix = [drawn(2 * rows, columns, seed=5)]
        weight = matrix[0].double()
    residual = drawn(n, 2 * rows, seed=6)
    with executing_ptx(capability) as executed:
        gated = project_activation(x, Norm(gain, shift, 1e-5, True), Product(matrix, bias), "silu", gated=True)
        added = add_product(x[:, None, None], None, Product(matrix, bias, 0.5), residual)
    up = F.layer_norm(x.double(), (columns,), gain.double(), shift.double(), 1e-5) @ weight.T + bias.double()
    expected = F.silu(up[:, :rows]) * up[:, rows:], residual.double() + 0.5 * x.double() @ weight.T + bias.double()
    for found, each in zip((gated, added), expected, strict=True):
        assert (found - each).abs().max() <= 2e-2 * each.abs().max()
    assert [each.kernel for each in executed] == ["activation_kernel", "sum_kernel"]


@torch.inference_mode()
@pytest.mark.parametrize(("width", "interleaved", "capability"), [(34, False, 80), (64, True, 90)])
def test_compiled_heads_go_to_their_slots_alone(width: int, interleaved: bool, capability: int) -> None:
    n, columns, n_heads, n_kv_heads = 3, 72, 3, 1
    x, gain = drawn(n, columns, seed=0), drawn(columns, seed=1)
    weight = drawn((n_heads + 2) * width, columns, seed=2)
    cosines, sines = (drawn(n, width, seed=seed, dtype=torch.float32) for seed in (4, 5))
    keys, values = (torch.full((4, n_kv_heads, 5, width), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    blocks, slots = torch.tensor([2, 0, 2]), torch.tensor([4, 0, 1])
    form = HeadForm(n_heads, cosines=cosines, signed_sines=sines, interleaved=interleaved)
    with executing_ptx(capability) as executed:
        new = NewSlots(keys, values, blocks, slots)
        queries = project_heads(x, Norm(gain, None, 1e-5, False), Product([weight], None), form, new)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    heads = (normed @ weight.double().T).view(n, n_heads + 2, width)
    swapped = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else heads.roll(width // 2, dims=-1)
    turned = heads * cosines[:, None] + swapped * sines[:, None]
    found = queries[:, :, 0], keys[blocks, :, slots], values[blocks, :, slots]
    expected = turned[:, :n_heads], turned[:, n_heads : n_heads + 1], heads[:, n_heads + 1 :]
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 2e-2 * theirs.abs().max()
    for held in (keys, values):
        assert int(held.isfinite().sum()) == n * n_kv_heads * width
    assert [each.kernel for each in executed] == ["heads_kernel"]
