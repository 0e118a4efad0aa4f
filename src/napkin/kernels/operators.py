"""Common parts of all operators: their registration with torch, compiled loops on threads, Triton kernels, autocast.

The threads of a compiled loop are those of torch's own operators, an OpenMP team of GNU's library, where torch is built
with it: between two operators they wait for a moment without sleeping, so that a loop begins on all of them within some
microseconds. Other threads would compete with them for the processor. Elsewhere, and in a process that was forked,
which has no such threads, they are Python's.
"""

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from napkin.errors import NapkinError
from napkin.machine_code.loading import MachineCode

if TYPE_CHECKING:
    from napkin.machine_code.compiled_function import CompiledFunction

COMPUTED = frozenset({torch.float32, torch.bfloat16})
"""The number formats that the compiled kernels read and write."""
KERNELS = MachineCode(
    "napkin.kernels", "napkin: compiling kernels for this machine (once, up to half a minute)", pattern="numba_*.py"
)
FOR_TRAINING = ("attention.numba_rows", "loss.numba_loss", "norms.numba_norms", "pointwise.numba_pointwise")
"""The kernels of a training step, loaded all at once: what is missing is built side by side, with one message."""
FOR_DECODING = ("attention.numba_decode", "products.numba_dense", "sampling.numba_draws")
"""The kernels of generating token by token, likewise."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The formats that Triton kernels compute in."""
LEAST_CAPABILITY = (8, 0)
"""The least compute capability of an NVIDIA GPU: bf16 and asynchronous copies into shared memory begin with Ampere."""

SMALLEST_SHARE = 2**15
"""Numbers of a thread's share from which it is worth having: a team begins within some 5 microseconds, as long as
computing some 25,000 numbers."""
_SMALLEST_SHARE_OF_PYTHON = 2**18
"""The smallest share that is worth a Python thread, which takes some 40 microseconds to wake."""
_LINE = 16
"""float32 of a line of the processor's cache, which two threads should not both write."""

_LIBRARY = torch.library.Library("napkin", "FRAGMENT")
_process = os.getpid()
_buffers = threading.local()
_marked = threading.local()


def operator(
    schema: str, *, fake: Callable[..., Any], triton: str = ""
) -> Callable[[Callable[..., Any]], "RegisteredOperator"]:
    """Decorate the plain form of an operator `torch.ops.napkin.NAME` with that schema, whose arguments have no default
    values; `fake` makes results without computing. `triton` is what computes it where Triton kernels run on its first
    tensor: "FOLDER.MODULE.FUNCTION". Results are never views of arguments."""
    module, _, function = triton.rpartition(".")

    @functools.cache
    def kernel() -> Callable[..., Any]:
        return getattr(import_module(f"napkin.kernels.{module}"), function)

    def decorate(plain: Callable[..., Any]) -> RegisteredOperator:
        def choose(*arguments: Any) -> Any:
            first = arguments[0]
            if not runs_triton(first if isinstance(first, Tensor) else first[0]):
                return plain(*arguments)
            # If a gradient is registered, gradients are disabled here.
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
                raise NapkinError(f"{function} is a Triton kernel without a gradient: use torch.no_grad()")
            return kernel()(*arguments)

        return RegisteredOperator(schema, choose if triton else plain, fake)

    return decorate


