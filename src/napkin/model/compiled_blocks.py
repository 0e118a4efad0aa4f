"""The blocks of a model in one compiled pass on a CPU, for new tokens of sequences in a cache; or the whole model, from
tokens to logits, for those of one sequence."""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from napkin.kernels.blocks.decode import Blocks, BlockWeights, Ends, IntegerMatrix, Matrix, TokenPass, can_decode
from napkin.kernels.operator_forms import ShapeClass, fastest_form
from napkin.kernels.pointwise.rotary import compiled_rotate_halves, rotate_halves
from napkin.kernels.products.linear import has_compiled_product, is_fastest, linear
from napkin.model.attention import CausalSelfAttention, PlainAttention
from napkin.model.block import Block
from napkin.model.feed_forward import SwiGLU, TanhGELU
from napkin.model.kv_cache import CachedPass, ContiguousCache, KVCache
from napkin.model.layers import Embedding, Linear
from napkin.model.norm import LayerNorm, NoQKNorm, RMSNorm
from napkin.model.positions import LearnedPositions, NoPositions, RotaryPositions, Rotation, unrotated
from napkin.model.quantized import QuantizedLinear
from napkin.model.transformer import Transformer

FEW_ROWS = (1, 4, 8, 16, 64)
"""Numbers of tokens for which the pass over bf16 and fp32 matrices is timed against the blocks one by one; other
numbers take the choice of the next larger one."""
USUALLY_FEW = 16
"""The most tokens for which the pass is used if nothing was timed, and the most in a pass of several new tokens per
sequence through integer matrices."""
DECODING = "decoding"
_SMALLEST_MODEL = 2**21
"""Numbers of the blocks' matrices in bf16 or fp32 from which the pass is worth being loaded."""


class CompiledBlocks:
    """Computes what a model's blocks do, and declines where the pass has no compiled form: another architecture, many
    tokens, a cache that is not read in place, training, autocast, and while a meter looks at operators.

    The numbers are those of the blocks but for the order of sums.
    """

    def __init__(self) -> None:
        self._weights: Blocks | None = None
        self._ends: Ends | None = None
        self._parts: _Parts | None = None
        self._prepared: tuple[Any, TokenPass] | None = None
        """A weak reference to a cache, and the pass that was prepared for it."""

    def __reduce__(self) -> tuple[type["CompiledBlocks"], tuple[()]]:
        # The copy of a model, in this process or in a file, has weights in other places.
        return CompiledBlocks, ()

    def __call__(
        self, model: Transformer, x: Float[Tensor, "batch new d_model"], rotation: Rotation, cache: CachedPass
    ) -> Float[Tensor, "batch new d_model"] | None:
        n_sequences, n_new, _ = x.shape
        begins = n_new > 1 or cache.start == 0
        weights = self._weights_for(model, n_sequences * n_new, n_new, begins=begins)
        if weights is None:
            return None
        slots = cache.slots(0) if n_new == 1 else cache.slots_of_each()
        if slots is None or slots.scales is not None:
            return None
        caches = [cache.held(layer) for layer in range(len(model.blocks))]
        if caches[0][0].dtype != weights.dtype or x.dtype != weights.dtype:
            return None
        # For single new tokens, all sequences may share one table.
        tables = (each if n_new == 1 else each.expand(n_sequences, n_new, -1) for each in rotation)
        turned: Any = tuple(each.flatten(0, -2) for each in tables) or None
        decoded = weights.decode(x.flatten(0, 1), turned, slots, caches, n_new)
        return decoded.view(x.shape)

    def logits(
        self, model: Transformer, tokens: Sequence[int], cache: KVCache, n_last: int
    ) -> Float[Tensor, "n_last vocab_size"] | None:
        """The logits, in fp32, after each of the last `n_last` new tokens of the one sequence in a cache, which then
        holds them; None where the pass has no form for it, and the cache is as before."""
        n_rows = len(tokens)
        if type(cache) is not ContiguousCache or not cache.is_one_text:
            return None
        weights = self._weights_for(model, n_rows, n_rows, begins=n_rows > 1 or cache.lengths == [0])
        if weights is None or (ends := self._ends) is None or not 0 <= min(tokens) <= max(tokens) < ends.vocab_size:
            return None
        if isinstance(ends.head, Matrix) and not is_fastest(ends.head.weight, n_last):
            return None
        known, prepared = self._prepared or (None, None)
        if known is None or prepared is None or known() is not cache or not prepared.takes(n_rows):
            if not cache.is_read_in_place or cache.keys[0].dtype != weights.dtype:
                return None
            # The compiled call checks no positions; the modules name those that their tables lack.
            if cache.capacity > model.config.context_length:
                return None
            prepared = TokenPass(weights, ends, list(zip(cache.keys, cache.values, strict=True)), n_rows)
            self._prepared = weakref.ref(cache), prepared
        (start,) = cache.grow([n_rows])
        x = None
        if ends.embedding is None:
            positions = torch.arange(start, start + n_rows)[None]
            x = model.positions.embed(model.embedding(torch.tensor([tokens])) * model.input_scale, None, positions)[0]
        return prepared(tokens, start, n_last, x)

    def _weights_for(self, model: Transformer, n_rows: int, n_new: int, *, begins: bool) -> Blocks | None:
        """The weights that the pass reads for so many rows, `n_new` of each sequence; None where the modules compute.
        That all stand where they did is checked where a text `begins` alone: it takes a twentieth of the time of a
        small model's token."""
        if model.training or not can_decode() or torch.is_autocast_enabled("cpu"):
            return None
        if self._parts is None or (begins and not self._parts.are_those()):
            self._parts, self._prepared = _Parts(model), None
            self._weights = weights_of_blocks(model) if model.device.type == "cpu" else None
            self._ends = None if self._weights is None else ends_of_pass(model, self._weights)
        if (weights := self._weights) is None:
            return None
        of_numbers = isinstance(weights.blocks[0].up, Matrix)
        if n_rows > (FEW_ROWS[-1] if of_numbers else USUALLY_FEW) and (n_new > 1 or of_numbers):
            return None
        default = "one pass" if n_rows <= USUALLY_FEW else "block by block"
        if of_numbers and fastest_form(DECODING, class_of_pass(weights, n_rows), default) != "one pass":
            return None
        return weights


