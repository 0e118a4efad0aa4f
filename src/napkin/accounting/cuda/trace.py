"""Trace a CUDA step on fake CPU tensors: where torch behaves differently on CUDA, the trace does what CUDA does.

Fake CUDA tensors abort a CPU build of torch as soon as autograd is involved. So the tensors stay on the CPU, and six
things are changed for fake tensors while a step is traced: the kernel of scaled_dot_product_attention, fused dropout,
fused root-mean-square normalisation, the operators that autocast runs in fp32, the foreach implementation, which
torch's optimizers and its clipping use by default, and what napkin's own kernels take a tensor's device for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import RLock, get_ident
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from napkin.accounting.cuda.attention import AttentionCall, attend_on_cuda
from napkin.hardware.target import CudaTarget
from napkin.kernels.operators import tracing_for_cuda

aten = torch.ops.aten


@contextmanager
def as_on_cuda(target: CudaTarget) -> Iterator[None]:
    """Let operators on fake CPU tensors do what they do on `target` in this context; real tensors are not affected.

    `torch.autocast("cuda")` acts on fake CPU tensors too, even without a GPU. Not changed, and so as on a CPU: in
    autocast, products of a matrix and a vector and the widening of mixed formats (index_put, scatter_add); recurrent
    layers; the kernels of convolutions.
    """
    on_cuda = {"scaled_dot_product_attention": _attention(target), "dropout": _dropout, "rms_norm": _rms_norm}
    # All threads have one dispatcher.
    with _ONE_AT_A_TIME, _library() as library:
        for name, implementation in on_cuda.items():
            library.impl(name, _on_fakes(getattr(aten, name).default, implementation), "AutogradCPU")
        for name in _FP32 + _FP32_UNLESS_TOLD:
            if name == "rms_norm" and not target.rms_norm_in_fp32:
                continue
            library.impl(name, _in_fp32(name), "AutocastCPU")
        with _autocast_on_cpu(), _foreach_by_default(), tracing_for_cuda():
            yield


@contextmanager
def _library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("aten", "IMPL")
    try:
        yield library
    finally:
        library._destroy()


def _on_fakes(operator: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    # Other threads may be computing on real tensors.
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (implementation if _is_fake(first) else operator.decompose)(first, *args, **kwargs)

    return run


def _is_fake(value: Any) -> bool:
    """True for fake tensors, DTensors of them, and what AOTAutograd wraps them in while torch.compile traces."""
    return isinstance(value, (FakeTensor, FunctionalTensor)) or isinstance(
        getattr(value, "_local_tensor", None), FakeTensor
    )


def _attention(target: CudaTarget) -> Callable[..., Tensor]:
    # The dispatcher passes arguments by the operator's own names.
    @no_type_check
    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attend_on_cuda(call, target)

    return attend


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    # CUDA keeps a mask of one byte per number, a CPU the factors themselves.
    fused = train and 0 < p < 1 and input.numel() > 0
    return aten.native_dropout(input, p, True)[0] if fused else aten.dropout.default.decompose(input, p, train)


def _rms_norm(input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return aten.rms_norm.default.decompose(input, shape, weight, eps)
    return _FusedRMSNorm.apply(input, shape, weight, eps)  # pyright: ignore[reportReturnType]


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's fused operator, forward and backward; a CPU decomposes it before autograd sees it."""

    @staticmethod
    @no_type_check
    def forward(ctx, input, shape, weight, eps):
        with torch._C._AutoDispatchBelowAutograd():
            normed, inverse_rms = aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, inverse_rms, weight)
        ctx.shape = shape
        return normed

    @staticmethod
    @no_type_check
    def backward(ctx, gradient):
        input, inverse_rms, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        gradients = aten._fused_rms_norm_backward(gradient, input, ctx.shape, inverse_rms, weight, wanted)
        return gradients[0], None, gradients[1], None


def _in_fp32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")

    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if any(map(_is_fake, (first, *args))):
                if name in _FP32:
                    first, args = _wide(first), tuple(_wide(value) for value in args)
                    kwargs = {key: _wide(value) for key, value in kwargs.items()}
                elif kwargs.get("dtype") is None and len(args) < _POSITION_OF_DTYPE.get(name, 9) and _is_narrow(first):
                    kwargs["dtype"] = torch.float32
            return operator(first, *args, **kwargs)

    return run


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and _is_narrow(value) else value


def _is_narrow(value: Tensor) -> bool:
    return value.dtype in (torch.float16, torch.bfloat16)


@contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    # Without a GPU torch.autocast("cuda") warns and does nothing, and it never acts on CPU tensors.
    original, thread = torch.autocast.__init__, get_ident()

    def on_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and get_ident() == thread:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    with _swapped(torch.autocast, "__init__", on_cpu):
        yield


@contextmanager
def _foreach_by_default() -> Iterator[None]:
    # By default torch uses foreach for parameters on CUDA whose types it knows.
    optimizers, functions = (import_module(name) for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"))
    original, thread = functions._get_foreach_kernels_supported_devices, get_ident()

    def devices() -> list[str]:
        return [*original(), "cpu"] if get_ident() == thread else original()

    with (
        _swapped(optimizers, "_get_foreach_kernels_supported_devices", devices),
        _swapped(optimizers, "_foreach_supported_types", [*optimizers._foreach_supported_types, FakeTensor]),
        _swapped(functions, "_foreach_supported_types", [*functions._foreach_supported_types, FakeTensor]),
    ):
        yield


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_ONE_AT_A_TIME = RLock()

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# From aten/src/ATen/autocast_mode.h: what autocast runs in fp32 on CUDA but not on a CPU.
_FP32 = (
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "exp", "expm1", "log", "log2", "log10", "log1p"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "reciprocal", "rsqrt", "softplus", "logsumexp"),
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "cosine_similarity", "dist", "pdist", "renorm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim"),
)
_FP32_UNLESS_TOLD = (
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
# Operators that take dtype by position too: its position, without the first argument.
_POSITION_OF_DTYPE = {"softmax.int": 2, "log_softmax.int": 2}
