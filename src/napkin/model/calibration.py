"""Integers of 4 bits that are chosen by what a layer reads: GPTQ and AWQ, calibrated on tokens.

A layer multiplies vectors x by its matrix W, and integers are the better the less they change the products: with
H = sum of x xᵀ over the calibration text, the error of a quantized matrix Q is

    sum over x of |W x - Q x|² = trace((W - Q) H (W - Q)ᵀ)

Round-to-nearest does not look at H. GPTQ (Frantar et al. 2023) rounds column by column, and after each one changes the
columns that are not rounded yet so that they make up for it as far as they can (optimal brain quantization in a fixed
order): by rows of the Cholesky factor of the inverse of H. Two orders are tried, that of the columns, and those first
that read large numbers. AWQ (Lin et al. 2024) rounds W · s, and the layer reads
x / s: columns that read large numbers are rounded finer. s is the mean of |x| to a power between 0 and 1, the one with
the least error.

Blocks are calibrated in their order, each reading what the quantized blocks before it give. Whatever the method, a
layer keeps round-to-nearest where that has the least error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.model.layers import Linear, MuPLinear
from napkin.model.quantized import GROUP_SIZE, Int4Linear, quantized_layers
from napkin.model.transformer import Transformer, evaluation_mode

Method = Literal["gptq", "awq"]
DAMPING = 0.01
"""Fraction of the mean of H's diagonal that is added to the diagonal: otherwise few or similar vectors would make H
singular."""
AWQ_STEPS = 20
"""Powers that are tried, from 0 on: 0, 1/20, …, 1."""

Matrix = Float[Tensor, "rows columns"]


@dataclass(frozen=True)
class CalibratedLayer:
    """A layer's tensors, and the errors of its products on the calibration text, relative to the products."""

    tensors: dict[str, Tensor]
    error: float
    rounding_error: float
    """The error of round-to-nearest."""


def calibrate(
    model: Transformer,
    batches: Sequence[Int[Tensor, "_ position"]],
    method: Method,
    *,
    group_size: int = GROUP_SIZE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, CalibratedLayer]:
    """The 4-bit tensors of the matrices of a model's blocks, by name, for `quantize_model`.

    `batches` are tokens that stand for those the model will read. The model's matrices are overwritten by what the
    integers stand for: give a copy. A matrix that reads nothing, such as that of an expert without tokens, is left out.
    """
    layers = quantized_layers(model)
    calibrated: dict[str, CalibratedLayer] = {}
    with torch.no_grad(), evaluation_mode(model):
        streams = [model.embed(tokens) for tokens in batches]
        for number, block in enumerate(model.blocks):
            progress(number, len(model.blocks))
            own = {name: layer for name, layer in layers.items() if name.startswith(f"{number}.")}
            moments = _Moments(own)
            with moments:
                for x, tokens in zip(streams, batches, strict=True):
                    model.through([block], x, tokens)
            for name, layer in own.items():
                if not moments.n[name]:
                    continue
                factor = layer.multiplier if isinstance(layer, MuPLinear) else 1.0
                weight, hessian = layer.weight.detach().float() * factor, moments.hessians[name]
                made = _calibrated(weight, hessian, moments.sizes[name] / moments.n[name], method, group_size)
                calibrated[name] = made
                layer.weight.copy_(_stands_for(made.tensors, weight.shape) / factor)
            streams = [model.through([block], x, tokens) for x, tokens in zip(streams, batches, strict=True)]
    progress(len(model.blocks), len(model.blocks))
    return calibrated


