"""The fastest forms of generating on this machine's CPU, timed when a model is first used for it and kept.

Three choices: whether few vectors are multiplied with a matrix by torch or by the compiled loop, whether few new tokens
go through all blocks in one compiled pass or through one after the other, and whether the vectors of a prompt are
multiplied by integers or by the numbers that they stand for. They are timed on the model's own weights, and few vectors
over so many of them that they are read from memory and not from a cache, as in generating.
"""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin.hardware.competition import Sampler
from napkin.hardware.form_timing import Forms, choose_form
from napkin.hardware.sampling import cache_bytes
from napkin.kernels.blocks.decode import Matrix
from napkin.kernels.operator_forms import ShapeClass, are_measured, known_form, pinned_forms
from napkin.kernels.products.linear import (
    FEW_PRODUCTS,
    FEW_VECTORS,
    class_of_product,
    has_compiled_product,
    linear,
    multiply_vectors,
)
from napkin.model.compiled_blocks import DECODING, FEW_ROWS, CompiledBlocks, class_of_pass, weights_of_blocks
from napkin.model.kv_cache import ContiguousCache
from napkin.model.layers import Linear
from napkin.model.quantized import INTEGER_PRODUCTS, MORE_VECTORS, QuantizedLinear
from napkin.model.transformer import Transformer

SECONDS = 0.01
"""Seconds of timing each form, or six calls: less than a second for a model of a hundred million parameters."""
_MOST_INTEGERS = 2**20
"""Integers of a matrix that are multiplied by the vectors of a prompt when that is timed."""
EARLIER = 32
"""Positions that the cache of a timed pass holds."""

_timed: WeakSet[Transformer] = WeakSet()


def choose_decoding_forms(model: Transformer) -> None:
    """Choose how a model on a CPU decodes few tokens, where that is not known yet; once in its life."""
    if model in _timed or model.device.type != "cpu" or not are_measured():
        return
    _timed.add(model)
    linears = (each for each in model.modules() if type(each) is Linear and each.multiply is linear)
    # A head of integers would make all its numbers.
    heads = [model.head_weight] if model.quantized_head is None else []
    matrices = [each.detach() for each in (*(layer.weight for layer in linears), *heads)]
    matrices = [each for each in matrices if has_compiled_product(each)]
    shapes = list(dict.fromkeys(each.shape for each in matrices))
    asked: list[tuple[str, ShapeClass, str, Callable[[], Forms]]] = [
        (FEW_PRODUCTS, class_of_product(n, shape), "torch", partial(forms_of_products, matrices, shape, n))
        for shape in shapes
        for n in FEW_VECTORS
    ]
    weights, longest = weights_of_blocks(model), model.config.context_length
    if weights is not None and isinstance(weights.blocks[0].up, Matrix):
        asked += [
            (DECODING, class_of_pass(weights, n), "block by block", partial(forms_of_passes, model, n))
            for n in FEW_ROWS
            if longest >= EARLIER + n
        ]
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear) and each.has_compiled_loop]
    by_class = {layer.class_of(n): layer for layer in layers if layer.dtype == torch.bfloat16 for n in MORE_VECTORS}
    asked += [
        (INTEGER_PRODUCTS, shape_class, "numbers", partial(forms_of_integers, layer, int(shape_class[0])))
        for shape_class, layer in by_class.items()
    ]
    unknown = [each for each in asked if known_form(*each[:2]) is None]
    if unknown:
        with Sampler() as sampler:
            for operator, shape_class, default, make_forms in unknown:
                choose_form(operator, shape_class, make_forms, default=default, seconds=SECONDS, sampler=sampler)


def forms_of_products(matrices: list[Tensor], shape: torch.Size, n: int) -> dict[str, Callable[[], object]]:
    """Products of n vectors with one matrix of a shape after another, cut out of the model's, so many that each is read
    from memory."""
    size, dtype = shape.numel(), matrices[0].dtype
    pieces = (flat[size * i :][:size] for flat in map(torch.flatten, matrices) for i in range(flat.numel() // size))
    most = 1 + 2 * cache_bytes("cpu") // (size * dtype.itemsize)
    in_turn, x = cycle([each.view(shape) for each in islice(pieces, most)]), torch.randn(n, shape[1]).to(dtype)

    def form(multiply: Callable[[Tensor, Tensor, None], Tensor]) -> Callable[[], object]:
        def call() -> None:
            with torch.inference_mode():
                multiply(x, next(in_turn), None)

        return call

    return {"torch": form(F.linear), "compiled": form(multiply_vectors)}


def forms_of_integers(layer: QuantizedLinear, n: int) -> dict[str, Callable[[], object]]:
    """Products of n vectors with the first rows of a layer of integers."""
    rows = layer.first_rows(max(1, _MOST_INTEGERS // layer.in_features))
    x = torch.randn(n, layer.in_features).bfloat16()

    def multiply(form: str) -> None:
        with torch.inference_mode(), pinned_forms({INTEGER_PRODUCTS: form}):
            rows(x)

    return {form: partial(multiply, form) for form in ("numbers", "integers")}


def forms_of_passes(model: Transformer, n: int) -> dict[str, Callable[[], object]]:
    """Passes of n new tokens of one sequence through the first blocks of a model."""
    blocks, needed_bytes = list(model.blocks), 2 * cache_bytes("cpu")
    bytes_of_block = sum(each.nbytes for each in blocks[0].parameters())
    blocks = blocks[: max(1, -(-needed_bytes // bytes_of_block))]
    config = dataclasses.replace(model.config, n_layers=len(blocks))
    tokens = torch.zeros(1, n, dtype=torch.int64)

    def form(decode_blocks: CompiledBlocks | None) -> Callable[[], object]:
        part = copy.copy(model)
        part._modules = {**model._modules, "blocks": nn.ModuleList(blocks)}
        part.config, part.decode_blocks = config, decode_blocks
        cache = ContiguousCache(config, 1, min(EARLIER + n, config.context_length), dtype=model.embedding.dtype)

        @torch.inference_mode()
        def call() -> None:
            if cache.lengths == [0]:
                part.hidden(torch.zeros(1, EARLIER, dtype=torch.int64), cache=cache.extend(EARLIER))
            part.hidden(tokens, cache=cache.extend(n))
            cache.truncate(EARLIER)

        return call

    return {"block by block": form(None), "one pass": form(CompiledBlocks())}
