"""Linear layers whose weights are integers of 8 or 4 bits with scales, for inference.

    int8: w = q · scale, one scale per row or for each group of a row, q from -128 to 127
    int4: w = (q - 8) · scale + middle, one scale and one middle for each group of a row, q from 0 to 15; or q · scale +
          minimum, where there are minima in place of middles; or (q - 8) · scale, where there are neither

A model that is quantized here has scales in bf16; products are of bf16 vectors with sums in fp32. Integers that come
from a file have the scales of the file, in fp16 or fp32, and stand for exactly its numbers; products are in fp32.

On a CPU a compiled loop reads the integers as they are: a file's however many vectors there are, others for few
vectors, and for more where that was faster (`napkin.inference.decoding_forms`). On a GPU Triton kernels do for few.
Elsewhere the weights are made again in the format of the products and multiplied, which is what all are held to.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.kernels.operator_forms import ShapeClass, fastest_form
from napkin.kernels.products.numba_forms import PIECE
from napkin.kernels.products.quantized import (
    integer_product,
    products_dtype,
    quantized_product,
    reads_integers,
)
from napkin.model.layers import Linear, MuPLinear
from napkin.model.transformer import Transformer

Format = Literal["int8", "int4"]
GROUP_SIZE = 64
"""Numbers that share a scale in int4, unless another size is given."""

_FEW = 16
"""Vectors up to which the compiled loop over integers with scales in bf16 is not timed against a product with weights
that are made again: making them passes over as many numbers of 32 bits several times."""
MORE_VECTORS = (64, 128, 256)
"""Numbers of vectors for which both are timed; other numbers take the choice of the next larger one. For more the
weights are made again."""
INTEGER_PRODUCTS = "products of integers"
_OPTIONAL = frozenset(("bias", "factors", "middles", "minima"))
_PACKED_GROUPS = (32, 64, 128, 256)
_MULTIPLE = 64
"""Columns are filled up to multiples of this where groups have such a size, as packed operators of torch want them."""


class QuantizedLinear(nn.Module):
    """A `Linear` in inference, with the matrix [out_features, in_features] in integers."""

    format: Format
    values: Tensor
    scales: Tensor
    bias: Tensor | None
    factors: Tensor | None
    """Factors of the layer's inputs, for matrices of AWQ (`calibration.py`)."""
    middles: Tensor | None
    minima: Tensor | None
    """At most one of the two is given."""

    def __init__(self, out_features: int, in_features: int, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        for name in _OPTIONAL - tensors.keys():
            # Asking a module for a tensor that it lacks takes microseconds.
            setattr(self, name, None)

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the products: fp32 of integers that come from a file, else bf16."""
        return products_dtype(self.scales)

    @property
    def device(self) -> torch.device:
        """The device of the integers."""
        return self.values.device

    @property
    def weight(self) -> Float[Tensor, "out_features in_features"]:
        """The matrix in `dtype`, computed on each call."""
        return self._numbers(slice(None))

    @property
    def has_compiled_loop(self) -> bool:
        """True if a compiled loop multiplies the integers: on a CPU, where groups are of whole pieces."""
        return self.values.is_cpu and self._has_whole_pieces

    @cached_property
    def _has_whole_pieces(self) -> bool:
        return self.padded % (PIECE * self.integers[1].shape[1]) == 0

    @property
    def padded(self) -> int:
        """Columns, with those that complete the last group."""
        raise NotImplementedError

    @property
    def integers(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The integers, their scales [row, group], and the middles or the minima, if any, as `integer_product` takes
        them."""
        scales = self.scales[:, None] if self.scales.ndim == 1 else self.scales
        return self.values, scales, self.middles, self.minima

    def rows(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch in_features"]:
        """Some rows of the matrix, as an embedding's."""
        return self._numbers(ids.flatten()).view(*ids.shape, self.in_features)

    def _numbers(self, rows: slice | Tensor) -> Float[Tensor, "rows in_features"]:
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        # What does nothing is not called: a small matrix is multiplied in the time of a few calls of torch's, or of
        # asking a module for a tensor.
        vectors, buffers = x if x.ndim == 2 else x.reshape(-1, self.in_features), self._buffers
        values, scales = buffers["values"], buffers["scales"]
        assert values is not None
        assert scales is not None
        in_bf16 = products_dtype(scales) == torch.bfloat16
        if in_bf16 and x.dtype != torch.bfloat16:
            vectors = vectors.to(torch.bfloat16)
        n_vectors = vectors.shape[0]
        if values.is_cpu and self._has_whole_pieces and (not in_bf16 or self._is_read_in_place(n_vectors)):
            others = buffers.get("middles"), buffers.get("minima"), buffers.get("bias")
            result = integer_product(self._scaled(vectors), values, scales, *others)
        else:
            if in_bf16 and reads_integers(values, scales, n_vectors):
                result = quantized_product(self._scaled(vectors).contiguous(), values, scales, self.middles)
            else:
                result = F.linear(vectors.to(self.dtype), self.weight)
            result = result if self.bias is None else result + self.bias
        result = result if result.dtype == x.dtype else result.to(x.dtype)
        return result if x.ndim == 2 else result.view(*x.shape[:-1], self.out_features)

    def _is_read_in_place(self, n_vectors: int) -> bool:
        """True if the compiled loop is to multiply so many vectors in bf16 by the integers."""
        if n_vectors <= _FEW or n_vectors > MORE_VECTORS[-1]:
            return n_vectors <= _FEW
        return fastest_form(INTEGER_PRODUCTS, self.class_of(n_vectors), "numbers") == "integers"

    def class_of(self, n_vectors: int) -> ShapeClass:
        """The class of a product with so many vectors, at most the last of MORE_VECTORS; both forms take as many times
        as long for as many more rows."""
        return (next(each for each in MORE_VECTORS if n_vectors <= each), self.format, self.in_features)

    def first_rows(self, n: int) -> "QuantizedLinear":
        """A layer of the first n rows of the matrix, in the same memory."""
        tensors = {name: tensor if name == "factors" else tensor[:n] for name, tensor in self.named_buffers()}
        return type(self)(min(n, self.out_features), self.in_features, tensors)

    def _scaled(self, vectors: Tensor) -> Tensor:
        factors = self._buffers.get("factors")
        return vectors if factors is None else vectors * factors


class Int8Linear(QuantizedLinear):
    """A matrix whose rows are 8-bit integers with a scale each, or with one for each group."""

    format = "int8"

    @staticmethod
    def quantized(weight: Float[Tensor, "rows columns"]) -> dict[str, Tensor]:
        """The nearest integers, with scales that give the largest number of each row 127."""
        weight = weight.float()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-20).to(torch.bfloat16)
        values = (weight / scales.float()[:, None]).round().clamp(-127, 127)
        return {"values": values.to(torch.int8), "scales": scales}

    def _numbers(self, rows: slice | Tensor) -> Float[Tensor, "rows in_features"]:
        values, scales = self.values[rows].float(), self.scales[rows].float()
        if scales.ndim == 1:
            return (values * scales[:, None]).to(self.dtype)
        return (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)

    @property
    def padded(self) -> int:
        """The matrix's columns."""
        return self.in_features


class Int4Linear(QuantizedLinear):
    """Rows of 4-bit integers, two in a byte: column 2i in the lower half, 2i + 1 in the upper."""

    format = "int4"

    @property
    def group_size(self) -> int:
        """Numbers that share a scale."""
        return self.padded // self.scales.shape[1]

    @property
    def padded(self) -> int:
        """Columns, with those that complete the last group."""
        return 2 * self.values.shape[1]

    @staticmethod
    def quantized(weight: Float[Tensor, "rows columns"], group_size: int = GROUP_SIZE) -> dict[str, Tensor]:
        """The nearest integers, with scales from the smallest to the largest number of each group."""
        groups = Int4Linear.filled(weight, group_size).float().unflatten(1, (-1, group_size))
        scales, middles = Int4Linear.grid(groups)
        values = ((groups - middles.float()[..., None]) / scales.float()[..., None] + 8).round().clamp(0, 15)
        flat = values.flatten(1).to(torch.uint8)
        return {"values": flat[:, ::2] | (flat[:, 1::2] << 4), "scales": scales, "middles": middles}

    @staticmethod
    def filled(weight: Float[Tensor, "rows columns"], group_size: int) -> Float[Tensor, "rows padded"]:
        """The matrix with its last column repeated, which widens no group's range, up to whole groups."""
        missing = -weight.shape[1] % (max(group_size, _MULTIPLE) if group_size in _PACKED_GROUPS else group_size)
        return torch.cat((weight, weight[:, -1:].expand(-1, missing)), dim=1)

    @staticmethod
    def grid(groups: Float[Tensor, "*group size"]) -> tuple[Float[Tensor, "*group"], Float[Tensor, "*group"]]:
        """The scale and the middle of each group, in bf16, from its smallest to its largest number."""
        least, most = groups.aminmax(dim=-1)
        scales = ((most - least) / 15).clamp(min=1e-20).to(torch.bfloat16)
        return scales, (least + 8 * scales.float()).to(torch.bfloat16)

    def exact_weight(self) -> Float[Tensor, "out_features in_features"]:
        """The matrix that integers, scales and factors stand for, in fp32, without rounding it to `dtype`."""
        return self._exact(slice(None))

    def _numbers(self, rows: slice | Tensor) -> Float[Tensor, "rows in_features"]:
        return self._exact(rows).to(self.dtype)

    def _exact(self, rows: slice | Tensor) -> Float[Tensor, "rows in_features"]:
        groups = self._integers(rows).float().unflatten(1, (-1, self.group_size))
        scales, (middles, minima) = self.scales[rows].float()[..., None], self._offsets(rows)
        numbers = groups * scales + minima if minima is not None else (groups - 8) * scales
        numbers = numbers if middles is None else numbers + middles
        numbers = numbers.flatten(1)[:, : self.in_features]
        return numbers if self.factors is None else numbers * self.factors.float()

    def _offsets(self, rows: slice | Tensor) -> list[Tensor | None]:
        return [None if each is None else each[rows].float()[..., None] for each in (self.middles, self.minima)]

    def _integers(self, rows: slice | Tensor) -> UInt8[Tensor, "rows padded"]:
        values = self.values[rows]
        return torch.stack((values & 15, values >> 4), dim=2).flatten(1)


class QuantizedEmbedding(nn.Module):
    """An embedding whose rows are those of a matrix in integers, which a tied head multiplies too."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Float[Tensor, "vocab_size d_model"]:
        """The whole matrix, computed on each call."""
        return self.layer.weight

    @property
    def dtype(self) -> torch.dtype:
        """The number format of what is read."""
        return self.layer.dtype

    @property
    def device(self) -> torch.device:
        """The device of the integers."""
        return self.layer.device

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        return self.layer.rows(tokens)


def quantize_model(
    model: Transformer,
    to: Format,
    *,
    group_size: int = GROUP_SIZE,
    calibrated: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Replace the matrices of a model's blocks by integers, and its head by int8; the rest becomes bf16: embeddings (a
    tied head becomes an int8 copy, whose numbers the embedding then takes), norms, biases, routers and stacks of
    experts. The model is then for inference only. `calibrated` has, by name, the tensors of matrices that are not
    simply rounded to nearest. Raises NapkinError for an odd group size.
    """
    if to == "int4" and (group_size < 2 or group_size % 2):
        raise NapkinError(f"groups of {group_size} numbers: use an even --group-size, such as {GROUP_SIZE}")
    layers = quantized_layers(model)
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        calibrated_tensors = (calibrated or {}).get(name)
        setattr(model.blocks.get_submodule(parent), last, _quantized(layer, to, group_size, calibrated_tensors))
    head = _from_weight(model.head_weight.detach(), None, "int8", group_size)
    if model.head is None:
        with torch.no_grad():
            model.embedding.weight.copy_(head.weight)
    model.head, model.quantized_head = None, head
    _for_inference(model)


def quantized_twin(model: Transformer, to: Format, tensors: dict[str, Tensor]) -> None:
    """Replace layers of a model by the quantized layers whose tensors are in `tensors`, the state_dict of a quantized
    model of the same config. Raises ValueError if these do not match the model's matrices; its other weights are not
    changed.
    """
    shapes = {"int8": Int8Linear, "int4": Int4Linear}
    for name, layer in quantized_layers(model).items():
        parent, _, last = name.rpartition(".")
        rows, columns = layer.weight.shape
        twin = _checked(shapes[to](rows, columns, _of_layer(tensors, f"blocks.{name}.")), name)
        setattr(model.blocks.get_submodule(parent), last, twin)
    rows, columns = model.head_weight.shape
    head = _checked(Int8Linear(rows, columns, _of_layer(tensors, "quantized_head.")), "quantized_head")
    model.head, model.quantized_head = None, head
    _for_inference(model)


def weight_bytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters, and of its integers with their scales; what two layers share counts once."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    buffers = {buffer for layer in layers for buffer in layer.buffers()}
    return sum(each.nbytes for each in (*model.parameters(), *buffers))


def put_quantized(model: Transformer, layers: dict[str, QuantizedLinear]) -> None:
    """Put layers in the place of a model's matrices of those names, which end with ".weight".

    A quantized embedding that is tied is the head too.
    """
    for name, layer in layers.items():
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "embedding":
            model.embedding = QuantizedEmbedding(layer)
            if model.head is None:
                model.quantized_head = layer
        elif name == "head.weight":
            model.head, model.quantized_head = None, layer
        else:
            setattr(model.get_submodule(parent), last, layer)
    model.requires_grad_(False)


def _for_inference(model: Transformer) -> None:
    # Fake tensors, on which a plan is counted, cannot be converted.
    if model.embedding.weight.dtype != torch.bfloat16:
        model.to(torch.bfloat16)
    model.requires_grad_(False).eval()


def _checked(layer: QuantizedLinear, name: str) -> QuantizedLinear:
    """The layer, whose tensors come from a file. Raises ValueError where they are not those of its matrix."""
    rows, columns = layer.out_features, layer.in_features
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    wanted = {"values": (torch.int8, (rows, columns)), "scales": (torch.bfloat16, (rows,))}
    buffers = dict(layer.named_buffers())
    if layer.format == "int4":
        if any(name not in buffers or buffers[name].dim() != 2 for name in ("values", "scales")):
            raise ValueError(f"{name} has no groups")
        halves, n_groups = buffers["values"].shape[1], buffers["scales"].shape[1]
        if not n_groups or 2 * halves % n_groups or not 0 <= 2 * halves - columns < max(2 * halves // n_groups, 64):
            raise ValueError(f"{name} has {n_groups} groups in {halves} bytes for {columns} columns")
        groups = (torch.bfloat16, (rows, n_groups))
        wanted = {"values": (torch.uint8, (rows, halves)), "scales": groups, "middles": groups}
    if "factors" in buffers:
        wanted["factors"] = (torch.bfloat16, (columns,))
    if buffers.keys() - {"bias"} != wanted.keys():
        raise ValueError(f"{name} has {', '.join(buffers) or 'no tensors'}")
    for each, (dtype, shape) in wanted.items():
        if buffers[each].dtype != dtype or tuple(buffers[each].shape) != shape:
            raise ValueError(f"{name}.{each} is {buffers[each].dtype} {list(buffers[each].shape)}")
    if "bias" in buffers and tuple(buffers["bias"].shape) != (rows,):
        raise ValueError(f"{name}.bias is {list(buffers['bias'].shape)}")
    return layer


def quantized_layers(model: Transformer) -> dict[str, Linear]:
    """The matrices of a model's blocks that are quantized, by their names there."""
    return {
        name: layer
        for name, layer in model.blocks.named_modules()
        if isinstance(layer, Linear) and not name.endswith("router")
    }


def _of_layer(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _quantized(layer: Linear, to: Format, group_size: int, tensors: dict[str, Tensor] | None) -> QuantizedLinear:
    if tensors is not None:
        biases = {} if layer.bias is None else {"bias": layer.bias.detach().clone()}
        rows, columns = layer.weight.shape
        return Int4Linear(rows, columns, tensors | biases)
    factor = layer.multiplier if isinstance(layer, MuPLinear) else 1.0
    bias = None if layer.bias is None else layer.bias.detach()
    return _from_weight(layer.weight.detach() * factor, bias, to, group_size)


def _from_weight(weight: Tensor, bias: Tensor | None, to: Format, group_size: int) -> QuantizedLinear:
    biases = {} if bias is None else {"bias": bias.clone()}
    rows, columns = weight.shape
    if to == "int8":
        return Int8Linear(rows, columns, Int8Linear.quantized(weight) | biases)
    return Int4Linear(rows, columns, Int4Linear.quantized(weight, group_size) | biases)
