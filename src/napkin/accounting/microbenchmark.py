"""Time a step's operators: each distinct call is run alone, on this machine, on tensors of its shapes.

A roofline knows matrix products and bytes. It does not know that an exponential, a change of number format or a
non-contiguous stride costs many times as much as a copy. On the machine that will train, measuring is more accurate.

Operators whose result depends on data that fake tensors do not have, such as a router's, are called on equal shares
(below).
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import FrameType
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from napkin.accounting.fake_results import KnownCall, call_on_fakes
from napkin.accounting.ledger import Ledger, Row
from napkin.hardware.competition import Sample, Sampler, agree
from napkin.tensors import random_state_kept

REPEATS = 3
MOST_REPEATS, MOST_SECONDS = 15, 0.5
_MOST_DRAWN = 2**20
"""Samples of one call, and seconds of all of them, until the fastest agree, where other processes disturb them."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments, tensors by shape, strides and dtype alone: equal calls take equal time."""

    operator: Any
    arguments: Hashable
    keywords: Hashable


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def call_of(operator: Any, args: tuple, kwargs: dict) -> Call | None:
    """The call, to be repeated; None if an argument is not a plain value, such as a random generator, or if numbers in
    a tensor have to add up to the size of the result."""
    if getattr(operator, "overloadpacket", None) is torch.ops.aten.repeat_interleave:
        return None
    try:
        call = Call(operator, _freeze(args), _freeze(tuple(kwargs.items())))
        hash(call)
    except TypeError:
        return None
    return call


def time_operators(
    ledger: Ledger,
    expected: Callable[[Row], float],
    *,
    device_type: str = "cpu",
    max_bytes: int = 2**62,
    max_seconds: float = 20.0,
    known: Mapping[Hashable, float] | None = None,
    sampler: Sampler | None = None,
) -> Mapping[Hashable, float]:
    """Seconds of each distinct call of a ledger, the median of three runs after a warm-up; on a busy machine, an
    estimate from more runs of what it would take without the other processes.

    The calls that are `expected` to take the most time in total come first. Those that are left after `max_seconds` are
    omitted, as are calls whose tensors exceed `max_bytes`. Calls in `known` are not run again, but are in the result.
    `sampler` is one that is already in use; None starts one. The global random state is unchanged.
    """
    if sampler is None:
        with Sampler(device_type) as own:
            return time_operators(
                ledger,
                expected,
                device_type=device_type,
                max_bytes=max_bytes,
                max_seconds=max_seconds,
                known=known,
                sampler=own,
            )
    weights: Counter[Hashable] = Counter()
    sizes: dict[Hashable, int] = {}
    for row in ledger.rows:
        if row.call is not None and row.bytes_read + row.bytes_written:
            weights[row.call] += int(1e9 * expected(row))
            sizes[row.call] = row.bytes_read + row.bytes_written
    generator = torch.Generator().manual_seed(0)
    samples: dict[Hashable, list[Sample]] = {}
    done = known or {}
    # Where other processes run, this is the processor time of this thread. Neither clock includes the compilation of a
    # first call.
    begin, compiling = time.thread_time(), 0.0
    with torch.no_grad(), random_state_kept(device_type):
        for call, _ in weights.most_common():
            if time.thread_time() - begin - compiling > max_seconds:
                break
            if call not in done and sizes[call] <= max_bytes and isinstance(call, Call):
                first, samples[call] = _time(call, generator, device_type, sampler)
                compiling += max(0.0, first.processor - samples[call][0].processor)
    return {**done, **{call: sampler.seconds(taken) for call, taken in samples.items()}}


def make_arguments(call: Call, generator: torch.Generator, device_type: str) -> tuple[list[Any], dict[str, Any]]:
    """New tensors of the layouts of a call, and all its other arguments."""
    args = _thaw(call.arguments, generator, device_type)
    return args, dict(_thaw(call.keywords, generator, device_type))


