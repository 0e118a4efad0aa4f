"""What each fused operator has to equal: the plain form, in fp64 on the same numbers, and its gradients by autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from napkin.kernels.loss.cross_entropy import fused_linear_cross_entropy
from napkin.kernels.norms.normalization import fused_layer_norm, fused_rms_norm
from napkin.kernels.pointwise.activations import fused_gelu_tanh, fused_swiglu
from napkin.kernels.pointwise.adamw import fused_adamw_
from napkin.kernels.pointwise.rotary import fused_rotate

Check = Callable[[torch.dtype, float], None]


def normal(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * numbers).to(dtype).requires_grad_()


def compare(
    fused: Callable[..., Tensor | Sequence[Tensor]],
    plain: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    bound: float,
) -> None:
    wide = [each.detach().double().requires_grad_() for each in inputs]
    actual, expected = _several(fused(*inputs)), _several(plain(*wide))
    upstream = [normal(*each.shape, seed=9, dtype=torch.float64).detach() for each in expected]
    narrow = [each.to(mine.dtype) for each, mine in zip(upstream, actual, strict=True)]
    grads = torch.autograd.grad(actual, list(inputs), narrow)
    expected_grads = torch.autograd.grad(expected, wide, [each.double() for each in narrow])
    for mine, theirs in zip((*actual, *grads), (*expected, *expected_grads), strict=True):
        assert mine.isfinite().all()
        assert (mine - theirs).abs().max() <= bound * theirs.detach().abs().max().clamp(min=1.0)


def _several(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def rms_norm(dtype: torch.dtype, bound: float) -> None:
    inputs = [normal(3, 5, 70, seed=0, dtype=dtype), normal(70, seed=1, dtype=dtype)]
    compare(
        lambda x, gain: fused_rms_norm(x, gain, 1e-5)[0],
        lambda x, gain: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain,
        inputs,
        bound,
    )


def rms_norm_of_a_sum(dtype: torch.dtype, bound: float) -> None:
    def plain(x: Tensor, gain: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5) * gain, summed

    inputs = [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(7, 33), (33,), (7, 33)])]
    compare(lambda x, gain, residual: fused_rms_norm(x, gain, 1e-5, residual), plain, inputs, bound)


def layer_norm_of_a_sum(dtype: torch.dtype, bound: float) -> None:
    def plain(x: Tensor, gain: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x + residual, (33,), gain, bias, 1e-5), x + residual

    inputs = [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(7, 33), (33,), (33,), (7, 33)])]
    compare(lambda x, gain, bias, residual: fused_layer_norm(x, gain, bias, 1e-5, residual), plain, inputs, bound)


def norm_of_a_sum_of_two_formats(dtype: torch.dtype, bound: float) -> None:
    """What is written to a residual stream in fp32 is narrow, as is what is read from it."""

    def plain(written: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        summed = written + stream
        return F.layer_norm(summed, (33,), gain, None, 1e-5), summed

    def fused(written: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        normed, summed = fused_layer_norm(written, gain, None, 1e-5, stream, dtype=dtype)
        assert (normed.dtype, summed.dtype) == (dtype, torch.float32)
        return normed, summed

    inputs = [
        normal(7, 33, seed=0, dtype=dtype),
        normal(7, 33, seed=1, dtype=torch.float32),
        normal(33, seed=2, dtype=torch.float32),
    ]
    compare(fused, plain, inputs, bound)


def layer_norm_without_bias(dtype: torch.dtype, bound: float) -> None:
    inputs = [normal(300, 8, seed=0, dtype=dtype), normal(8, seed=1, dtype=dtype)]
    compare(
        lambda x, gain: fused_layer_norm(x, gain, None, 1e-5)[0],
        lambda x, gain: F.layer_norm(x, (8,), gain, None, 1e-5),
        inputs,
        bound,
    )


def rotation_of_halves(dtype: torch.dtype, bound: float) -> None:
    _rotation(dtype, bound, interleaved=False)


def rotation_of_neighbours(dtype: torch.dtype, bound: float) -> None:
    _rotation(dtype, bound, interleaved=True)


def _rotation(dtype: torch.dtype, bound: float, *, interleaved: bool) -> None:
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3, 0.01]))

    def by_complex_numbers(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (3, 2)) if interleaved else x.unflatten(-1, (2, 3)).transpose(-1, -2)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(5, 3), angles)[:, None]
        real = torch.view_as_real(turned)
        return (real if interleaved else real.transpose(-1, -2)).flatten(-2)

    signs = torch.tensor([-1.0, 1.0])
    if interleaved:
        cosines = angles.cos().repeat_interleave(2, -1)
        sines = (angles.sin()[..., None] * signs).flatten(-2)
    else:
        cosines, sines = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    # Heads that are a part of a wider row, as those of a model's queries and keys are.
    inputs = [normal(2, 5, 7, 6, seed=0, dtype=dtype)]
    compare(
        lambda x: fused_rotate(x[:, :, :3], cosines[None], sines[None], interleaved=interleaved),
        lambda x: by_complex_numbers(x[:, :, :3]),
        inputs,
        bound,
    )


def swiglu(dtype: torch.dtype, bound: float) -> None:
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / (1 + (-gate).exp()) * up

    compare(fused_swiglu, plain, [normal(2, 3, 2 * 1030, seed=0, dtype=dtype, scale=3.0)], bound)


def gelu_tanh(dtype: torch.dtype, bound: float) -> None:
    inputs = [normal(3, 700, seed=0, dtype=dtype, scale=3.0)]
    compare(fused_gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), inputs, bound)


def cross_entropy(dtype: torch.dtype, bound: float) -> None:
    _cross_entropy(dtype, bound, scale=1.0, ignored=3)


def cross_entropy_with_cap_and_z_loss(dtype: torch.dtype, bound: float) -> None:
    _cross_entropy(dtype, bound, scale=1.0, ignored=3, z_weight=0.1, softcap=2.0)


def cross_entropy_of_logits_in_thousands(dtype: torch.dtype, bound: float) -> None:
    # Each logit, a sum of 16 products, is rounded to the resolution of the dtype.
    bound = {torch.float32: 1e-3, torch.float16: 2.0, torch.bfloat16: 16.0}[dtype]
    _cross_entropy(dtype, bound, scale=1000.0, ignored=3)


def cross_entropy_of_ignored_targets_alone(dtype: torch.dtype, bound: float) -> None:
    _cross_entropy(dtype, bound, scale=1.0, ignored=11)


def _cross_entropy(
    dtype: torch.dtype, bound: float, *, scale: float, ignored: int, z_weight: float = 0.0, softcap: float | None = None
) -> None:
    targets = torch.randint(131, (11,), generator=torch.Generator().manual_seed(3))
    targets[:ignored] = -1

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        seen = targets != -1
        logsumexp = logits.logsumexp(-1)
        losses = logsumexp - logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] + z_weight * logsumexp.square()
        return losses.where(seen, 0).sum() / max(1, int(seen.sum()))

    inputs = [normal(11, 16, seed=0, dtype=dtype, scale=scale), normal(131, 16, seed=1, dtype=dtype, scale=0.3)]
    settings = {"chunk_size": 4, "z_weight": z_weight, "logit_softcap": softcap}

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused_linear_cross_entropy(hidden, weight, targets, **settings)

    compare(fused, plain, inputs, bound)


def adamw(dtype: torch.dtype, bound: float) -> None:
    """Tensors of odd sizes, of none and of more than a chunk, one at an odd address, clipped by a factor, beside
    torch's AdamW."""
    numels = (1500, 0, 1, 33_000, 1504)
    numbers = [normal(numel, seed=numel, dtype=torch.float32).detach() for numel in numels]
    torchs = [torch.nn.Parameter(each.clone()) for each in numbers]
    optimizer = torch.optim.AdamW(torchs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    parameters = [each.clone() for each in numbers]
    parameters[2] = torch.cat((torch.zeros(1), parameters[2]))[1:]
    averages, squares = ([torch.zeros_like(each) for each in numbers] for _ in range(2))
    copies = [torch.empty_like(each, dtype=dtype) for each in numbers]
    for step in (1, 2, 3):
        gradients = [normal(numel, seed=numel + step, dtype=torch.float32).detach() for numel in numels]
        factor = None if step == 2 else torch.tensor(0.37)
        for each, gradient in zip(torchs, gradients, strict=True):
            each.grad = gradient * (1 if factor is None else factor)
        optimizer.step()
        versions = [each._version for each in parameters]
        fused_adamw_(
            parameters, gradients, averages, squares, copies=copies if step < 3 else (), factor=factor, lr=0.01,
            betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step,
        )  # fmt: skip
        assert all(each._version > version for each, version in zip(parameters, versions, strict=True))
        for mine, theirs, copy in zip(parameters, torchs, copies, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-6)
            assert step == 3 or torch.equal(copy, mine.to(dtype))


CHECKS: list[Check] = [
    rms_norm,
    rms_norm_of_a_sum,
    layer_norm_of_a_sum,
    norm_of_a_sum_of_two_formats,
    layer_norm_without_bias,
    rotation_of_halves,
    rotation_of_neighbours,
    swiglu,
    gelu_tanh,
    cross_entropy,
    cross_entropy_with_cap_and_z_loss,
    cross_entropy_of_logits_in_thousands,
    cross_entropy_of_ignored_targets_alone,
    adamw,
]
