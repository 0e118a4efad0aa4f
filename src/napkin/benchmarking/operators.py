"""The operators that can be timed, each in its forms: one table. A form is a function of the same inputs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin import kernels
from napkin.accounting.ledger import Ledger
from napkin.benchmarking.case import Case, Draw, Shape, Subject, Target, count_passes
from napkin.kernels.operators import triton_is_installed
from napkin.model.attention import CausalMask, FlexAttention
from napkin.model.positions import NoPositions, RotaryEmbedding
from napkin.recipe.precision import Precision
from napkin.torch_compile import set_up_compiler

EPS = 1e-5
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """An operator: its dimensions, its inputs, its forms."""

    about: str
    sizes: Mapping[str, int]
    """The sizes of dimensions that a shape does not name."""
    inputs: Callable[[Shape, Draw], Inputs]
    forms: Mapping[str, Callable[..., Tensor]]
    shapes: Sequence[Shape] = ({},)
    """The shapes that are timed where none is named."""
    sweep: Sequence[Shape] = ()
    optional: tuple[str, ...] = ()
    """Dimensions that have a size only where a shape names one."""
    on_gpu_only: frozenset[str] = field(default_factory=frozenset)
    """Forms that a CPU does not have."""
    with_triton_only: frozenset[str] = field(default_factory=frozenset)
    """Forms that run as Triton kernels; on a CPU, or without triton, plain torch computes them."""
    counted_as: Mapping[str, str] = field(default_factory=dict)
    """Forms that cannot be traced, and those whose work is the same."""


def _grid(**axes: Sequence[int]) -> list[Shape]:
    return [dict(zip(axes, sizes, strict=True)) for sizes in product(*axes.values())]


def _attention_inputs(shape: Shape, draw: Draw) -> Inputs:
    batch, heads, length, width = (shape[name] for name in ("batch_size", "n_heads", "context_length", "head_dim"))
    kv_heads = shape.get("n_kv_heads", heads)
    return tuple(draw.normal(batch, each, length, width) for each in (heads, kv_heads, kv_heads))


@functools.lru_cache(maxsize=8)
def _flex_mask(n_heads: int, length: int, device: torch.device) -> object:
    # A step makes it once for all layers.
    return FlexAttention(n_heads, scale=1.0, sees=CausalMask()).prepare(NoPositions(), length, None, device)


def _flex(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    attend = FlexAttention(queries.shape[1], scale=queries.shape[-1] ** -0.5, sees=CausalMask())
    return attend(queries, keys, values, _flex_mask(attend.n_heads, queries.shape[-2], queries.device))


def _head_inputs(shape: Shape, draw: Draw) -> Inputs:
    tokens, width, vocabulary = shape["tokens"], shape["d_model"], shape["vocab_size"]
    return draw.normal(tokens, width), draw.weight(vocabulary, width), draw.ids(vocabulary, tokens)


def _linear_inputs(shape: Shape, draw: Draw) -> Inputs:
    return draw.normal(shape["tokens"], shape["d_in"]), draw.weight(shape["d_out"], shape["d_in"])


def _vectors_and_gains(shape: Shape, draw: Draw) -> Inputs:
    x = draw.normal(shape["tokens"], shape["d_model"])
    return x, *(draw.normal(shape["d_model"]) for _ in range(2))


def _rope_inputs(shape: Shape, draw: Draw) -> Inputs:
    sizes = (shape[name] for name in ("batch_size", "context_length", "n_heads", "head_dim"))
    length = shape["context_length"]
    tables = RotaryEmbedding(shape["head_dim"], length)(length)
    return draw.normal(*sizes), *(table.to(draw.device_type) for table in tables)


def _grouped_inputs(shape: Shape, draw: Draw) -> Inputs:
    groups, tokens = shape["groups"], shape["tokens"]
    starts = torch.arange(groups) * tokens // groups
    weight = draw.weight(groups, shape["d_out"], shape["d_in"])
    return draw.normal(tokens, shape["d_in"]), weight, starts.to(draw.device_type)


_TOKENS = _grid(tokens=(1024, 4096, 16384))
_TRITON = frozenset({"triton"})
_LINEAR = {"tokens": 4096, "d_in": 512, "d_out": 512}

OPERATORS: dict[str, Operator] = {
    "matmul": Operator(
        "x · weightᵀ, [tokens, d_in] by [d_in, d_out]",
        _LINEAR,
        _linear_inputs,
        {"linear": F.linear},
        sweep=[{"tokens": size, "d_in": size, "d_out": size} for size in (256, 512, 1024, 2048, 4096)],
    ),
    "softmax": Operator(
        "over rows of `columns` numbers",
        {"rows": 4096, "columns": 1024},
        lambda shape, draw: (draw.normal(shape["rows"], shape["columns"]),),
        {
            "torch": lambda x: x.softmax(dim=-1),
            "formula": lambda x: (up := (x - x.amax(dim=-1, keepdim=True)).exp()) / up.sum(dim=-1, keepdim=True),
        },
        sweep=_grid(columns=(256, 1024, 4096, 16384)),
    ),
    "attention": Operator(
        "causal softmax attention, [batch_size, n_heads, context_length, head_dim]",
        {"batch_size": 4, "n_heads": 8, "context_length": 512, "head_dim": 64},
        _attention_inputs,
        {
            "fused": kernels.fused_attention,
            "plain": kernels.plain_attention,
            "compiled": kernels.compiled_attention,
            "reference": kernels.attention_reference,
            "flash": kernels.flash_attention,
            "flex": _flex,
        },
        shapes=_grid(context_length=(256, 1024)),
        # Course CS336 of Stanford, assignment 2: batches of 8, one head.
        sweep=[
            {"batch_size": 8, "n_heads": 1, **each}
            for each in _grid(head_dim=(16, 32, 64, 128), context_length=(256, 1024, 4096, 8192, 16384))
        ],
        optional=("n_kv_heads",),
        on_gpu_only=frozenset({"flex"}),
        with_triton_only=frozenset({"flash"}),
        # On the fake tensors of a count, which are on a CPU, it would be plain attention.
        counted_as={"flex": "fused"},
    ),
    "linear_cross_entropy": Operator(
        "the loss of hidden states through the output head, [tokens, d_model] by [d_model, vocab_size]",
        {"tokens": 2048, "d_model": 256, "vocab_size": 4096},
        _head_inputs,
        {
            "fused": kernels.linear_cross_entropy,
            "compiled": functools.partial(kernels.linear_cross_entropy, compiled=True),
            "logits": lambda hidden, weight, targets: kernels.cross_entropy(F.linear(hidden, weight), targets),
            "torch": lambda hidden, weight, targets: F.cross_entropy(F.linear(hidden, weight).float(), targets),
            "triton": kernels.fused_linear_cross_entropy,
        },
        with_triton_only=_TRITON,
        sweep=_grid(vocab_size=(4096, 32_000, 50_304, 128_256)),
    ),
    "cross_entropy": Operator(
        "the loss of logits, [tokens, vocab_size]",
        {"tokens": 2048, "vocab_size": 4096},
        lambda shape, draw: (
            draw.normal(shape["tokens"], shape["vocab_size"]),
            draw.ids(shape["vocab_size"], shape["tokens"]),
        ),
        {"formula": kernels.cross_entropy, "torch": lambda logits, targets: F.cross_entropy(logits.float(), targets)},
        sweep=_grid(vocab_size=(4096, 32_000, 50_304, 128_256)),
    ),
    "rms_norm": Operator(
        "root-mean-square normalization of [tokens, d_model]",
        {"tokens": 4096, "d_model": 512},
        lambda shape, draw: _vectors_and_gains(shape, draw)[:2],
        {
            "kernel": lambda x, gain: kernels.rms_norm(x, gain, EPS),
            "compiled": lambda x, gain: kernels.compiled_rms_norm(x, gain, EPS),
            "reference": lambda x, gain: kernels.rms_norm_reference(x, gain, EPS),
            "torch": lambda x, gain: F.rms_norm(x, gain.shape, gain, EPS),
            "triton": lambda x, gain: kernels.fused_rms_norm(x, gain, EPS)[0],
        },
        with_triton_only=_TRITON,
        sweep=_grid(d_model=(256, 768, 1600, 4096), tokens=(1024, 16384)),
    ),
    "layer_norm": Operator(
        "layer normalization of [tokens, d_model]",
        {"tokens": 4096, "d_model": 512},
        _vectors_and_gains,
        {
            "kernel": lambda x, gain, bias: kernels.layer_norm(x, gain, bias, EPS),
            "compiled": lambda x, gain, bias: kernels.compiled_layer_norm(x, gain, bias, EPS),
            "reference": lambda x, gain, bias: kernels.layer_norm_reference(x, gain, bias, EPS),
            "torch": lambda x, gain, bias: F.layer_norm(x, gain.shape, gain, bias, EPS),
            "triton": lambda x, gain, bias: kernels.fused_layer_norm(x, gain, bias, EPS)[0],
        },
        with_triton_only=_TRITON,
        sweep=_grid(d_model=(256, 768, 1600, 4096), tokens=(1024, 16384)),
    ),
    "rope": Operator(
        "rotary positions of [batch_size, context_length, n_heads, head_dim]",
        {"batch_size": 4, "context_length": 512, "n_heads": 8, "head_dim": 64},
        _rope_inputs,
        # The seconds do not depend on the tables' numbers: both forms get those of halves.
        {
            "halves": kernels.rotate_halves,
            "interleaved": kernels.rotate_interleaved,
            "compiled": kernels.compiled_rotate_halves,
            "triton": lambda x, cosines, sines: kernels.fused_rotate(x, cosines[None], sines[None]),
        },
        with_triton_only=_TRITON,
        sweep=_grid(context_length=(256, 1024, 4096)),
    ),
    "swiglu": Operator(
        "silu(gate) · up of [tokens, 2 · d_ff]",
        {"tokens": 4096, "d_ff": 1024},
        lambda shape, draw: (draw.normal(shape["tokens"], 2 * shape["d_ff"]),),
        {
            "kernel": kernels.swiglu,
            "compiled": kernels.compiled_swiglu,
            "reference": kernels.swiglu_reference,
            "triton": kernels.fused_swiglu,
        },
        with_triton_only=_TRITON,
        sweep=_TOKENS,
    ),
    "gelu_tanh": Operator(
        "GELU's approximation by tanh of [tokens, d_ff]",
        {"tokens": 4096, "d_ff": 1024},
        lambda shape, draw: (draw.normal(shape["tokens"], shape["d_ff"]),),
        {"torch": kernels.gelu_tanh, "compiled": kernels.compiled_gelu_tanh, "triton": kernels.fused_gelu_tanh},
        with_triton_only=_TRITON,
        sweep=_TOKENS,
    ),
    "grouped_matmul": Operator(
        "the product of experts: rows of each group by a matrix of its own, groups of equal size",
        {**_LINEAR, "groups": 8},
        _grouped_inputs,
        {"kernel": kernels.grouped_matmul, "reference": kernels.grouped_matmul_reference},
        sweep=_grid(groups=(2, 8, 64)),
        counted_as={"reference": "kernel"},
    ),
    "fp8_linear": Operator(
        "x · weightᵀ in fp8, [tokens, d_in] by [d_in, d_out]",
        _LINEAR,
        _linear_inputs,
        {
            "emulated": lambda x, weight: kernels.fp8_linear_emulated(x, weight, None),
            "linear": F.linear,
            "hardware": lambda x, weight: kernels.fp8_linear(x, weight, None),
        },
        sweep=[{"tokens": size, "d_in": size, "d_out": size} for size in (512, 1024, 2048, 4096)],
        on_gpu_only=frozenset({"hardware"}),
    ),
    "int8_linear": Operator(
        "x · weightᵀ in int8, the gradient of weight in bf16, [tokens, d_in] by [d_in, d_out]",
        _LINEAR,
        _linear_inputs,
        {
            "emulated": lambda x, weight: kernels.int8_linear_emulated(x, weight, None),
            "linear": F.linear,
            "compiled": lambda x, weight: kernels.compiled_int8_linear(x, weight, None),
            "hardware": lambda x, weight: kernels.int8_linear(x, weight, None),
        },
        sweep=[{"tokens": size, "d_in": size, "d_out": size} for size in (512, 1024, 2048, 4096)],
        on_gpu_only=frozenset({"hardware"}),
    ),
}
"""Operators by name; the first form is that of napkin's layers."""