def _time(call: Call, generator: torch.Generator, device_type: str, sampler: Sampler) -> tuple[Sample, list[Sample]]:
    """The first call, which warms up, and those that count."""
    args, kwargs = make_arguments(call, generator, device_type)

    def run() -> Any:
        return call.operator(*args, **kwargs)

    first = sampler.sample(run)
    begin = time.perf_counter()
    taken = [sampler.sample(run) for _ in range(REPEATS)]
    while (
        sampler.busy
        and not agree(sampler.undisturbed(taken))
        and len(taken) < MOST_REPEATS
        and time.perf_counter() - begin < MOST_SECONDS
    ):
        taken.append(sampler.sample(run))
    return first, taken


def _freeze(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _TensorLayout(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, torch.Generator):
        raise TypeError("a generator is not a plain value: repeating the call would draw from it")
    return tuple(map(_freeze, value)) if isinstance(value, (tuple, list)) else value


def _thaw(value: Any, generator: torch.Generator, device_type: str) -> Any:
    if isinstance(value, _TensorLayout):
        return _make(value, generator).to(device_type)
    return [_thaw(item, generator, device_type) for item in value] if isinstance(value, tuple) else value


def _make(layout: _TensorLayout, generator: torch.Generator) -> Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    is_float = layout.dtype.is_floating_point
    # torch draws no numbers in formats of eight bits, but casts to them.
    drawn_in = torch.float32 if is_float and layout.dtype.itemsize == 1 else layout.dtype
    numel = max(reach + 1, 0)
    # Numbers around 1 overflow in no operator, and 0 is a valid index into every table. Drawing takes longer than most
    # calls, so that large tensors repeat what was drawn.
    pattern = torch.empty(min(numel, _MOST_DRAWN), dtype=drawn_in)
    pattern = pattern.uniform_(0.5, 1.5, generator=generator) if is_float else pattern.zero_()
    filled = pattern.to(layout.dtype)
    if numel > _MOST_DRAWN:
        filled = filled.repeat(-(-numel // _MOST_DRAWN))
    return filled.as_strided(layout.shape, layout.strides)


# A router distributes tokens among n experts by `topk` or `argmax`; masks and `nonzero` find the tokens of each expert.
# How many these are depends on data: here every expert gets equally many. So the indices of a `topk` over n numbers are
# followed through comparisons, one-hot masks and sums, and a mask that is true in 1 of n places has numel / n of them.
# Where a router counts the tokens of each expert and reads the counts, as ranks that divide experts do before they send
# each other tokens, these are equal too, on every rank.

aten = torch.ops.aten

EVEN_ROUTING = "routed tokens are distributed evenly among the experts"

# The numbers that these modules get from fake tensors, which have none. torch's GradScaler asks whether a gradient
# overflowed, which in an ordinary step none does; LossScale asks whether all gradients are finite; Adafactor asks for
# norms, which it only multiplies by; the stages of a pipeline ask each other whether all know the shapes they receive.
_ANSWERS = {
    "torch.amp.grad_scaler": 0.0,
    "torch.optim._adafactor": 1.0,
    "napkin.optim.clipping": 1.0,
    "torch.distributed.pipelining.schedules": 1.0,
}

LONGEST = 32
"""Steps of a sequence that are enough to ask a recurrent layer for the size of its workspace."""

_COPIES = frozenset({aten._to_copy, aten.clone, aten.index, aten.index_select, aten._unsafe_view})
_JOINS = frozenset({aten.cat, aten.stack})
_SENT = frozenset({"all_to_all_single", "wait_tensor"})
"""Operators of torch.distributed whose result has the numbers of other ranks, which route alike."""
_ABOVE = frozenset({aten.gt, aten.ne, aten.ge})
_WITH_MASKS = frozenset({aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put})
_PRODUCTS_INTO = frozenset({aten.mm.out, aten.bmm.out, aten.addmm.out, aten.baddbmm.out})


def _is_written(args: tuple, kwargs: dict) -> bool:
    """True if a product's result is a fake tensor of the right shape already."""
    one, other, out = args[-2], args[-1], kwargs.get("out")
    return isinstance(out, FakeTensor) and out.shape == (*one.shape[:-1], other.shape[-1])


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class FakeCalls:
    """Calls operators, and follows what is known of the values of their results, storage by storage."""

    def __init__(self, number_of: Callable[[Tensor], int | None]) -> None:
        self.number_of = number_of
        self.routes = False
        """True once an even distribution was assumed."""
        self.known: KnownCall | None = None
        """What is known about the last call."""
        self._choices: dict[int | None, int] = {}  # storage of indices -> how many values they are chosen from
        self._density: dict[int | None, float] = {}  # storage of a mask -> fraction of it that is not zero
        self._counts: dict[int | None, Fraction] = {}  # storage of counts of tokens -> what each of them is

    def __call__(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        """Call it. Raises what torch raises where the values are not known."""
        self.known = None
        if operator.overloadpacket is aten._grouped_mm and _is_fake_and_wide(args):
            return _grouped_mm(*args, **kwargs)
        if operator.overloadpacket is aten.mkldnn_rnn_layer and isinstance(args[0], FakeTensor):
            return _with_workspace(operator, args, operator(*args, **kwargs))
        if operator.namespace == "c10d":
            return _with_tensors_held(args, operator(*args, **kwargs))
        if operator.overloadpacket.__name__ == "wait_tensor" and isinstance(args[0], FakeTensor):
            # A rank waits for the tensor that it has; the operator's fake form makes another one.
            return args[0]
        if operator in _PRODUCTS_INTO and _is_written(args, kwargs):
            # Programs of torch.compile call these; their fake form takes a dozen other operators.
            return kwargs["out"]
        try:
            result, self.known = call_on_fakes(operator, args, kwargs)
            return result
        except DataDependentOutputException:
            count = self._even_count(args[0])
            if count is not None:
                self.routes = True
                return count
            for module_name, answer in _ANSWERS.items():
                if runs_in(module_name):
                    return answer
            raise
        except DynamicOutputShapeException:
            answer = self._even(operator, args, kwargs)
            if answer is None:
                raise
            self.routes = True
            return answer

    def follow(self, operator: Any, args: tuple, outputs: list[Tensor]) -> None:
        """Note what the call says of the values of its results."""
        packet = operator.overloadpacket
        if packet.__name__ == "alltoall_base_":
            # It writes into its first argument what other ranks have in the second.
            self._copied(self.number_of(args[1]), self.number_of(args[0]))
        elif packet is aten.topk or packet is aten.argmax:
            dim = args[2 if packet is aten.topk else 1] if len(args) > (2 if packet is aten.topk else 1) else -1
            self._choices[self.number_of(outputs[-1])] = args[0].shape[-1 if dim is None else dim]
        elif not (self._choices or self._density) or not args or not outputs:
            return
        elif packet in _JOINS:
            self._join(args[0], outputs[0])
        elif isinstance(args[0], Tensor):
            self._derive(operator, args, self.number_of(args[0]), outputs[0])

    def _derive(self, operator: Any, args: tuple, source: int | None, output: Tensor) -> None:
        packet, number = operator.overloadpacket, self.number_of(output)
        if packet is aten.eq and source in self._choices:
            self._density[number] = 1 / self._choices[source]
        elif packet in (aten.scatter, aten.scatter_) and self._is_choice(args[2]) and not isinstance(args[3], Tensor):
            self._density[number] = args[2].numel() / args[0].numel()
        elif packet in (aten.scatter_add, aten.scatter_add_) and self._is_choice(args[2]):
            # Whole numbers that are added up where tokens go count them.
            if not args[3].is_floating_point():
                self._counts[number] = Fraction(args[2].numel(), args[0].numel())
        elif packet is aten.sum and source in self._counts:
            self._counts[number] = self._counts[source] * args[0].numel() / max(1, output.numel())
        elif packet in (aten.sum, aten.any) and source in self._density:
            self._density[number] = min(1.0, self._density[source] * args[0].numel() / max(1, output.numel()))
        elif packet in _ABOVE and source in self._density and args[1] in (0, 1):
            self._density[number] = self._density[source]
        elif (packet in _COPIES or _is_sent(operator)) and number != source:
            self._copied(source, number)

    def _copied(self, source: int | None, number: int | None) -> None:
        tables: tuple[Any, ...] = (self._choices, self._density, self._counts)
        for known in tables:
            if source in known:
                known[number] = known[source]

    def _join(self, parts: Any, output: Tensor) -> None:
        counts = {self._counts.get(self.number_of(part)) for part in parts}
        count = counts.pop() if len(counts) == 1 else None
        if count is not None:
            self._counts[self.number_of(output)] = count

    def _even_count(self, tensor: Any) -> int | None:
        """The number of a tensor that is read, of counts of routed tokens; counts in a row add up to all tokens."""
        count = self._counts.get(self.number_of(tensor)) if isinstance(tensor, FakeTensor) else None
        if count is None or tensor.is_floating_point():
            return None
        place = tensor.storage_offset()
        return int((place + 1) * count) - int(place * count)

    def _is_choice(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.number_of(value) in self._choices

    def _even(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        packet = operator.overloadpacket
        if packet is aten.nonzero:
            return self._nonzero(args[0])
        if packet not in _WITH_MASKS:
            return None
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype == torch.bool:
                places = self._nonzero(index)
                if places is None:
                    return None
                indices += places.unbind(1)
            else:
                indices.append(index)
        return operator(args[0], indices, *args[2:], **kwargs)

    def _nonzero(self, mask: Tensor) -> Tensor | None:
        density = self._density.get(self.number_of(mask))
        if density is None or not isinstance(mask, FakeTensor):
            return None
        rows = round(density * mask.numel())
        if rows == mask.numel() and mask.dim() == 1:
            # All of them: their places are known, and may be read.
            with _disable_current_modes():
                places = torch.arange(rows).unsqueeze(1)
            return mask.fake_mode.fake_tensor_converter.from_real_tensor(mask.fake_mode, places, make_constant=True)
        return mask.new_empty((rows, mask.dim()), dtype=torch.int64)


def _is_sent(operator: Any) -> bool:
    return operator.namespace == "_c10d_functional" and operator.overloadpacket.__name__ in _SENT


def _with_tensors_held(args: tuple, result: Any) -> Any:
    """The result of a collective, with work that holds the tensors until it is dropped, as that of gloo and NCCL does.

    That of torch's fake process group does not, and has no future, which DDP asks for.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    if not tensors or not isinstance(tensors[0], FakeTensor) or result is None:
        return result
    from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]

    future: Any = torch.futures.Future()
    future.set_result(tensors)
    work = _create_work_from_future(future).boxed()
    return (*result[:-1], work) if isinstance(result, tuple) else work


def _is_fake_and_wide(args: tuple) -> bool:
    # torch's own rule for the shape of the result refuses all formats but bf16; its CPU kernel does not.
    return isinstance(args[0], FakeTensor) and args[0].dtype != torch.bfloat16


def _grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """An empty result: rows are padded to 16 bytes, as torch allocates them."""
    *batch, rows = left.shape[:-1]
    if left.dim() == right.dim() == 2:
        assert offs is not None
        batch = [offs.numel()]
    elif left.dim() == 3 and right.dim() == 2:
        batch = []
    columns, dtype = right.shape[-1], out_dtype or left.dtype
    of_16_bytes = 16 // dtype.itemsize
    padded = -(-columns // of_16_bytes) * of_16_bytes
    strides = [padded, 1] if not batch else [rows * padded, padded, 1]
    return torch.empty_strided([*batch, rows, columns], strides, dtype=dtype, device=left.device)


def _with_workspace(operator: Any, args: tuple, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a recurrent layer, the last of which is kept for the backward pass.

    torch takes it to be empty; the library says how large it is, and a short sequence is enough to ask for it.
    """
    *others, workspace = results
    if not torch.is_grad_enabled():
        return results
    steps = args[0].shape[0]
    if steps <= LONGEST:
        size = _workspace_size(operator, args, steps)
    else:
        half, whole = (_workspace_size(operator, args, length) for length in (LONGEST // 2, LONGEST))
        size = half + (whole - half) * (steps - LONGEST // 2) // (LONGEST // 2)
    return (*others, workspace.new_empty(size) if size > workspace.numel() else workspace)


def _workspace_size(operator: Any, args: tuple, steps: int) -> int:
    # The library keeps a workspace where gradients are enabled. The sequence runs along the first dimension.
    with _disable_current_modes(), torch.enable_grad():
        made = [torch.zeros((steps, *args[0].shape[1:]), dtype=args[0].dtype)]
        made += [torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, Tensor) else arg for arg in args[1:]]
        return operator(*made)[-1].numel()


def runs_in(module_name: str) -> bool:
    """True if a function of that module is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module_name:
        frame = frame.f_back
    return frame is not None
