"""What changes storages without being an operator: resizing, and waiting for a collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Hand each storage to `tell` that is resized in the block: FSDP2 so frees parameters that tensors refer to."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        tell(storage)

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def waits_unseen() -> Iterator[None]:
    """No dispatch mode sees what waiting for a collective computes: where gloo lacks one, it copies from another."""
    if not torch.distributed.is_available():
        yield
        return
    wait = torch.distributed.Work.wait

    def wait_(work: Any, *arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return wait(work, *arguments, **keywords)

    with patch.object(torch.distributed.Work, "wait", wait_):
        yield
