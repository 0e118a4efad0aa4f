"""Tensor parallelism: ranks divide each matrix, the heads of attention and the vocabulary (Shoeybi et al. 2019).

A block reads the residual stream with matrices whose rows are divided (columns of the transposed, "column-parallel"),
and writes to it with matrices whose columns are divided ("row-parallel"): between the two, each rank has some heads,
or some of the feed-forward layer's numbers. Outside of them it has a part of every sequence, for which alone it
computes norms, dropout and sums (Korthikanti et al. 2022): gathered before a column-parallel product, reduce-scattered
after a row-parallel one.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin.distributed.collectives import all_gather, all_reduce, in_products_dtype, reduce_scatter
from napkin.distributed.local_parameters import Divided, make_local
from napkin.distributed.vocabulary_parallel import VocabularyShard
from napkin.kernels.narrow_forms import Multiply, is_narrow, takes_narrow
from napkin.model.attention import CausalSelfAttention
from napkin.model.embedding import Embedding
from napkin.model.linear import Linear
from napkin.model.mlp import FeedForward, GatedFeedForward
from napkin.model.moe import MixtureOfExperts, Routing
from napkin.model.norm import AllHeadsQKNorm, HeadQKNorm, LayerNorm, RMSNorm
from napkin.model.positions import AlibiPositions, NoPositions
from napkin.model.transformer import Transformer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

SEQUENCE = 1
"""The dimension of positions in [batch, position, d_model]."""

Stacked = dict[str, tuple[int, ...]]


def split_tensors(model: Transformer, mesh: "DeviceMesh") -> Stacked:
    """Divide a model among the ranks of a mesh of one dimension; at first each has the whole of it, and the same.

    Returns the heights of the matrices that are stacked in a parameter, by its name: each is divided by itself. Sizes
    have to divide as `napkin.recipe.layout_check` says. With context parallelism, sequences are split before.
    """
    split = _Split(mesh)
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            split.attention(module)
        elif isinstance(module, FeedForward | GatedFeedForward):
            split.feed_forward(module)
        elif isinstance(module, MixtureOfExperts):
            split.mixture(module)
    split.vocabulary(model)
    split.positions(model)
    for attend in {module.attend for module in model.modules() if isinstance(module, CausalSelfAttention)}:
        attend.n_heads //= mesh.size()
    heights: Stacked = {}
    for name, module in model.named_modules():
        divided = split.divided.get(module, {})
        make_local(module, mesh, divided)
        prefix = f"{name}." if name else ""
        names = dict(module.named_parameters(recurse=False))
        heights |= {prefix + own: how.heights for own, how in divided.items() if own in names and len(how.heights) > 1}
    return heights


class _Split:
    """What is divided, module by module, and what each module computes then."""

    def __init__(self, mesh: "DeviceMesh") -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.group = mesh.get_group()
        self.divided: dict[nn.Module, dict[str, Divided]] = {}

    def attention(self, attention: CausalSelfAttention) -> None:
        widths = [n * attention.head_dim for n in (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)]
        self._column_parallel(attention.query_key_value, *widths)
        self._row_parallel(attention.output)
        attention.n_heads //= self.size
        attention.n_kv_heads //= self.size
        qk_norm = attention.qk_norm
        if isinstance(qk_norm, HeadQKNorm | AllHeadsQKNorm):
            qk_norm.heads = attention.n_heads, attention.n_kv_heads
        if isinstance(qk_norm, AllHeadsQKNorm):
            for norm in (qk_norm.query_norm, qk_norm.key_norm):
                cast(Any, norm).forward = functools.partial(_norm_of_all_heads, norm, self.mesh)
                self.divided[norm] = dict.fromkeys(("gain", "bias"), Divided(0))

    def feed_forward(self, layer: FeedForward | GatedFeedForward) -> None:
        first = layer.up if isinstance(layer, FeedForward) else layer.gate_up
        self._column_parallel(first, *[first.weight.shape[0] // layer.n_up] * layer.n_up)
        self._row_parallel(layer.down)

    def mixture(self, mixture: MixtureOfExperts) -> None:
        """Each rank has all experts, of which each is divided like a feed-forward layer."""
        width = mixture.experts.down.shape[2]
        widths = (width,) * (mixture.experts.up.shape[1] // width)
        self.divided[mixture.experts] = {"up": Divided(1, widths), "down": Divided(2)}
        cast(Any, mixture).mix = functools.partial(_mixed, mixture.mix, self.mesh)

    def vocabulary(self, model: Transformer) -> None:
        shard = VocabularyShard(model.config.vocab_size, self.mesh)
        model.next_token_loss = shard.next_token_loss
        # In a pipeline other ranks may have them.
        if isinstance(model.embedding, Embedding):
            model.embedding.look_up = shard.look_up
            self.divided[model.embedding] = {"weight": Divided(0)}
        if isinstance(model.head, Linear):
            self.divided[model.head] = {"weight": Divided(0)}

    def positions(self, model: Transformer) -> None:
        positions, rank = model.positions, self.mesh.get_local_rank()
        if type(positions).embed is not NoPositions.embed:
            cast(Any, positions).embed = functools.partial(_embedded, positions.embed, self.mesh)
        if isinstance(positions, AlibiPositions):
            positions.slopes = positions.slopes.chunk(self.size)[rank].clone()

    def _column_parallel(self, linear: Linear, *heights: int) -> None:
        rows = Divided(0, heights)
        linear.multiply = functools.partial(_of_gathered, self._multiply(linear, rows), self.group)
        self.divided[linear] = dict.fromkeys(("weight", "bias"), rows)

    def _row_parallel(self, linear: Linear) -> None:
        columns = Divided(1)
        linear.multiply = functools.partial(_scattered_sum, self._multiply(linear, columns), self.group)
        self.divided[linear] = {"weight": columns}

    def _multiply(self, linear: Linear, divided: Divided) -> Multiply:
        """The layer's product, in 8 bits only if a rank's part has sizes that the hardware takes."""
        if not is_narrow(linear.multiply):
            return linear.multiply
        return linear.multiply if takes_narrow(divided.part(linear.weight.detach(), 0, self.size)) else F.linear


def _of_gathered(multiply: Multiply, group: "ProcessGroup", x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of the whole sequences, of which x is this rank's part."""
    return multiply(all_gather(in_products_dtype(x), SEQUENCE, group), weight, bias)


