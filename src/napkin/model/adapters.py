"""Adapters: small matrices that are trained in place of a model's, which are frozen.

LoRA (Hu et al. 2021) adds a product of two small matrices to a matrix: x · (W + s · B · A)ᵀ with A [rank, inputs],
B [outputs, rank] and s = alpha / rank. B starts at 0, so that training starts at the model. What is computed is
x · Wᵀ + s · (x · Aᵀ) · Bᵀ: B · A never exists. DoRA (Liu et al. 2024) then scales each row to a length of its own,
which it learns: m / ‖W + s · B · A‖ times that row, where the norm is a constant to the backward pass (section 4.3).

A linear layer here may be several matrices, stacked: those of queries, keys and values, or gate and up. Each gets an
adapter of its own, as in libraries in which they are layers of their own: a rank means the same there and here, and
adapters can be exchanged. Their A are stacked too: the input is read once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.attention import CausalSelfAttention, SharedAttention
from napkin.model.config import ADAPTED_MATRICES, adapted_matrices, refuse_unknown_matrices
from napkin.model.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts
from napkin.model.latent_attention import LatentAttention
from napkin.model.layers import Linear, Multiply
from napkin.model.transformer import Transformer


@dataclass(frozen=True)
class Rows:
    """The rows of a linear layer that are one matrix."""

    name: str
    """Name of the matrix in a recipe, such as attention.query."""
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The rows of the layer."""
        return slice(self.start, self.stop)

    @property
    def height(self) -> int:
        return self.stop - self.start


