"""Counts the places at which a program on a GPU would wait for it: each reads a tensor's numbers on the host.

On a CPU the same calls are made, and cost nothing; here they are counted by the function of torch that is called.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    getattr(Tensor, name): name
    for name in "item tolist numpy cpu __bool__ __int__ __float__ __index__ __array__ __contains__".split()
}
_DATA_DEPENDENT = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique2"}
"""Operators whose result, or its shape, the host has to know, also where C++ calls them."""


class HostWaits:
    """The reads since it was made, by the label that was set at the time."""

    def __init__(self) -> None:
        self.label = ""
        self.reads: Counter[tuple[str, str]] = Counter()

    def of(self, label: str) -> dict[str, int]:
        return {name: n for (where, name), n in self.reads.items() if where == label}

    @property
    def total(self) -> int:
        return sum(self.reads.values())

    def add(self, name: str) -> None:
        self.reads[self.label, name] += 1


@contextmanager
def host_waits(patch: Callable[..., None]) -> Iterator[HostWaits]:
    """Count while the block runs; `patch` is pytest's `monkeypatch.setattr`."""
    waits = HostWaits()

    class Reads(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if isinstance(args[0] if args else None, _HostTensor):
                return function(*args, **(kwargs or {}))
            if function is F.one_hot:
                # Checks its ids on a CPU alone.
                return _unseen(function, args, kwargs)
            if function not in _READS:
                return function(*args, **(kwargs or {}))
            waits.add(_READS[function])
            # What has come to the host with one wait is read there without another.
            return _on_host(_unseen(function, args, kwargs))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = function.overloadpacket.__name__
            # A mask as an index is turned into places.
            indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
            masked = any(each is not None and each.dtype == torch.bool for each in indices)
            if (masked or name in _DATA_DEPENDENT) and not _unseen.calls:
                waits.add(name)
            return function(*args, **(kwargs or {}))

    patch(torch.cuda, "synchronize", lambda *_: waits.add("synchronize"))
    with Reads(), Operators():
        yield waits


class _Unseen:
    """Calls whose operators are not counted."""

    calls = 0

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self.calls += 1
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.calls -= 1


_unseen = _Unseen()


class _HostTensor(Tensor):
    """A tensor in the host's memory, whose reads wait for nothing."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return _on_host(_unseen(function, args, kwargs))


def _on_host(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.as_subclass(_HostTensor)
    return tuple(map(_on_host, result)) if isinstance(result, tuple) else result
