"""Batches on the device that trains: fetched when they are asked for, or prepared by a thread while one trains."""

import itertools
import queue
import threading

from jaxtyping import Int64
from torch import Tensor

from napkin.data.batches import Batches

Batch = tuple[Int64[Tensor, "batch position"], ...]


class Feed:
    """`feed[i]` is `batches[i]`, on the device."""

    def __init__(self, batches: Batches, device_type: str = "cpu") -> None:
        self.batches = batches
        self.device_type = device_type

    def __getitem__(self, index: int) -> Batch:
        """Return batch `index`, as `Batches` does."""
        return tuple(tensor.to(self.device_type) for tensor in self.batches[index])

    def close(self) -> None:
        """Let go of what was prepared; the feed may be asked again."""


class PrefetchingFeed(Feed):
    """The same, with the next two batches prepared by a thread, for a GPU in page-locked memory.

    The copy to the GPU is asynchronous and takes its turn before the step; on the device no batch is but the one that
    trains. Batches are asked for in their order; any other index begins anew from there. What goes wrong in the thread
    is raised where the batch is asked for.
    """

    def __init__(self, batches: Batches, device_type: str = "cpu") -> None:
        super().__init__(batches, device_type)
        self._thread: threading.Thread | None = None
        self._next = 0

    def __getitem__(self, index: int) -> Batch:
        """Return batch `index`, as `Batches` does."""
        if self._thread is None or index != self._next:
            self.close()
            self._begin(index)
        prepared = self._prepared.get()
        self._next = index + 1
        if isinstance(prepared, BaseException):
            self.close()
            raise prepared
        return tuple(tensor.to(self.device_type, non_blocking=True) for tensor in prepared)

    def close(self) -> None:
        """Let go of what was prepared, and return when the thread has ended."""
        if self._thread is None:
            return
        self._stopped.set()
        # A thread that waits for room finds it, and then that it is to stop.
        while not self._prepared.empty():
            self._prepared.get()
        self._thread.join()
        self._thread = None

    def _begin(self, index: int) -> None:
        # One waits in the queue, one with the thread. Both are of this thread alone: an earlier one has its own.
        self._prepared: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(index,), name="napkin batches", daemon=True)
        self._thread.start()

    def _prepare(self, first: int) -> None:
        for index in itertools.count(first):
            try:
                batch = self.batches[index]
                prepared = tuple(tensor.pin_memory() for tensor in batch) if self.device_type == "cuda" else batch
            except BaseException as error:  # not lost with the thread: the step that needs the batch raises it
                prepared = error
            self._prepared.put(prepared)
            if self._stopped.is_set() or isinstance(prepared, BaseException):
                return


def open_feed(batches: Batches, device_type: str, prefetch: str) -> Feed:
    """The feed that data.prefetch names: "on", "off", or "auto", which is on with a GPU.

    A batch takes a tenth of a millisecond or so, a step of a CPU hundreds, on all its cores: a thread would take time
    from the step and save none.
    """
    on = prefetch == "on" or (prefetch == "auto" and device_type != "cpu")
    return (PrefetchingFeed if on else Feed)(batches, device_type)