def class_of_pass(weights: Blocks, n_rows: int) -> ShapeClass:
    """The class of a pass of few tokens, at most the last of FEW_ROWS, over the blocks of a model."""
    return (next(each for each in FEW_ROWS if n_rows <= each), *weights.kind)


class _Parts:
    """The modules and tensors of a model, which may be moved, or replaced by others."""

    def __init__(self, model: Transformer) -> None:
        registries: list[dict[str, Any]] = []
        for module in model.modules():
            registries += [module._modules, module._parameters, module._buffers]
        self._registries = [(registry, dict(registry)) for registry in registries if registry]
        tensors = (each for _, parts in self._registries for each in parts.values() if isinstance(each, Tensor))
        self._places = [(each, each.data_ptr()) for each in tensors]

    def are_those(self) -> bool:
        """True if all weights are still at the same addresses."""
        return all(
            len(registry) == len(parts) and all(registry.get(name) is each for name, each in parts.items())
            for registry, parts in self._registries
        ) and all(tensor.data_ptr() == place for tensor, place in self._places)


def weights_of_blocks(model: Transformer) -> Blocks | None:
    """Return the weights of a model's blocks for the compiled pass; None where it computes something else."""
    weights: list[BlockWeights] = []
    shared: set[tuple[Any, ...]] = set()
    for block in model.blocks:
        if type(block) is not Block:
            return None
        attention, feed_forward = block.attention, block.feed_forward
        norms: list[Any] = [block.attention_norm, block.feed_forward_norm]
        if (
            type(feed_forward) not in (SwiGLU, TanhGELU)
            or type(norms[0]) not in (RMSNorm, LayerNorm)
            or type(norms[0]) is not type(norms[1])
            or type(attention) is not CausalSelfAttention
            or type(attention.qk_norm) is not NoQKNorm
            or attention.rotate not in (rotate_halves, compiled_rotate_halves, unrotated)
            or _is_special(attention.attend)
            or model.positions.has_bias
        ):
            return None
        gated, centred = isinstance(feed_forward, SwiGLU), isinstance(norms[0], LayerNorm)
        up = feed_forward.gate_up if isinstance(feed_forward, SwiGLU) else feed_forward.up
        layers: tuple[Any, ...] = attention.query_key_value, attention.output, up, feed_forward.down
        matrices: list[Any] = [_matrix(layer) for layer in layers]
        if any(each is None for each in matrices):
            return None
        gains, shifts = ([getattr(norm, name, None) for norm in norms] for name in ("gain", "bias"))
        weights.append(BlockWeights(cast(Any, tuple(gains)), cast(Any, tuple(shifts)), *matrices))
        sizes = attention.n_heads, attention.n_kv_heads, attention.head_dim
        kinds = "layer" if centred else "rms", "swiglu" if gated else "gelu_tanh"
        shared.add((*kinds, *sizes, norms[0].eps, norms[1].eps, attention.attend.scale))
    if len(shared) != 1 or not _have_one_format(weights):
        return None
    ((norm, activation, n_heads, n_kv_heads, head_dim, eps, other_eps, scale),) = shared
    if eps != other_eps or head_dim % 2:
        return None
    return Blocks(weights, norm, activation, n_heads, n_kv_heads, head_dim, eps, scale)


