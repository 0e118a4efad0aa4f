"""The shared parts of optimizers: fp32 state, a step counter, buckets, implementations of one rule, parameter groups.

State may be held in the host's memory, and is then copied to the GPU and back bucket by bucket: after "ZeRO-Offload"
(Ren et al. 2021), which updates on the CPU; here the GPU computes, and the link carries the state both ways.
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.optim.narrow_copies import NarrowCopies, StochasticRounding
from napkin.optim.saved_state import (
    TorchTwin,
    check_tensors,
    full_tensor,
    in_our_terms,
    is_sharded,
    local,
    part_like,
    sharded_like,
)


# An operator of its own, so that the accountant sees that the copy takes none of the device's memory.
@torch.library.custom_op("napkin::host_copy", mutates_args=())
def host_copy(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, page-locked if the tensor is on a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


@host_copy.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


Group = dict[str, Any]
Parameters = Iterable[Tensor] | Iterable[Group]


class Form(TypedDict, total=False):
    """The options that choose an implementation of the rule: see `Optimizer`."""

    foreach: bool
    fused: bool


_BUCKET_NUMEL = 2**20
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class UpdateRule:
    """One update rule in up to three implementations with the same numbers.

    `reference(parameter, gradient, *state, group)` is the rule as one would write it, for one tensor, and the
    specification of the others. `foreach` takes lists in place of tensors and does each operation once for all of
    them: on a GPU one launch instead of one per tensor. `fused` passes the same lists to torch's own kernel, which
    reads and writes each number once; it is None if torch has no kernel.

    `copying(parameters, gradients, *state, copies, factor, group)` is a kernel for lists that also writes the updated
    parameters in the formats of `copies`, and multiplies gradients by `factor`, one number on their device or None; it
    is None if there is no such kernel.

    All change parameter and state in place, and leave the gradient unchanged.
    """

    reference: Callable[..., None]
    foreach: Callable[..., None]
    fused: Callable[..., None] | None = None
    copying: Callable[..., None] | None = None

    def update(self, implementation: str, *lists: Any) -> None:
        """Run the implementation of that name on lists; "fused" is foreach if there is no kernel."""
        if implementation != "reference":
            (self.fused if implementation == "fused" and self.fused else self.foreach)(*lists)
            return
        *tensors, group = lists
        for one in zip(*tensors, strict=True):
            self.reference(*one, group)


class Optimizer(torch.optim.Optimizer):
    """The base of napkin's optimizers.

    State: `state[parameter]` holds tensors, fp32 whatever the parameter's dtype, because a bf16 average stops moving
    once its updates fall below its resolution. They are allocated at the first step with a gradient. `group["step"]` is
    the number of steps taken, a Python int: exact after a restart, stored with the group's other numbers, and read
    without waiting for a GPU. It counts for the whole group; a step skips parameters without a gradient.

    A step works in buckets: as many whole tensors as hold 2^20 numbers together, or one that is larger.
    Temporary memory is that of one bucket: 4 bytes per number if the rule needs an intermediate result, and 8 more
    to widen parameters and gradients narrower than fp32; the fp32 result is then rounded once into the parameter.

    `foreach=False` selects the reference implementation, `fused=True` torch's kernel: see `UpdateRule`.

    The learning rate is read from `group["lr"]` at each step, where a schedule writes it.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """The state's tensors, each in the parameter's shape."""

    rule: ClassVar[UpdateRule]

    twin: ClassVar[TorchTwin | None] = None
    """torch's optimizer of the same rule, whose state can be loaded."""

    def __init__(self, params: Parameters, defaults: Group, *, foreach: bool = True, fused: bool = False) -> None:
        if fused and self.rule.fused is None:
            raise NapkinError(f"fused is True, but there is no fused kernel for {type(self).__name__}: leave it out")
        super().__init__(params, {**defaults, "step": 0})
        for group in self.param_groups:
            _check_settings(group)
        self.implementation = "fused" if fused else "foreach" if foreach else "reference"
        self.rounding: StochasticRounding | None = None
        """Rounding of the updates of parameters narrower than fp32; None is to the nearest."""
        self.state_on_host = False
        """True if state allocated from now on is held in the host's memory, page-locked, and copied to the GPU to be
        updated."""
        self.narrow_copies: NarrowCopies | None = None
        """Copies of parameters that the update writes, if its rule has a kernel for that."""
        self.gradient_factor: Tensor | None = None
        """The number that the next step multiplies its gradients by."""
        self.own: Collection[Tensor] | None = None
        """The parameters that this process updates and whose state it keeps; None is all."""

    @classmethod
    def for_model(cls, model: nn.Module, *, weight_decay: float, products: torch.dtype, **settings: Any) -> "Optimizer":
        """The optimizer of a model's parameters, in the groups that suit it.

        `products` is the dtype of matrix products, for a rule that has some.
        """
        return cls(decay_groups(model, weight_decay), **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; with a closure, call it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            self.update_group([p for p in self._own_in(group) if p.grad is not None], group)
        self.gradient_factor = None
        return loss

    def update_group(self, parameters: list[Tensor], group: Group) -> None:
        """Apply the rule to `parameters`, those of a group that have a gradient."""
        if (copies := self.narrow_copies) is not None and self.rule.copying is not None and not self.state_on_host:
            # The kernel needs no temporary memory: one launch serves all matrices.
            if copied := [p for p in parameters if p in copies]:
                self.apply(self.rule, copied, group)
            parameters = [p for p in parameters if p not in copies]
        for bucket in buckets(parameters):
            self.apply(self.rule, bucket, group)

    def apply(self, rule: UpdateRule, parameters: list[Tensor], group: Group, *, whole: bool = False) -> None:
        """Apply one rule to one bucket, in fp32; of sharded tensors, to the local parts.

        For a rule that needs `whole` tensors, sharded ones are gathered, and the local part of the result is kept.
        """
        # A model of a few million numbers is updated in a millisecond: work per tensor counts.
        states = [list(self.state_in(group, p).values()) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        at_hand, divided = parameters, parameters
        sharded = any(map(is_sharded, parameters))
        whole = whole and sharded
        if sharded:
            seen = full_tensor if whole else local
            states = [list(map(local, state)) for state in states]
            gradients = list(map(seen, gradients))
            parameters, at_hand = list(map(local, parameters)), list(map(seen, parameters))
        # Tensors that are already wide are not copied: in fp32 these are the parameters and gradients themselves.
        narrow = any(p.dtype not in _WIDE for p in at_hand)
        wide = [p.to(wide_dtype(p)) for p in at_hand] if narrow else at_hand
        if any(gradient.dtype != w.dtype for gradient, w in zip(gradients, wide, strict=True)):
            gradients = [gradient.to(w.dtype) for gradient, w in zip(gradients, wide, strict=True)]
        on_device = states
        if self.state_on_host:
            # The pages are locked, so the copies are queued, and the update after them.
            device = parameters[0].device
            on_device = [[torch.empty_like(t, device=device).copy_(t, non_blocking=True) for t in s] for s in states]
        tensors = list(zip(wide, gradients, *zip(*on_device, strict=True), strict=True))
        factor = self.gradient_factor
        if (copies := self.narrow_copies) is not None and rule.copying is not None:
            if copied := [each for each in tensors if each[0] in copies]:
                lists = map(list, zip(*copied, strict=True))
                matrices = [each[0] for each in copied]
                rule.copying(*lists, [copies.to_overwrite(matrix) for matrix in matrices], factor, group)
                for matrix in matrices:
                    copies.overwritten(matrix)
            tensors = [each for each in tensors if each[0] not in copies]
        if factor is not None and tensors:
            torch._foreach_mul_([gradient for _, gradient, *_ in tensors], factor)
        if tensors:
            rule.update(self.implementation, *map(list, zip(*tensors, strict=True)), group)
        if self.state_on_host:
            for tensor, value in zip(chain(*states), chain(*on_device), strict=True):
                tensor.copy_(value, non_blocking=True)
        if whole:
            wide = list(map(part_like, divided, wide))
        if narrow and self.rounding is not None:
            self.rounding(parameters, wide)
        elif narrow or whole:
            torch._foreach_copy_(parameters, wide)

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """A parameter's state before its first step: zeros."""
        return {name: zeros_wide(parameter) for name in self.state_names}

    def state_in(self, group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state, allocated if there is none yet."""
        state = self.state[parameter]
        if not state:
            state |= self._stored(self.new_state(parameter, group))
        return state

    def all_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of every parameter that is updated here, allocated if there is none yet: what a checkpoint
        holds."""
        return {p: self.state_in(group, p) for group in self.param_groups for p in self._own_in(group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and settings of another optimizer over the same parameters, in the same order.

        It may be torch's optimizer of the same rule: training continues as it would there. Settings that torch's does
        not have are unchanged. Raises NapkinError for the state of another rule or of other parameters, and changes
        nothing then.
        """
        name = type(self).__name__
        ours = in_our_terms(state_dict, self.param_groups, self.twin, name)
        saved: dict[int, dict[str, Tensor]] = ours["state"]
        # Groups number the parameters as they like.
        places = dict(
            pair
            for own, group in zip(self.param_groups, ours["param_groups"], strict=True)
            for pair in zip(group["params"], ((p, own) for p in own["params"]), strict=True)
        )
        states: dict[Tensor, dict[str, Tensor]] = {}
        for index in saved:
            p, group = places[index]
            expected = self.new_state(p, group)
            check_tensors(index, saved[index], expected, name)
            # In the order in which our rules take them.
            states[p] = {key: saved[index][key].to(p.device, wide_dtype(p), copy=True) for key in expected}
        for group in ours["param_groups"]:
            _check_settings(group)
        # The base class would cast the state to the parameters' dtypes.
        super().load_state_dict({"state": {}, "param_groups": ours["param_groups"]})
        self.state.update({p: self._stored(state) for p, state in states.items() if self.own is None or p in self.own})

    def _own_in(self, group: Group) -> list[Tensor]:
        return [p for p in group["params"] if self.own is None or p in self.own]

    def _stored(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.state_on_host:
            return state
        return {name: sharded_like(tensor, host_copy(local(tensor))) for name, tensor in state.items()}


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters of at most 2^20 numbers together, or of one parameter.

    Buckets bound the temporary memory, and keep in a CPU's cache what the update reads seven times: for 4.3 million
    parameters AdamW takes 7 ms with buckets and 12 ms without.
    """
    bucket: list[Tensor] = []
    numel = 0
    for parameter in parameters:
        more = parameter.numel()
        if bucket and numel + more > _BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(parameter)
        numel += more
    if bucket:
        yield bucket


def zeros_wide(parameter: Tensor) -> Tensor:
    """Zeros like a parameter, in fp32 or wider."""
    return torch.zeros_like(parameter, dtype=wide_dtype(parameter))


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that a parameter is updated in."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _check_settings(group: Group) -> None:
    """Raise NapkinError for settings of a group for which the rules are not defined."""
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not group[name] >= 0:
            raise NapkinError(f"{name} is {group[name]}: use 0 or more")
    for name in ("momentum", "beta2"):
        if name in group and not 0 <= group[name] < 1:
            raise NapkinError(f"{name} is {group[name]}: use 0 to below 1")
    if "clip" in group and not group["clip"] > 0:
        raise NapkinError(f"clip is {group['clip']}: use more than 0")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise NapkinError(f"betas are {group['betas']}: use two numbers from 0 to below 1")


def decayed(gradient: Tensor, parameter: Tensor, group: Group) -> Tensor:
    """Weight decay as part of the gradient (Krogh & Hertz 1991), g + decay · w; the gradient itself if that is 0.

    SGD, AdaGrad, RMSProp and Adam use it, as they were published. Rules that divide by the gradient's size divide their
    decay by it too; AdamW, Lion, Muon and Adafactor shrink the weight itself instead.
    """
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


def decayed_foreach(gradients: list[Tensor], parameters: list[Tensor], group: Group) -> list[Tensor]:
    """`decayed` for lists."""
    if not group["weight_decay"]:
        return gradients
    return list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))


def decay_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Two optimizer groups: parameters of two or more dimensions with weight_decay, all others with none.

    Decay pulls towards 0, which is neutral for a matrix and not for a gain around 1. A parameter that two modules share
    is listed once; parameters without requires_grad and empty groups are left out.
    """
    return _by_decay([p for p in model.parameters() if p.requires_grad], weight_decay)


def muon_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Three groups: matrices inside the blocks ("orthogonal" is True), other matrices, and vectors without decay.

    Blocks are the modules in an `nn.ModuleList`: the layers that a model repeats. Matrices outside of them turn ids
    into vectors or vectors into scores of ids, and their rows are updated as vectors are. Raises NapkinError if a model
    has no matrices in blocks.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # A filter of a convolution, a matrix of one row, is updated as vectors are.
    inside = {p for stack in stacks for p in stack.parameters() if p.ndim >= 2 and p.shape[-2] > 1}
    trained = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in trained if p in inside]
    if not hidden:
        raise NapkinError(
            f"{type(model).__name__} has no matrix inside an nn.ModuleList: muon has nothing to orthogonalise, "
            "use adamw, or name the groups yourself"
        )
    others = _by_decay([p for p in trained if p not in inside], weight_decay)
    first = {"params": hidden, "weight_decay": weight_decay, "orthogonal": True}
    return [first, *({**group, "orthogonal": False} for group in others)]


def _by_decay(parameters: list[Tensor], weight_decay: float) -> list[Group]:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
