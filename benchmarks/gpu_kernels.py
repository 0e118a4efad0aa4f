"""Each Triton kernel on a GPU: right beside the plain form in fp64, and its seconds beside torch's own operators.

One command on a machine with a GPU; the table is also written to benchmarks/results/:

    python benchmarks/gpu_kernels.py
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --check    # errors alone, in the interpreter, without a GPU

The error of an operator is the largest of result and gradients against fp64, over the largest number there; torch's own
operator in the same dtype stands beside it. Seconds are medians of forward, and of forward and backward pass, with a
cold L2 cache (triton.testing.do_bench); above 1 in the last column napkin's is faster. Liger's loss takes part if
liger-kernel is installed. The exit status is 1 if an error is more than four times torch's and above 1e-5.
"""

# pyright: reportMissingImports=false

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from napkin.kernels import (
    fused_gelu_tanh,
    fused_layer_norm,
    fused_linear_cross_entropy,
    fused_rms_norm,
    fused_swiglu,
    linear_cross_entropy,
    swiglu_reference,
)
from napkin.kernels.attention.flash import flash_attention
from napkin.kernels.operators import is_interpreted
from result_files import heading, write_result

Function = Callable[..., Tensor]
LARGE = {"tokens": 8192, "length": 4096, "heads": 16, "width": 2048, "vocab_size": 50304}
SMALL = {"tokens": 48, "length": 80, "heads": 4, "width": 96, "vocab_size": 300}


@dataclass(frozen=True)
class Case:
    """An operator, what it is held to and what it is measured against."""

    name: str
    ours: Function
    torchs: Function
    inputs: Callable[[torch.dtype], list[Tensor]]
    others: dict[str, Function]


def main() -> int:
    """Check, measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="small shapes, no seconds")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not is_interpreted():
        parser.error("there is no GPU that torch can use: TRITON_INTERPRET=1 ... --check runs the interpreter")
    device = "cpu" if is_interpreted() else "cuda"
    name = "Triton's interpreter" if device == "cpu" else torch.cuda.get_device_name()
    lines = [
        *heading(f"Triton kernels on {name}", packages=["triton"]),
        "| operator | dtype | error | torch's | forward ms | both ms | beside | its forward ms | its both ms | × |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    wrong = False
    dtypes = [torch.float32, torch.float16] + ([] if device == "cpu" else [torch.bfloat16])
    for dtype in dtypes:
        for small, large in zip(cases(SMALL, device), cases(LARGE, device), strict=True):
            error, torchs = (error_of(function, small, dtype) for function in (small.ours, small.torchs))
            wrong |= error > max(1e-5, 4 * torchs)
            rows = ["– | – | – | – | – | –"] if options.check else list(timed(large, dtype))
            for row in rows:
                lines.append(f"| {small.name} | {str(dtype)[6:]} | {error:.1e} | {torchs:.1e} | {row} |")
                print(lines[-1], flush=True)
    if not options.check:
        write_result("gpu-kernels", lines)
    return int(wrong)


def cases(sizes: dict[str, int], device: str) -> list[Case]:
    """Every operator at these sizes."""
    length, heads, width, tokens, vocab_size = (
        sizes[name] for name in ("length", "heads", "width", "tokens", "vocab_size")
    )
    targets = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)

    def normal(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[torch.dtype], list[Tensor]]:
        def make(dtype: torch.dtype) -> list[Tensor]:
            generator = torch.Generator().manual_seed(0)
            drawn = [torch.randn(shape, generator=generator) * scale for shape in shapes]
            return [each.to(device, dtype).requires_grad_() for each in drawn]

        return make

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def torch_loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(
            (hidden @ weight.T).float() if hidden.dtype != torch.float64 else hidden @ weight.T, targets
        )

    def rms(x: Tensor, gain: Tensor, residual: Tensor) -> Tensor:
        return F.rms_norm(x + residual, (width,), gain, 1e-5)

    def layer(x: Tensor, gain: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm(x + residual, (width,), gain, None, 1e-5)

    rows = normal((tokens, width), (width,), (tokens, width))
    found = [
        Case(
            f"attention d {head_dim}", flash_attention, sdpa,
            normal((2, heads, length, head_dim), *[(2, heads // 4, length, head_dim)] * 2), {},
        )
        for head_dim in (64, 128)
    ]  # fmt: skip
    return [
        *found,
        Case("RMSNorm of a sum", lambda x, g, r: fused_rms_norm(x, g, 1e-5, r)[0], rms, rows, {}),
        Case("LayerNorm of a sum", lambda x, g, r: fused_layer_norm(x, g, None, 1e-5, r)[0], layer, rows, {}),
        Case("SwiGLU", fused_swiglu, swiglu_reference, normal((tokens, 2 * width)), {}),
        Case("GELU", fused_gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), normal((tokens, width)), {}),
        Case(
            "head and loss", lambda h, w: fused_linear_cross_entropy(h, w, targets), torch_loss,
            normal((tokens, width), (vocab_size, width), scale=0.3),
            {"linear_cross_entropy": lambda h, w: linear_cross_entropy(h, w, targets), **liger(targets)},
        ),
    ]  # fmt: skip


def liger(targets: Tensor) -> dict[str, Function]:
    """Liger's loss, if it is installed."""
    if find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Any = LigerFusedLinearCrossEntropyLoss()
    return {"Liger": lambda hidden, weight: loss(weight, hidden, targets)}


def error_of(function: Function, case: Case, dtype: torch.dtype) -> float:
    """The largest error of result and gradients against torch's operator in fp64, relative to the largest number."""
    inputs = case.inputs(dtype)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    expected, actual = case.torchs(*wide), function(*inputs)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.device, actual.dtype)
    pairs = zip(
        (actual, *torch.autograd.grad(actual, inputs, upstream)),
        (expected, *torch.autograd.grad(expected, wide, upstream.double())),
        strict=True,
    )
    return max(float(((mine - theirs).abs().max() / theirs.abs().max()).detach()) for mine, theirs in pairs)


def timed(case: Case, dtype: torch.dtype) -> Iterator[str]:
    """A row per operator that ours is measured against."""
    inputs = case.inputs(dtype)
    ours = milliseconds(case.ours, inputs)
    for name, other in {"torch": case.torchs, **case.others}.items():
        theirs = milliseconds(other, inputs)
        cells = [f"{each:.3f}" for each in ours], [f"{each:.3f}" for each in theirs]
        yield " | ".join([*cells[0], name, *cells[1], f"{theirs[1] / ours[1]:.2f}"])


def milliseconds(function: Function, inputs: list[Tensor]) -> tuple[float, float]:
    """Of the forward pass, and of both."""
    from triton.testing import do_bench

    upstream = torch.ones_like(function(*inputs))

    def both() -> None:
        torch.autograd.grad(function(*inputs), inputs, upstream)

    with torch.no_grad():
        forward = do_bench(lambda: function(*inputs), return_mode="median")
    return float(forward), float(do_bench(both, return_mode="median"))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