def ends_of_pass(model: Transformer, blocks: Blocks) -> Ends | None:
    """What the compiled pass reads before the blocks and after them; None where it computes something else."""
    first, norm = cast(Any, cast(Block, model.blocks[0]).attention_norm), cast(Any, model.norm)
    positions, embedding = cast(Any, model.positions), cast(Any, model.embedding)
    if type(norm) is not type(first) or norm.eps != first.eps or type(model.output_scale) is not nn.Identity:
        return None
    if model.config.logit_softcap is not None or type(positions) not in _POSITIONS:
        return None
    own_head = model.head if model.quantized_head is None else model.quantized_head
    head = Matrix(model.head_weight.detach(), None) if own_head is None else _matrix(own_head)
    if head is None or (isinstance(head, Matrix) and not has_compiled_product(head.weight)):
        return None
    is_plain = type(embedding) is Embedding and embedding.look_up is F.embedding
    learned = positions.weight.detach() if type(positions) is LearnedPositions else None
    tables = positions.embedding if isinstance(positions, RotaryPositions) else None
    rotation = None if tables is None else (tables.cosines, tables.signed_sines)
    vectors = embedding.weight.detach() if is_plain else None
    ends = norm.gain, getattr(norm, "bias", None), head, learned, vectors
    if any(each.dtype != blocks.dtype for each in ends if each is not None):
        return None
    if any(not each.is_contiguous() for each in (learned, vectors, *(rotation or ())) if each is not None):
        return None
    return Ends(vectors, model.input_scale, learned, rotation, norm.gain.detach(), ends[1], head)


_POSITIONS = (NoPositions, LearnedPositions, RotaryPositions)
"""What the compiled pass adds or rotates by."""


def _is_special(attend: PlainAttention) -> bool:
    return attend.window is not None or attend.softcap is not None


def _matrix(layer: nn.Module) -> IntegerMatrix | Matrix | None:
    """The matrix of a linear layer as the pass reads it; None if the layer computes something else."""
    if isinstance(layer, QuantizedLinear):
        if not layer.has_compiled_loop:
            return None
        return IntegerMatrix(*layer.integers, layer.bias, layer.factors)
    if type(layer) is not Linear or layer.adapter is not None or layer.multiply is not linear:
        return None
    matrix = Matrix(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
    return matrix if matrix.is_read else None


def _have_one_format(blocks: list[BlockWeights]) -> bool:
    """True if all numbers of the blocks are fp32 or all bf16, and if no matrices of integers, there are enough."""
    matrices = [matrix for block in blocks for matrix in block.matrices]
    numbers = [each for each in matrices if isinstance(each, Matrix)]
    if numbers and len(numbers) < len(matrices):
        return False
    vectors = [each for block in blocks for each in (*block.gains, *block.shifts, *(m.biases for m in block.matrices))]
    formats = {each.dtype for each in (*vectors, *matrices) if each is not None}
    if numbers and sum(each.weight.numel() for each in numbers) < _SMALLEST_MODEL:
        return False
    return len(formats) == 1 and formats <= {torch.bfloat16, torch.float32}