class Adapter(nn.Module):
    """The adapters of some matrices of a linear layer."""

    a: Float[Tensor, "n_matrices_times_rank in_features"]
    b: Float[Tensor, "adapted_rows rank"]
    magnitude: Float[Tensor, " adapted_rows"] | None

    def __init__(
        self,
        weight: Float[Tensor, "out_features in_features"],
        matrices: Sequence[Rows],
        *,
        rank: int,
        alpha: float,
        with_magnitude: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """`weight` are the layer's matrices, `matrices` those of them that get an adapter, from the top."""
        super().__init__()
        self.matrices = tuple(matrices)
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.out_features, width = weight.shape
        self.active = True
        """True while the layer uses the adapter."""
        options = {"dtype": weight.dtype, "device": weight.device}
        n_rows = sum(each.height for each in matrices)
        draws = torch.empty(len(matrices) * rank, width)
        if not weight.is_meta:
            # What its authors' code and peft draw: uniform, of variance 1/3 over the number of inputs.
            draws.uniform_(-(width**-0.5), width**-0.5, generator=generator)
        self.a = nn.Parameter(draws.to(**options))
        self.b = nn.Parameter(torch.zeros(n_rows, rank, **options))
        lengths = None
        if with_magnitude:
            lengths = nn.Parameter(torch.cat([_lengths(weight[each.slice]) for each in matrices]).to(**options))
        self.register_parameter("magnitude", lengths)

    def forward(
        self,
        x: Float[Tensor, "*batch in_features"],
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None,
        multiply: Multiply,
    ) -> Float[Tensor, "*batch out_features"]:
        """The layer's product with its adapters; `multiply` takes the product with the matrix alone."""
        if not self.active:
            return multiply(x, weight, bias)
        low = F.linear(x, self.a)
        if self.magnitude is None:
            return _add_product(multiply(x, weight, bias), low, self._spread(), self.scale)
        product = _add_product(multiply(x, weight, None), low, self._spread(), self.scale)
        # In fp32: an 8-bit format would lose the small updates of training.
        scaled = (product * self._factors(weight)).to(product.dtype)
        return scaled if bias is None else scaled + bias.to(product.dtype)

    def merged(self, weight: Float[Tensor, "out_features in_features"]) -> Float[Tensor, "out_features in_features"]:
        """The matrix that does the same without adapters, in the dtype of the adapters."""
        if not self.active:
            return weight
        rows, done = [], 0
        for each, a, b in self.products():
            rows += [weight[done : each.start].to(b.dtype), weight[each.slice].to(b.dtype) + self.scale * (b @ a)]
            done = each.stop
        whole = torch.cat([*rows, weight[done:].to(self.b.dtype)])
        return whole if self.magnitude is None else (whole * self._factors(weight)[:, None]).to(whole.dtype)

    def products(self) -> Iterator[tuple[Rows, Float[Tensor, "rank in_features"], Float[Tensor, "height rank"]]]:
        """The rows, A and B of each matrix that has an adapter."""
        heights = [each.height for each in self.matrices]
        return zip(self.matrices, self.a.split(self.rank), self.b.split(heights), strict=True)

    def lengths(self, weight: Float[Tensor, "out_features in_features"]) -> Float[Tensor, " out_features"]:
        """The length that each row has with the adapters: of DoRA."""
        assert self.magnitude is not None
        lengths = _lengths(weight)
        for (each, _, _), learned in zip(
            self.products(), self.magnitude.split([each.height for each in self.matrices]), strict=True
        ):
            lengths[each.slice] = learned.detach()
        return lengths

    def _spread(self) -> Float[Tensor, "out_features n_matrices_times_rank"]:
        """B of all matrices as one: each has columns of its own, and rows without an adapter are 0."""
        if len(self.matrices) == 1 and len(self.b) == self.out_features:
            return self.b
        n, done, rows = len(self.matrices), 0, []
        for place, (each, _, b) in enumerate(self.products()):
            if each.start > done:
                rows.append(b.new_zeros(each.start - done, n * self.rank))
            rows.append(F.pad(b, (place * self.rank, (n - 1 - place) * self.rank)))
            done = each.stop
        if done < self.out_features:
            rows.append(self.b.new_zeros(self.out_features - done, n * self.rank))
        return torch.cat(rows)

    def _factors(self, weight: Tensor) -> Float[Tensor, " out_features"]:
        """m / ‖W + s · B · A‖ of each row, in fp32 or wider; 1 for those without an adapter."""
        assert self.magnitude is not None
        wide = torch.promote_types(self.b.dtype, torch.float32)
        ones = torch.ones(self.out_features, dtype=wide, device=weight.device)
        heights = [each.height for each in self.matrices]
        factors, done = [], 0
        for (each, a, b), magnitude in zip(self.products(), self.magnitude.split(heights), strict=True):
            lengths = _adapted_lengths(weight[each.slice], a.detach(), b.detach(), self.scale)
            factors += [ones[done : each.start], magnitude.to(wide) / lengths]
            done = each.stop
        return torch.cat([*factors, ones[done:]])


def _add_product(
    base: Float[Tensor, "*batch out_features"],
    low: Float[Tensor, "*batch rank"],
    b: Float[Tensor, "out_features rank"],
    scale: float,
) -> Float[Tensor, "*batch out_features"]:
    """base + scale · low · bᵀ."""
    added = torch.addmm(base.reshape(-1, base.shape[-1]), low.reshape(-1, low.shape[-1]), b.T, alpha=scale)
    return added.view(base.shape)


def _lengths(rows: Float[Tensor, "height in_features"]) -> Float[Tensor, " height"]:
    """The norm of each row, in fp32 or wider."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))


@torch.no_grad()
def _adapted_lengths(
    weight: Float[Tensor, "height in_features"],
    a: Float[Tensor, "rank in_features"],
    b: Float[Tensor, "height rank"],
    scale: float,
) -> Float[Tensor, " height"]:
    """The norm of each row of W + s · B · A, which is not made: ‖W‖² + 2s · (W · Aᵀ) · B + s² · B · (A · Aᵀ) · B."""
    with torch.autocast(weight.device.type, enabled=False):
        wide = torch.promote_types(b.dtype, torch.float32)
        crossed = (weight @ a.to(weight.dtype).T).to(wide)
        a, b = a.to(wide), b.to(wide)
        squares = _lengths(weight).square() + ((2 * scale * crossed + scale**2 * (b @ (a @ a.T))) * b).sum(dim=1)
        return squares.clamp(min=torch.finfo(wide).tiny).sqrt()


def add_adapters(
    model: Transformer,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    modules: Sequence[str] = ("attention", "mlp"),
    with_magnitude: bool = False,
    seed: int = 0,
) -> None:
    """Add adapters to the chosen matrices of a model, which change nothing yet, and freeze everything else.

    `modules` are names in napkin.model.config; `with_magnitude` is DoRA. Raises NapkinError for an unknown name, or one
    of which the model has no matrix: experts get no adapters, nor does a head that is tied to the embedding.
    """
    chosen = _chosen(model, modules)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    settings: dict[str, Any] = {"rank": rank, "alpha": alpha, "with_magnitude": with_magnitude, "generator": generator}
    for layer, matrices in chosen:
        layer.adapter = Adapter(layer.weight, matrices, **settings)


def merge_adapters(model: Transformer) -> None:
    """Put what the adapters of a model compute into its matrices, in their dtype, and take them away; all parameters
    can be trained again."""
    for _, layer, adapter in adapted_layers(model):
        with torch.no_grad():
            layer.weight.copy_(adapter.merged(layer.weight))
        layer.adapter = None
    model.requires_grad_(True)


@contextmanager
def adapters_off(model: Transformer) -> Iterator[None]:
    """While it lasts, the model computes without its adapters: as before tuning."""
    adapters = [adapter for _, _, adapter in adapted_layers(model)]
    before = [adapter.active for adapter in adapters]
    for adapter in adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter, active in zip(adapters, before, strict=True):
            adapter.active = active


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Linear, Adapter]]:
    """The linear layers that have adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, Adapter):
            yield name, module, module.adapter