class RegisteredOperator:
    """An operator that is registered with torch's dispatcher.

    `torch.library.custom_op` does the same with checks on every call and layers between dispatcher and function: a
    call with a gradient is 87 calls of functions there, half of them for nothing else.
    """

    def __init__(self, schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self._name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._overload: torch._ops.OpOverload = getattr(torch.ops.napkin, self._name).default
        written = [
            place
            for place, argument in enumerate(self._overload._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            compute = _counting_versions(compute, written)
        _LIBRARY.impl(self._name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"napkin::{self._name}", fake, lib=_LIBRARY)

    def __call__(self, *arguments: Any) -> Any:
        return self._overload(*arguments)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Give the operator a gradient, as `torch.library.register_autograd` does; `setup_context(ctx, inputs, output)`
        keeps what `backward(ctx, *gradients)` reads."""
        overload, below = self._overload, torch._C._after_autograd_keyset

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments_and_keys: Any) -> Any:
                *arguments, keys = arguments_and_keys
                with torch._C._AutoDispatchBelowAutograd():
                    output = overload.redispatch(keys & below, *arguments)
                setup_context(ctx, tuple(arguments), output)
                return output

            @staticmethod
            def backward(ctx: Any, *grad_outputs: Any) -> Any:
                gradients = backward(ctx, *grad_outputs)
                return (*gradients, None) if isinstance(gradients, tuple) else (gradients, None)

        Function.__name__ = f"napkin_{self._name}"

        def with_gradient(keys: Any, *arguments: Any) -> Any:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
                return Function.apply(*arguments, keys)
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keys & below, *arguments)

        _LIBRARY.impl(self._name, with_gradient, "Autograd", with_keyset=True)


def _counting_versions(compute: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """`compute`, after which autograd knows that the arguments at those places were overwritten."""

    def compute_and_count(*arguments: Any) -> Any:
        result = compute(*arguments)
        for place in written:
            argument = arguments[place]
            changed = [argument] if isinstance(argument, Tensor) else argument or ()
            torch.autograd.graph.increment_version([each for each in changed if not each.is_inference()])
        return result

    return compute_and_count


def cpu_operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what computes an operator `torch.ops.napkin.NAME` with that schema in compiled loops; `fake` makes
    results without computing. It has no gradient of its own."""
    name = schema.partition("(")[0]

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, compute, "CPU")
        torch.library.register_fake(f"napkin::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.napkin, name).default

    return decorate


def is_computed(*tensors: Tensor) -> bool:
    """True if compiled kernels take those tensors: on a CPU, contiguous, in a format that they read, and not while
    torch.compile traces, which fuses the plain forms by itself."""
    if torch.compiler.is_compiling():
        return False
    return all(x.device.type == "cpu" and x.dtype in COMPUTED and x.is_contiguous() for x in tensors)


def has_numbers(x: Tensor) -> bool:
    """True if Python may ask for a tensor's numbers: not while it is traced, and not of one that has none."""
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta)


def may_be_compiled() -> bool:
    """True if loops may take the place of torch's operators: in inference mode, for tensors that have data."""
    faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return torch.is_inference_mode_enabled() and not faked


def is_unwatched(x: Tensor, other: Tensor) -> bool:
    """True if what computes an operator may be called without torch's dispatcher, which takes as long as a small
    product: in inference mode, for plain tensors on a CPU, while no mode, compiler or profiler sees calls."""
    return (
        torch.is_inference_mode_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and type(x) is type(other) is Tensor
        and x.is_cpu
        and other.is_cpu
    )


def adds_wide_products(total: Tensor) -> bool:
    """True if torch adds products of narrower matrices to that tensor in its own format and in its place: cuBLAS does.

    Fake tensors of a step that is traced for a GPU stand for tensors there.
    """
    if torch.compiler.is_compiling() or torch.version.hip is not None:
        return False
    return total.is_cuda or (isinstance(total, FakeTensor) and getattr(_marked, "traces_cuda", False))


@contextmanager
def tracing_for_cuda() -> Iterator[None]:
    """While it lasts, fake tensors of this thread stand for tensors on a CUDA device."""
    before = getattr(_marked, "traces_cuda", False)
    _marked.traces_cuda = True
    try:
        yield
    finally:
        _marked.traces_cuda = before


def is_bf16(x: Tensor) -> bool:
    """True for the narrower one of the formats that compiled kernels read."""
    return x.dtype == torch.bfloat16


def on_threads(
    kernel: str,
    before: Sequence[Tensor | float | None],
    after: Sequence[float],
    *,
    n_rows: int,
    n_columns: int,
    buffer_size: int = 0,
) -> None:
    """Call kernel(*before, start, stop, *after, address of a buffer) for all of n_rows, divided among threads.

    The kernel is named "FOLDER.MODULE.FUNCTION". It gets tensors as addresses, None as 0, and floats as the bits of the
    nearest float32: its arguments are integers, see `float_argument` in numba_numbers.py. A buffer holds `buffer_size`
    float32, which are what the last call left. Rows have n_columns numbers, from which it follows how many threads are
    worth it.
    """
    loop, first, last = _loaded(kernel), _as_integers(before), _as_integers(after)
    n_threads, n, team = torch.get_num_threads(), 1, None
    if n_threads > 1:
        team = team_of_threads()[0]
        smallest = _SMALLEST_SHARE_OF_PYTHON if team is None else SMALLEST_SHARE
        n = max(min(n_threads, n_rows, n_rows * n_columns // smallest), 1)
    if n == 1:
        loop.call_alone((*first, 0, n_rows, *last, _buffer(buffer_size)))
        return
    size = (buffer_size // _LINE + 2) * _LINE
    buffer = _buffer(n * size)
    parts = list[tuple[int, ...]]()
    for part in range(n):
        rows = n_rows * part // n, n_rows * (part + 1) // n
        parts.append((*first, *rows, *last, buffer + 4 * size * part))
    if team is None:
        on_python_threads(loop, parts)
    else:
        team.run(loop, parts, n_threads)


def on_python_threads(kernel: Callable[..., object], parts: Sequence[tuple[int, ...]]) -> None:
    """Call kernel(*part) for each part, all but the first on threads of this process."""
    # The OpenMP threads of the parent do not exist in a forked process.
    threads = _threads_of(os.getpid(), torch.get_num_threads())
    others = [threads.submit(kernel, *part) for part in parts[1:]]
    kernel(*parts[0])
    for other in others:
        other.result()


@functools.cache
def _loaded(kernel: str) -> "CompiledFunction":
    module, _, function = kernel.rpartition(".")
    KERNELS.load(*next((each for each in (FOR_TRAINING, FOR_DECODING) if module in each), [module]))
    return getattr(import_module(f"napkin.kernels.{module}"), function)


def _as_integers(arguments: Sequence[Tensor | float | None]) -> list[int]:
    # Whole numbers first: asking whether one is a tensor takes longer than all else here.
    return [
        each
        if type(each) is int
        else 0
        if each is None
        else each.data_ptr()
        if isinstance(each, Tensor)
        else struct.unpack("<i", struct.pack("<f", each))[0]
        if isinstance(each, float)
        else int(each)
        for each in arguments
    ]


class Team(NamedTuple):
    """GNU's OpenMP library, as torch has loaded it."""

    parallel: Callable[..., None]
    thread_number: int
    n_threads: int
    barrier: int

    @property
    def functions(self) -> tuple[int, int, int]:
        """The addresses of omp_get_thread_num, omp_get_num_threads and GOMP_barrier."""
        return self.thread_number, self.n_threads, self.barrier

    def run(self, kernel: "CompiledFunction", parts: Sequence[tuple[int, ...]], n_threads: int) -> None:
        """Make the calls, on a team as large as that of torch's operators: it would be made anew for another size."""
        arguments = kernel.of_parts(self.thread_number, self.n_threads, parts)
        self.parallel(kernel.parts_address, arguments, n_threads, 0)


@functools.cache
def _team() -> Team | None:
    try:
        library = ctypes.CDLL(torch._C.__file__)
        parallel, *asked = (
            getattr(library, name)
            for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        )
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return Team(parallel, *(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in asked))


def team_of_threads() -> tuple[Team | None, int]:
    """The team that computes torch's operators, and how many threads it has; None and 1 where this thread is alone."""
    n_threads = torch.get_num_threads()
    team = _team() if n_threads > 1 and os.getpid() == _process else None
    return team, 1 if team is None else n_threads


@functools.cache
def _threads_of(process: int, n: int) -> ThreadPoolExecutor:
    """Threads that are started when they are first needed, at most n, for loops of all sizes."""
    return ThreadPoolExecutor(n)


def _buffer(size: int) -> int:
    if getattr(_buffers, "size", -1) < size:
        # Asking an array for its address takes as long as a short loop.
        _buffers.held = np.empty(size, np.float32)
        _buffers.size, _buffers.address = size, _buffers.held.ctypes.data
    return _buffers.address


@functools.cache
def triton_is_installed() -> bool:
    """True if `import triton` would find something."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on tensors in the host's memory: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(tensor: Tensor) -> bool:
    """True if the Triton form of an operator computes on this tensor's device and dtype: on CUDA and ROCm devices, or
    anywhere in Triton's interpreter.

    Raises NapkinError for bf16 in the interpreter, whose products of bf16 matrices are wrong without a word.
    """
    if tensor.dtype not in DTYPES or not triton_is_installed():
        return False
    if is_interpreted():
        if tensor.dtype == torch.bfloat16:
            raise NapkinError(
                "TRITON_INTERPRET is 1 and a tensor is bf16: Triton's interpreter multiplies bf16 matrices wrongly, "
                "use float32 or float16 there, or a GPU"
            )
        return True
    return tensor.is_cuda and _is_new_enough(tensor.device)


def triton_obstacle(device_type: str) -> str | None:
    """Why no Triton kernel can run on the tensors of this process's device; None if they can."""
    if not triton_is_installed():
        return "triton is not installed: pip install triton"
    if is_interpreted():
        return None
    if device_type != "cuda":
        return "its kernels are for a GPU, and the run is on a CPU"
    if not _is_new_enough(torch.device("cuda", torch.cuda.current_device())):
        return f"the GPU's compute capability is below {'.'.join(map(str, LEAST_CAPABILITY))}"
    return None


@functools.cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def differentiable(x: Tensor, compute: Callable[..., Tensor], differentiate: Callable[..., Tensor]) -> Tensor:
    """compute(x) as a differentiable function, whose gradient is differentiate(gradient, x); only x is kept."""
    return _OfOneTensor.apply(x, compute, differentiate)  # pyright: ignore[reportReturnType]


class _OfOneTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[..., Tensor], differentiate: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.differentiate = differentiate
        return compute(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.differentiate(grad_outputs[0].contiguous(), *ctx.saved_tensors), None, None


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Keep the inputs of an operator for its backward pass."""
    ctx.save_for_backward(*inputs)


def scaled(
    gradients: Sequence[Tensor | None], factor: Tensor, dtypes: Sequence[torch.dtype]
) -> Iterator[Tensor | None]:
    """Gradients that a forward pass has computed times the factor that only the backward pass knows: in place, then
    each in its dtype."""
    pairs = zip(gradients, dtypes, strict=True)
    return (None if gradient is None else gradient.mul_(factor).to(dtype) for gradient, dtype in pairs)


def as_rows(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "row n"]:
    """A 2-D contiguous tensor of all vectors along the last dimension."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the format that autocast gives matrix products; unchanged without autocast."""
    dtype = _autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def dtype_of_product(first: Tensor, second: Tensor) -> torch.dtype:
    """The dtype in which two tensors are multiplied: autocast's, or the one that holds both."""
    return _autocast_dtype(first.device.type) or torch.promote_types(first.dtype, second.dtype)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def early_gradient() -> AbstractContextManager[None]:
    """While it lasts, what this thread computes belongs to the backward pass: a gradient that an operator computes in
    its forward pass is marked so. Compiled code is not marked."""
    return nullcontext() if torch.compiler.is_compiling() else _marking()


def computes_early_gradient() -> bool:
    """True if this thread is in an `early_gradient` context."""
    return getattr(_marked, "depth", 0) > 0


@contextmanager
def _marking() -> Iterator[None]:
    _marked.depth = getattr(_marked, "depth", 0) + 1
    try:
        yield
    finally:
        _marked.depth -= 1