def _scattered_sum(multiply: Multiply, group: "ProcessGroup", x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's part of the sequences of the sum of all ranks' products; the bias is added once."""
    total = reduce_scatter(multiply(x, weight, None), SEQUENCE, group)
    return total if bias is None else total + bias.to(total.dtype)


def _embedded(
    embed: Callable[[Tensor, Tensor | None], Tensor], mesh: "DeviceMesh", x: Tensor, documents: Tensor | None
) -> Tensor:
    """This rank's part of the sequences, of which x is the embedding, with what a position scheme adds to the whole."""
    length, rank = x.shape[SEQUENCE], mesh.get_local_rank()
    zeros = x.new_zeros(1 if documents is None else len(x), length * mesh.size(), x.shape[-1])
    return x + embed(zeros, documents).narrow(SEQUENCE, rank * length, length)


def _mixed(mix: Callable[[Tensor], tuple[Tensor, Routing]], mesh: "DeviceMesh", x: Tensor) -> tuple[Tensor, Routing]:
    """This rank's part of the sequences, of the sum of what the ranks' parts of the experts make of them.

    Every rank routes all tokens, with the same numbers, so all have the same losses of the router. Their gradients are
    added up over ranks as those of the outputs are, which are summands: they are divided so that they count once.
    """
    mixed, routing = mix(all_gather(x, SEQUENCE, mesh.get_group()))
    once = functools.partial(_scaled_gradient, factor=1 / mesh.size())
    routing = replace(routing, balance_loss=once(routing.balance_loss), z_loss=once(routing.z_loss))
    return reduce_scatter(mixed, SEQUENCE, mesh.get_group()), routing


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by a factor."""
    return x.detach() + (x - x.detach()) * factor


def _norm_of_all_heads(norm: nn.Module, mesh: "DeviceMesh", x: Tensor) -> Tensor:
    """The norm of vectors of which each rank has a part, and its gains."""
    assert isinstance(norm, RMSNorm | LayerNorm)
    group, width = mesh.get_group(), x.shape[-1] * mesh.size()
    wide = x.float()
    if isinstance(norm, LayerNorm):
        wide = wide - all_reduce(wide.sum(dim=-1, keepdim=True), group) / width
    mean_square = all_reduce(wide.square().sum(dim=-1, keepdim=True), group) / width
    normed = wide * torch.rsqrt(mean_square + norm.eps) * norm.gain
    bias = getattr(norm, "bias", None)
    return (normed if bias is None else normed + bias).to(x.dtype)
