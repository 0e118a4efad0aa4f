"""Call operators on fake tensors, also those whose result depends on data that fake tensors do not have.

A router distributes tokens among n experts by `topk` or `argmax`; masks and `nonzero` find the tokens of each expert.
How many these are depends on data: here every expert gets equally many. So the indices of a `topk` over n numbers are
followed through comparisons, one-hot masks and sums, and a mask that is true in 1 of n places has numel / n of them.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

EVEN_ROUTING = "routed tokens are distributed evenly among the experts"

# The numbers that these modules get from fake tensors, which have none. torch's GradScaler asks whether a gradient
# overflowed, which in an ordinary step none does; LossScale asks whether all gradients are finite; Adafactor asks for
# norms, which it only multiplies by; the stages of a pipeline ask each other whether all know the shapes they receive.
_ANSWERS = {
    "torch.amp.grad_scaler": 0.0,
    "torch.optim._adafactor": 1.0,
    "napkin.optim.loss_scale": 1.0,
    "torch.distributed.pipelining.schedules": 1.0,
}

LONGEST = 32
"""Steps of a sequence that are enough to ask a recurrent layer for the size of its workspace."""

_COPIES = frozenset({aten._to_copy, aten.clone, aten.index, aten.index_select, aten._unsafe_view, aten.cat})
_ABOVE = frozenset({aten.gt, aten.ne, aten.ge})
_WITH_MASKS = frozenset({aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put})


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class FakeCalls:
    """Calls operators, and follows what is known of the values of their results, storage by storage."""

    def __init__(self, number_of: Callable[[Tensor], int | None]) -> None:
        self.number_of = number_of
        """The number of a tensor's storage."""
        self.routes = False
        """Whether an even distribution was assumed."""
        self._choices: dict[int | None, int] = {}  # storage of indices -> how many values they are chosen from
        self._density: dict[int | None, float] = {}  # storage of a mask -> fraction of it that is not zero

    def __call__(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        """Call it. Raises what torch raises where nothing is known of the values."""
        if operator.overloadpacket is aten._grouped_mm and _is_fake_and_wide(args):
            return _grouped_mm(*args, **kwargs)
        if operator.overloadpacket is aten.mkldnn_rnn_layer and isinstance(args[0], FakeTensor):
            return _with_workspace(operator, args, operator(*args, **kwargs))
        if operator.namespace == "c10d":
            return _with_tensors_held(args, operator(*args, **kwargs))
        try:
            return operator(*args, **kwargs)
        except DataDependentOutputException:
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
        if packet is aten.topk or packet is aten.argmax:
            dim = args[2 if packet is aten.topk else 1] if len(args) > (2 if packet is aten.topk else 1) else -1
            self._choices[self.number_of(outputs[-1])] = args[0].shape[-1 if dim is None else dim]
        elif not (self._choices or self._density) or not args or not isinstance(args[0], Tensor) or not outputs:
            return
        else:
            self._derive(packet, args, self.number_of(args[0]), outputs[0])

    def _derive(self, packet: Any, args: tuple, source: int | None, output: Tensor) -> None:
        number = self.number_of(output)
        if packet is aten.eq and source in self._choices:
            self._density[number] = 1 / self._choices[source]
        elif packet in (aten.scatter, aten.scatter_) and self._is_choice(args[2]) and not isinstance(args[3], Tensor):
            self._density[number] = args[2].numel() / args[0].numel()
        elif packet in (aten.sum, aten.any) and source in self._density:
            self._density[number] = min(1.0, self._density[source] * args[0].numel() / max(1, output.numel()))
        elif packet in _ABOVE and source in self._density and args[1] in (0, 1):
            self._density[number] = self._density[source]
        elif packet in _COPIES and number != source:
            if source in self._choices:
                self._choices[number] = self._choices[source]
            if source in self._density:
                self._density[number] = self._density[source]

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


def _with_tensors_held(args: tuple, result: Any) -> Any:
    """The result of a collective, with work that holds the tensors until it is dropped, as that of gloo and NCCL does.

    That of torch's fake process group does not, and has no future, which DDP asks for.
    """
    held = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    if not held or not isinstance(held[0], FakeTensor) or result is None:
        return result
    from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]

    future: Any = torch.futures.Future()
    future.set_result(held)
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
    """Whether a function of that module is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module_name:
        frame = frame.f_back
    return frame is not None
