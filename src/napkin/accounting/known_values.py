"""The values of fake tensors of integers and booleans, where they are known: ids, positions, masks."""

import contextlib
from typing import no_type_check
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

MOST_VALUES = 2**20
"""The most elements of a tensor whose values are kept beside the fake one."""


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class Values(TorchDispatchMode):
    """The values of fake tensors of integers and booleans, as far as operators compute them from such alone.

    With `guesses`, a number that is read and is not known is 1; otherwise reading it raises what torch raises.
    """

    def __init__(self, *, guesses: bool = True) -> None:
        super().__init__()
        self.guesses = guesses
        self.read = 0
        """Number of reads of unknown values."""
        self.full_masks = 0
        """Number of masks with unknown values that picked elements; they are taken to pick all."""
        self._fakes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._real: dict[int, Tensor] = {}

    def remember(self, fake: Tensor, real: Tensor) -> None:
        if len(self._real) > 2 * len(self._fakes) + 64:
            self._real = {key: value for key, value in self._real.items() if key in self._fakes}
        self._fakes[id(fake)] = fake
        self._real[id(fake)] = real

    def of(self, fake: Tensor) -> Tensor | None:
        return self._real.get(id(fake)) if self._fakes.get(id(fake)) is fake else None

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if operator is aten._local_scalar_dense.default:
            return self._number(args[0])
        if operator is aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1]):
            args = (args[0], self._positions(args[1]), *args[2:])
        real = self._compute(operator, args, kwargs)
        if real is not None and operator.overloadpacket in (aten.nonzero, aten.masked_select, aten.unique_consecutive):
            result = pytree.tree_map_only(Tensor, lambda each: torch.empty_like(each, device="cpu"), real)
        else:
            result = operator(*args, **kwargs)
        if real is not None:
            for fake, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(real), strict=False):
                if isinstance(fake, Tensor) and isinstance(value, Tensor) and value.shape == fake.shape:
                    self.remember(fake, value)
        return result

    def _number(self, fake):
        real = self.of(fake)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        with contextlib.suppress(DataDependentOutputException) if self.guesses else contextlib.nullcontext():
            # A fake tensor made from a Python number, such as an optimizer's count of steps, knows its value.
            return aten._local_scalar_dense.default(fake)
        self.read += 1
        if fake.dtype == torch.bool:
            return False
        return 1 if not fake.dtype.is_floating_point else 1.0

    def _positions(self, indices):
        """Masks of known values as the positions that they mark: their number is the shape of what is picked."""
        found = []
        for index in indices:
            real = None if index is None or index.dtype != torch.bool else self.of(index)
            if real is None and index is not None and index.dtype == torch.bool and index.numel() <= MOST_VALUES:
                self.full_masks += 1
                with _disable_current_modes():
                    real = torch.ones(index.shape, dtype=torch.bool)
            if real is None:
                found.append(index)
                continue
            with _disable_current_modes():
                positions = real.nonzero(as_tuple=True)
            for each in positions:
                found.append(torch.empty(each.shape, dtype=torch.int64, device="cpu"))
                self.remember(found[-1], each)
        return found

    def _compute(self, operator, args, kwargs):
        """The operator's result on known values; None where an argument is not known, or the result is large or
        real."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if operator.namespace != "aten" or not (tensors or operator.overloadpacket in _MAKING):
            return None
        operands = [self.of(tensor) for tensor in tensors]
        values = [value for value in operands if value is not None]
        if len(values) < len(tensors) or sum(value.numel() for value in values) > MOST_VALUES:
            if operator._schema.is_mutable and operands[0] is not None:
                self._forget(operands[0])
            return None
        known = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
        real_args, real_kwargs = pytree.tree_map_only(Tensor, lambda tensor: known[id(tensor)], (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with _disable_current_modes(), contextlib.suppress(RuntimeError, NotImplementedError):
            real = operator(*real_args, **real_kwargs)
            leaves = [leaf for leaf in pytree.tree_leaves(real) if isinstance(leaf, Tensor)]
            return real if tensors or not any(leaf.dtype.is_floating_point for leaf in leaves) else None
        return None

    def _forget(self, changed):
        """Something unknown was written to a known tensor: forget its values and those of its views."""
        storage = changed.untyped_storage()._cdata
        for key in [key for key, real in self._real.items() if real.untyped_storage()._cdata == storage]:
            del self._real[key]


_MAKING = {aten.arange, aten.full, aten.zeros, aten.ones, aten.scalar_tensor}