class Operation(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class OperatorTarget(Target):
    """One operator of the table."""

    def __init__(self, name: str, device_type: str) -> None:
        self.operator = OPERATORS[name]
        self.passes = ("forward", "backward", "both")
        self.dimensions = (*self.operator.sizes, *self.operator.optional)
        missing = set() if device_type == "cuda" else set(self.operator.on_gpu_only)
        if device_type != "cuda" or not triton_is_installed():
            missing |= self.operator.with_triton_only
        self.forms = [form for form in self.operator.forms if form not in missing]
        self.shapes, self.sweep = self.operator.shapes, self.operator.sweep

    def whole(self, shape: Shape) -> dict[str, int]:
        """A shape completed with the operator's default sizes for the dimensions that it does not name."""
        return {**self.operator.sizes, **shape}

    def usual_forms(self, shape: Shape, precision: Precision) -> Sequence[str]:
        return self.forms

    def ledger(self, case: Case) -> Ledger:
        with FakeTensorMode():
            form = self.operator.counted_as.get(case.form, case.form)
            subject = self._subject(replace(case, form=form), "cpu", compiled=False)
            return count_passes(subject, case.precision.device_type)

    def subject(self, case: Case) -> Subject:
        """The operator with inputs in the case's format."""
        return self._subject(case, case.precision.device_type, compiled=case.compiled)

    def _subject(self, case: Case, device_type: str, *, compiled: bool) -> Subject:
        form = self.operator.forms[case.form]
        if compiled:
            set_up_compiler()
            form = torch.compile(form, dynamic=False)
        draw = Draw(device_type, case.precision.products_dtype)
        return Subject(Operation(form), self.operator.inputs(case.shape, draw))
