"""Tensor parallelism: ranks divide each matrix, the heads of attention and the vocabulary (Shoeybi et al. 2019).

A block reads the residual stream with matrices whose rows are divided (columns of the transposed, "column-parallel"),
and writes to it with matrices whose columns are divided ("row-parallel"): between the two, each rank has some heads, or
some of the feed-forward layer's numbers. Elsewhere it has a part of every sequence, for which alone it computes norms,
dropout and residual sums (Korthikanti et al. 2022): gathered before a column-parallel product, reduce-scattered after a
row-parallel one.

Parameters that ranks divide are DTensors in `named_parameters`, and local tensors where a module computes. The
vocabulary is divided too: each rank has the rows of some ids, for the embedding and the loss.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from napkin.distributed.process_group import (
    all_gather,
    all_reduce,
    all_reduce_together,
    in_products_dtype,
    reduce_scatter,
)
from napkin.kernels.loss.cross_entropy import Vocabulary, linear_cross_entropy
from napkin.kernels.products.linear import Multiply, is_narrow, takes_narrow
from napkin.model.attention import CausalSelfAttention
from napkin.model.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts, Routing
from napkin.model.latent_attention import LatentAttention
from napkin.model.layers import Embedding, Linear
from napkin.model.norm import AllHeadsQKNorm, HeadQKNorm, LayerNorm, RMSNorm
from napkin.model.positions import AlibiPositions, NoPositions
from napkin.model.transformer import Transformer
from napkin.optim.saved_state import sharded_like

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# Optimizer state, clipping and checkpoints follow from a parameter's placement. The modules see none of it: their
# attributes are this rank's parts, and the gradients of these are DTensors again.


@dataclass(frozen=True)
class Divided:
    """The division of a parameter among the ranks of a mesh dimension: along `dim`, which `heights` divide into stacked
    matrices.

    Each matrix is divided by itself, and a rank's part is its parts of all of them: along `dim` the DTensor is a
    permutation of the whole parameter.
    """

    dim: int
    heights: tuple[int, ...] = ()

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """A rank's part. As with torch.chunk, the last ranks have less where the rest does not divide evenly."""
        matrices = whole.split(self.heights or whole.shape[self.dim], dim=self.dim)
        parts = [_chunk(matrix, rank, size, self.dim) for matrix in matrices]
        return torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0].clone()