def _chosen(model: Transformer, modules: Sequence[str]) -> list[tuple[Linear, list[Rows]]]:
    """The layers with the named matrices, in the model's order, and these matrices."""
    refuse_unknown_matrices(modules)
    layers = [(layer, matrices) for module in model.modules() for layer, matrices in _matrices(module)]
    there = {each.name for _, matrices in layers for each in matrices}
    has_experts = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    for name in modules:
        if name.startswith("mlp") and has_experts:
            raise NapkinError(f"adapter.modules names '{name}', and experts get no adapters: use attention")
        if not there.intersection(adapted_matrices(name)):
            raise NapkinError(
                f"adapter.modules names '{name}', which this model does not have as a matrix of its own: use "
                f"{', '.join(each for each in ADAPTED_MATRICES if each in there)}"
            )
    wanted = {each for name in modules for each in adapted_matrices(name)}
    named = [(layer, [each for each in matrices if each.name in wanted]) for layer, matrices in layers]
    return [(layer, matrices) for layer, matrices in named if matrices]


def _matrices(module: nn.Module) -> list[tuple[Linear, list[Rows]]]:
    """The linear layers that a module itself has, and the matrices that are stacked in each."""
    if isinstance(module, CausalSelfAttention):
        queries, keys = module.n_heads * module.head_dim, module.n_kv_heads * module.head_dim
        return [
            (module.query_key_value, _stacked("attention", {"query": queries, "key": keys, "value": keys})),
            (module.output, _stacked("attention", {"output": len(module.output.weight)})),
        ]
    if isinstance(module, (LatentAttention, SharedAttention)):
        layers = {"query": module.query, "output": module.output}
        return [(layer, _stacked("attention", {name: len(layer.weight)})) for name, layer in layers.items()]
    if isinstance(module, (FeedForward, GatedFeedForward)):
        d_ff = module.down.weight.shape[1]
        gated = isinstance(module, GatedFeedForward)
        first, heights = (module.gate_up, {"gate": d_ff, "up": d_ff}) if gated else (module.up, {"up": d_ff})
        return [
            (first, _stacked("mlp", heights)),
            (module.down, _stacked("mlp", {"down": len(module.down.weight)})),
        ]
    if isinstance(module, Transformer) and module.head is not None:
        return [(module.head, [Rows("head", 0, len(module.head.weight))])]
    return []


def _stacked(group: str, heights: dict[str, int]) -> list[Rows]:
    stacked, start = [], 0
    for name, height in heights.items():
        stacked.append(Rows(f"{group}.{name}", start, start + height))
        start += height
    return stacked