class _Moments:
    """Sums of x xᵀ and of |x| over the vectors that layers read, while it is entered."""

    def __init__(self, layers: dict[str, Linear]) -> None:
        self.hessians = {
            name: torch.zeros(layer.weight.shape[1], layer.weight.shape[1], dtype=torch.float64)
            for name, layer in layers.items()
        }
        self.sizes = {name: torch.zeros(layer.weight.shape[1], dtype=torch.float64) for name, layer in layers.items()}
        self.n = dict.fromkeys(layers, 0)
        self._layers, self._hooks = layers, list[torch.utils.hooks.RemovableHandle]()

    def __enter__(self) -> None:
        for name, layer in self._layers.items():
            self._hooks.append(layer.register_forward_pre_hook(self._recording(name)))

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _recording(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().flatten(0, -2).float().cpu()
            self.hessians[name] += (x.T @ x).double()
            self.sizes[name] += x.abs().sum(dim=0).double()
            self.n[name] += len(x)

        return record


def _calibrated(weight: Tensor, hessian: Tensor, sizes: Tensor, method: Method, group_size: int) -> CalibratedLayer:
    nearest = Int4Linear.quantized(weight, group_size)
    if method == "gptq":
        tried = [gptq_quantized(weight, hessian, group_size, by_size=by_size) for by_size in (False, True)]
    else:
        tried = [awq_quantized(weight, hessian, sizes, group_size)]
    scale = max(float(torch.trace(weight.double() @ hessian @ weight.double().T)), 1e-300)
    errors = [product_error(weight, _stands_for(each, weight.shape), hessian) / scale for each in (nearest, *tried)]
    best = min(range(len(errors)), key=errors.__getitem__)
    return CalibratedLayer([nearest, *tried][best], errors[best], errors[0])


def product_error(weight: Matrix, quantized: Matrix, hessian: Tensor) -> float:
    """The sum of squares by which products differ: trace((W - Q) H (W - Q)ᵀ)."""
    difference = weight.double() - quantized.double()
    return float(((difference @ hessian.double()) * difference).sum())


def _stands_for(tensors: dict[str, Tensor], shape: Sequence[int]) -> Matrix:
    """The matrix of 4-bit tensors, in fp32."""
    rows, columns = shape
    return Int4Linear(rows, columns, tensors).exact_weight()


def gptq_quantized(
    weight: Matrix,
    hessian: Float[Tensor, "columns columns"],
    group_size: int = GROUP_SIZE,
    *,
    damping: float = DAMPING,
    by_size: bool = False,
) -> dict[str, Tensor]:
    """Integers of 4 bits by GPTQ, as `Int4Linear.quantized` has them.

    Columns are rounded in their order, each group on the grid of its weights when its first column is rounded; with
    `by_size` those that read the largest numbers come first, which others make up for, on the grids of the matrix as it
    was.
    """
    left = Int4Linear.filled(weight, group_size).double()
    rows, columns = left.shape
    h = torch.zeros(columns, columns, dtype=torch.float64)
    h[: weight.shape[1], : weight.shape[1]] = hessian
    diagonal = h.diagonal()
    # Columns without inputs are rounded to nearest.
    diagonal[diagonal == 0] = float(diagonal.mean()) or 1.0
    order = torch.argsort(diagonal, descending=True, stable=True) if by_size else torch.arange(columns)
    diagonal += damping * diagonal.mean()
    h = h[order][:, order]
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    scales, middles = Int4Linear.grid(left.float().unflatten(1, (-1, group_size)))
    values, left = torch.empty(rows, columns, dtype=torch.uint8), left[:, order]
    for start in range(0, columns, group_size):
        stop = start + group_size
        if not by_size:
            group = start // group_size
            scales[:, group], middles[:, group] = Int4Linear.grid(left[:, start:stop].float())
        errors = torch.empty(rows, group_size, dtype=torch.float64)
        for j in range(start, stop):
            group = int(order[j]) // group_size
            scale, middle, column = scales[:, group].double(), middles[:, group].double(), left[:, j]
            q = ((column - middle) / scale + 8).round().clamp(0, 15)
            values[:, order[j]] = q.to(torch.uint8)
            errors[:, j - start] = (column - ((q - 8) * scale + middle)) / upper[j, j]
            left[:, j + 1 : stop] -= errors[:, j - start, None] * upper[j, j + 1 : stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return {"values": values[:, ::2] | (values[:, 1::2] << 4), "scales": scales, "middles": middles}


def awq_quantized(
    weight: Matrix,
    hessian: Float[Tensor, "columns columns"],
    sizes: Float[Tensor, " columns"],
    group_size: int = GROUP_SIZE,
    *,
    steps: int = AWQ_STEPS,
) -> dict[str, Tensor]:
    """Integers of 4 bits of W · s with the factors 1/s of what the layer reads; `sizes` are the means of |x|."""
    best: tuple[float, dict[str, Tensor]] | None = None
    for step in range(steps + 1):
        s = sizes.float().clamp(min=1e-4) ** (step / steps)
        s = s / (s.max() * s.min()).sqrt()
        # In the layer's number format; the weights are scaled by exactly the inverse.
        factors = (1 / s).to(torch.bfloat16)
        tensors = Int4Linear.quantized(weight / factors.float(), group_size) | {"factors": factors}
        error = product_error(weight, _stands_for(tensors, weight.shape), hessian)
        if best is None or error < best[0]:
            best = (error, tensors)
    assert best is not None
    return best[1]
