"""The blocks of a model of integers in one compiled pass, for one new token of each sequence."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from napkin.kernels.blocks.decode import BlockWeights, IntegerBlocks, IntegerMatrix, can_decode
from napkin.kernels.pointwise.rotary import compiled_rotate_halves, rotate_halves
from napkin.model.attention import CausalSelfAttention, PlainAttention
from napkin.model.block import Block
from napkin.model.feed_forward import SwiGLU
from napkin.model.kv_cache import CachedPass
from napkin.model.norm import NoQKNorm, RMSNorm
from napkin.model.positions import Rotation
from napkin.model.quantized import QuantizedLinear
from napkin.model.transformer import Transformer


class CompiledBlocks:
    """Computes what a model's blocks do, and declines where the pass has no compiled form: another architecture, more
    than one token, a cache that is not read in place, training, and while a meter looks at operators.

    The numbers are those of the blocks but for the order of sums.
    """

    def __init__(self) -> None:
        self._weights: IntegerBlocks | None = None
        self._suits: bool | None = None

    def __deepcopy__(self, memo: Any) -> "CompiledBlocks":
        # The copy of a model has weights in other places.
        return CompiledBlocks()

    def __call__(
        self, model: Transformer, x: Float[Tensor, "batch new d_model"], rotation: Rotation, cache: CachedPass
    ) -> Float[Tensor, "batch new d_model"] | None:
        if self._suits is None:
            self._weights = integer_blocks(model)
            self._suits = self._weights is not None
        if self._weights is None or x.shape[1] != 1 or not rotation or model.training or not can_decode():
            return None
        slots = cache.slots(0)
        if slots is None or slots.scales is not None:
            return None
        held = [cache.held(layer) for layer in range(len(model.blocks))]
        if held[0][0].dtype != x.dtype:
            return None
        cosines, sines = (each.flatten(0, -2) for each in rotation)
        return self._weights.decode(x[:, 0], (cosines, sines), slots, held)[:, None]


def integer_blocks(model: Transformer) -> IntegerBlocks | None:
    """Return the weights of a model's blocks for the compiled pass; None where it computes something else."""
    made: list[BlockWeights] = []
    shared: set[tuple[Any, ...]] = set()
    for block in model.blocks:
        if type(block) is not Block:
            return None
        attention, feed_forward = block.attention, block.feed_forward
        norms: list[Any] = [block.attention_norm, block.feed_forward_norm]
        if (
            type(feed_forward) is not SwiGLU
            or not all(type(norm) is RMSNorm for norm in norms)
            or type(attention) is not CausalSelfAttention
            or type(attention.qk_norm) is not NoQKNorm
            or attention.rotate not in (rotate_halves, compiled_rotate_halves)
            or _is_special(attention.attend)
        ):
            return None
        layers: list[Any] = [attention.query_key_value, attention.output, feed_forward.gate_up, feed_forward.down]
        if not all(isinstance(layer, QuantizedLinear) and layer.multiplies_exactly for layer in layers):
            return None
        gains = [norm.gain.detach().float().contiguous() for norm in norms]
        matrices: list[Any] = [_matrix(layer) for layer in layers]
        made.append(BlockWeights(*gains, *matrices))
        sizes = attention.n_heads, attention.n_kv_heads, attention.head_dim
        shared.add((*sizes, norms[0].eps, norms[1].eps, attention.attend.scale))
    if len(shared) != 1:
        return None
    ((n_heads, n_kv_heads, head_dim, eps, other_eps, scale),) = shared
    if eps != other_eps or head_dim % 2:
        return None
    return IntegerBlocks(made, n_heads, n_kv_heads, head_dim, eps, scale)


def _is_special(attend: PlainAttention) -> bool:
    return attend.window is not None or attend.softcap is not None


def _matrix(layer: QuantizedLinear) -> IntegerMatrix:
    middles, minima = (getattr(layer, name, None) for name in ("middles", "minima"))
    return IntegerMatrix(layer.values, layer.scales, middles, minima, layer.bias)