def _chunk(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    each = -(-whole.shape[dim] // size)
    start = min(rank * each, whole.shape[dim])
    return whole.narrow(dim, start, min(each, whole.shape[dim] - start))


def make_local(module: nn.Module, mesh: DeviceMesh, divided: dict[str, Divided]) -> None:
    """Replace a module's own parameters by DTensors on a mesh of one dimension, and let it compute with their parts.

    `divided` says how, by name. The other parameters are replicated; each rank uses them for some of the tokens or
    heads, so that its gradient of them is a summand, see `add_up_summands`.
    """
    gradients: dict[str, Sequence[Placement]] = {}
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        how = divided.get(name)
        here = parameter.detach() if how is None else how.part(parameter.detach(), mesh.get_local_rank(), mesh.size())
        placements = (Replicate() if how is None else Shard(how.dim),)
        tensor = DTensor.from_local(
            here.contiguous(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        module._parameters[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        gradients[name] = (Partial(),) if how is None else placements
    if gradients:
        module.__class__ = _computing_locally(type(module), tuple(gradients))
        cast(Any, module)._gradient_placements = gradients


def _computing_locally(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose parameters, as attributes, are this rank's parts."""
    return type(kind.__name__, (kind,), {name: property(_local_part(name)) for name in names})


def _local_part(name: str) -> Any:
    def part(module: Any) -> Tensor:
        parameter, placements = module._parameters[name], module._gradient_placements[name]
        # FSDP2 exchanges the entries of `_parameters`: a gathered one while the module computes, otherwise a shard, on
        # a mesh that has its ranks too, which it looks up here.
        is_gathered = len(parameter.placements) == len(placements)
        return parameter.to_local(grad_placements=placements) if is_gathered else parameter

    return part


@torch.no_grad()
def add_up_summands(parameters: Sequence[Tensor]) -> None:
    """All-reduce the gradients of which each rank has a summand, all at once; a collective."""
    summands = [p for p in parameters if p.grad is not None and _is_summand(p.grad)]
    if not summands:
        return
    mesh = cast(DTensor, summands[0]).device_mesh
    sums = all_reduce_together([cast(DTensor, p.grad).to_local() for p in summands], mesh.get_group())
    for parameter, total in zip(summands, sums, strict=True):
        parameter.grad = sharded_like(parameter, total)


def _is_summand(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


# Of a chunk's logits [tokens, ids of this rank] ranks exchange a maximum, a sum of exponentials and the target's logit
# for each token. Logits of all ids exist on no rank (Shoeybi et al. 2019, section 3).


class VocabularyShard(Vocabulary):
    """The ids of this rank, those of ranks before it being smaller. torch.chunk divides them."""

    def __init__(self, vocab_size: int, mesh: "DeviceMesh") -> None:
        each = -(-vocab_size // mesh.size())
        self.first = mesh.get_local_rank() * each
        self.last = min(self.first + each, vocab_size) - 1
        self.group = mesh.get_group()

    def look_up(
        self, tokens: Int[Tensor, "batch position"], rows: Float[Tensor, "ids d_model"]
    ) -> Float[Tensor, "batch part d_model"]:
        """The vectors of all tokens, of which this rank gets its part of the positions."""
        places, elsewhere = self._places(tokens)
        return reduce_scatter(F.embedding(places, rows).masked_fill(elsewhere.unsqueeze(-1), 0), 1, self.group)

    def next_token_loss(
        self,
        hidden: Float[Tensor, "batch part d_model"],
        rows: Float[Tensor, "ids d_model"],
        targets: Int[Tensor, "batch position"],
        *,
        chunk_size: int,
        z_weight: float = 0.0,
        logit_softcap: float | None = None,
    ) -> Float[Tensor, ""]:
        """`next_token_loss` of hidden states that the ranks hold parts of; every rank gets the result."""
        gathered = rearrange(all_gather(in_products_dtype(hidden), 1, self.group), "b t c -> (b t) c")
        targets = rearrange(targets, "b t -> (b t)")
        settings = {"chunk_size": chunk_size, "z_weight": z_weight, "logit_softcap": logit_softcap}
        return linear_cross_entropy(gathered, rows, targets, vocabulary=self, **settings)

    def softmax(self, logits: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """`Vocabulary.softmax` over the logits of all ranks; the probabilities are those of this rank's ids."""
        places, elsewhere = self._places(targets)
        largest = all_reduce(logits.amax(dim=1, keepdim=True).to(wide), self.group, "max")
        target_logits = logits.gather(1, places).to(wide).masked_fill(elsewhere, 0)
        exponentials = logits.to(wide).sub_(largest).exp_()
        sums = all_reduce(torch.cat((exponentials.sum(dim=1, keepdim=True), target_logits), dim=1), self.group)
        total, target_logits = sums.split(1, dim=1)
        return target_logits, largest + total.log(), exponentials.div_(total)

    def subtract_targets(self, probabilities: Tensor, targets: Tensor) -> None:
        """probabilities - onehot(targets) in place, of the targets that this rank has."""
        places, elsewhere = self._places(targets)
        ones = (~elsewhere).to(probabilities.dtype)
        probabilities.scatter_(1, places, probabilities.gather(1, places) - ones)

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids, 0 for those of other ranks; and which these are."""
        elsewhere = (ids < self.first) | (ids > self.last)
        return (ids - self.first).masked_fill(elsewhere, 0), elsewhere


SEQUENCE = 1
"""The dimension of positions in [batch, position, d_model]."""

Stacked = dict[str, tuple[int, ...]]


def split_tensors(model: Transformer, mesh: "DeviceMesh") -> Stacked:
    """Divide a model among the ranks of a mesh of one dimension; before the call, all ranks hold the same whole model.
    Returns the heights of the matrices that are stacked in a parameter, by its name: each matrix is divided separately.
    Sizes have to divide as `napkin.recipe.layout` says. With context parallelism, sequences are split before.
    """
    split = _Split(mesh)
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            split.attention(module)
        elif isinstance(module, LatentAttention):
            split.latent_attention(module)
        elif isinstance(module, FeedForward | GatedFeedForward):
            split.feed_forward(module)
        elif isinstance(module, MixtureOfExperts):
            split.mixture(module)
    split.vocabulary(model)
    split.positions(model)
    layers = (module for module in model.modules() if isinstance(module, CausalSelfAttention | LatentAttention))
    for attend in {layer.attend for layer in layers}:
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
    """Divides a model module by module, and says what each module computes then."""

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

    def latent_attention(self, attention: LatentAttention) -> None:
        """Each rank computes the latents of whole sequences, and from them the queries, keys and values of its
        heads."""
        attention.gather = functools.partial(_gathered, self.group)
        for linear in (attention.query, attention.key_value):
            rows = Divided(0)
            linear.multiply = self._multiply(linear, rows)
            self.divided[linear] = {"weight": rows}
        self._row_parallel(attention.output)
        attention.n_heads //= self.size

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
        # In a pipeline, other ranks may hold them.
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
    return multiply(_gathered(group, x), weight, bias)


def _gathered(group: "ProcessGroup", x: Tensor) -> Tensor:
    """The whole sequences, of which x is this rank's part."""
    return all_gather(in_products_dtype(x), SEQUENCE, group)


def _scattered_sum(multiply: Multiply, group: "ProcessGroup", x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's part of the sequences of the sum of all ranks' products; the bias is added once."""
    total = reduce_scatter(multiply(x, weight, None), SEQUENCE, group)
    return total if bias is None else total + bias.to(total.dtype)


def _embedded(
    embed: Callable[[Tensor, Tensor | None], Tensor], mesh: "DeviceMesh", x: Tensor, documents: Tensor | None
) -> Tensor:
    """This rank's part of the sequences embedded in x, with its part of what a position scheme adds."""
    length, rank = x.shape[SEQUENCE], mesh.get_local_rank()
    zeros = x.new_zeros(1 if documents is None else len(x), length * mesh.size(), x.shape[-1])
    return x + embed(zeros, documents).narrow(SEQUENCE, rank * length, length)


def _mixed(mix: Callable[[Tensor], tuple[Tensor, Routing]], mesh: "DeviceMesh", x: Tensor) -> tuple[Tensor, Routing]:
    """This rank's part of the sequences of the summed outputs of all ranks' parts of the experts.

    Every rank routes all tokens, with the same numbers, so all have the same losses of the router. Their gradients are
    added up over ranks as those of the outputs are, which are summands: they are divided so that they count once.
    """
    mixed, routing = mix(all_gather(x, SEQUENCE, mesh.get_group()))
    once = functools.partial(_scaled_gradient, factor=1 / mesh.size())
    routing = replace(routing, balance_loss=once(routing.balance_loss), z_loss=once(routing.z_loss))
    return reduce_scatter(mixed, SEQUENCE, mesh.get_group()), routing


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x unchanged; its gradient is multiplied by a factor."""
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
