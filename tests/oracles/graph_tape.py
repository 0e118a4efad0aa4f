"""What a CUDA graph does, on a CPU: a tape of operators that is replayed on the same storages, without the Python code
between them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """Records operators with their tensors and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number of a tensor"
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Compute all again: results are written to the storages of the first time, as kernels write to addresses."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                # A view, or what was changed in place, is there already.
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """Records as `record_cuda_graph` does: a run to warm up, and one that is recorded."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        with Tape() as tape:
            run()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay


def _tensors(result: Any) -> list[Tensor]:
    return [each for each in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(each, Tensor)]
