"""Batches on the training device: fetched on demand, or prefetched by a thread during the training step."""

import itertools
import queue
import threading

from jaxtyping import Int64
from torch import Tensor

from napkin.data.batches import Batches

Batch = tuple[Int64[Tensor, "batch position"], ...]


class BatchFetcher:
    """Fetches batches on demand: `fetcher[i]` is `batches[i]` on the device."""

    def __init__(self, batches: Batches, device_type: str = "cpu") -> None:
        self.batches = batches
        self.device_type = device_type

    def __getitem__(self, index: int) -> Batch:
        """Return batch `index`, as `Batches` does."""
        return tuple(tensor.to(self.device_type) for tensor in self.batches[index])

    def close(self) -> None:
        """Drop prefetched batches; the fetcher remains usable."""


class Prefetcher(BatchFetcher):
    """A `BatchFetcher` with the next two batches prepared by a thread, for a GPU in pinned memory.

    The copy to the GPU is asynchronous and ordered before the step; only the current batch is on the device. Batches
    are expected in order; any other index restarts prefetching from there. An error in the thread is raised by the
    call that gets the batch.
    """

    def __init__(self, batches: Batches, device_type: str = "cpu") -> None:
        super().__init__(batches, device_type)
        self._thread: threading.Thread | None = None
        self._next = 0

    def __getitem__(self, index: int) -> Batch:
        """Return batch `index`, as `Batches` does."""
        if self._thread is None or index != self._next:
            self.close()
            self._start(index)
        prepared = self._prepared.get()
        self._next = index + 1
        if isinstance(prepared, BaseException):
            self.close()
            raise prepared
        return tuple(tensor.to(self.device_type, non_blocking=True) for tensor in prepared)

    def close(self) -> None:
        """Drop prefetched batches and wait for the thread to end."""
        if self._thread is None:
            return
        self._stopped.set()
        # Emptying the queue unblocks a waiting thread, which then sees the event.
        while not self._prepared.empty():
            self._prepared.get()
        self._thread.join()
        self._thread = None

    def _start(self, index: int) -> None:
        # One batch waits in the queue, one in the thread. Each thread has its own queue and event.
        self._prepared: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(index,), name="napkin batches", daemon=True)
        self._thread.start()

    def _prepare(self, first: int) -> None:
        for index in itertools.count(first):
            try:
                batch = self.batches[index]
                prepared = tuple(tensor.pin_memory() for tensor in batch) if self.device_type == "cuda" else batch
            except BaseException as error:  # raised by the call that gets this batch
                prepared = error
            self._prepared.put(prepared)
            if self._stopped.is_set() or isinstance(prepared, BaseException):
                return


def open_fetcher(batches: Batches, device_type: str, prefetch: str) -> BatchFetcher:
    """The fetcher for `prefetch`: "on", "off", or "auto", which prefetches for a GPU only.

    A batch takes about 0.1 ms to prepare, a training step on a CPU hundreds of milliseconds on all cores: there a
    thread would slow down the step and save nothing.
    """
    on = prefetch == "on" or (prefetch == "auto" and device_type != "cpu")
    return (Prefetcher if on else BatchFetcher)(batches, device_type)
