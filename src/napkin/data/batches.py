"""Batches from token files: shuffled for training, in text order for evaluation, prefetched onto the device.

There is no data loader state: training batch i is a pure function of (seed, i). So a run can resume at any step, and
the order does not depend on the number of processes.
"""

import itertools
import queue
import threading
from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from napkin.data.mixing import PhasedInterleaving, TokenMixture
from napkin.data.permutation import KeyedPermutation
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.tensors import sent_to

IGNORE_INDEX = -1
"""The target at positions that do not count in the loss."""


class Batches:
    """An infinite sequence of training batches: `batches[i]` for any i ≥ 0, in O(1) and always the same.

    A file is divided into windows of context_length + 1 tokens, each starting with the last token of the previous one,
    so no token is a target twice in an epoch. Each epoch is a different permutation of all windows of a file; a batch
    may span two epochs.

    Up to context_length - 1 tokens are left over in an epoch. "shifted" windows treat the file as a ring: the first
    epoch begins at a place that the seed chooses, each later one where the previous one ended, so that after any number
    of epochs the times that two tokens were targets differ by at most one. "fixed" windows begin at the first token in
    every epoch, and what is left over is always the end of the file.

    Several files have separate epochs and are mixed by their weights (see napkin.data.mixing). A file whose windows are
    used up starts its next epoch, independent of the others.

    Only `rows` of each batch are read, such as those of one rank; the order does not depend on it. With
    `separate_documents` a batch has a third tensor, the document number of each input (see `document_ids`).

    Raises NapkinError if a file has less than one window of tokens.
    """

    def __init__(
        self,
        tokens: TokenFile | TokenMixture,
        *,
        context_length: int,
        batch_size: int,
        seed: int,
        separate_documents: bool = False,
        rows: slice = slice(None),
        windows: Literal["shifted", "fixed"] = "shifted",
    ) -> None:
        _require(context_length >= 1, "context_length", context_length)
        _require(batch_size >= 1, "batch_size", batch_size)
        self.tokens = tokens if isinstance(tokens, TokenMixture) else TokenMixture([tokens])
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        self.separate_documents = separate_documents
        self.rows = rows
        self._windows = [
            _Windows(file, number, context_length, seed, shifted=windows == "shifted")
            for number, file in enumerate(self.tokens.files)
        ]
        first = self.tokens.weights or tuple(windows.n for windows in self._windows)
        later = [(step * batch_size, weights) for step, weights in self.tokens.later]
        self._interleaving = PhasedInterleaving([(0, first), *later])

    @property
    def n_windows(self) -> int:
        """The number of windows in all files."""
        return sum(windows.n for windows in self._windows)

    @property
    def windows_of_files(self) -> list[tuple[int, float]]:
        """The number of windows of each file, and the largest average number of its windows in a batch."""
        most = [max(shares) for shares in zip(*self._interleaving.proportions, strict=True)]
        return [(windows.n, self.batch_size * p) for windows, p in zip(self._windows, most, strict=True)]

    def epochs_of_files(self, n_batches: int) -> list[float]:
        """The number of times that each document of each file is read in the first `n_batches` batches."""
        read = [before for before, _ in self._interleaving(n_batches * self.batch_size, 0)]
        return [before / windows.n for before, windows in zip(read, self._windows, strict=True)]

    def __getitem__(self, index: int) -> tuple[Int64[Tensor, "rows context_length"], ...]:
        """Return (inputs, targets), or (inputs, targets, documents), of batch `index`; targets are the successors."""
        if index < 0:
            raise IndexError(f"batch {index} does not exist: batches are numbered from 0")
        start, stop, _ = self.rows.indices(self.batch_size)
        tokens = np.empty((stop - start, self.context_length + 1), self.tokens.files[0].tokens.dtype)
        mixed = self._interleaving(index * self.batch_size + start, stop - start)
        for windows, (first, places) in zip(self._windows, mixed, strict=True):
            tokens[places] = windows.take(first, len(places))
        batch = _to_tensor(tokens[:, :-1]), _to_tensor(tokens[:, 1:])
        return (*batch, document_ids(batch[0], self.tokens.separator)) if self.separate_documents else batch


class _Windows:
    """The windows of one file, shuffled epoch by epoch."""

    def __init__(self, file: TokenFile, number: int, context_length: int, seed: int, *, shifted: bool) -> None:
        self.file = file
        self.context_length = context_length
        # Targets of the file: all tokens but the first.
        self.n_targets = file.n_tokens - 1
        self.n, left_over = divmod(self.n_targets, context_length)
        if not self.n:
            raise _too_few_tokens(file, context_length)
        # The first file has the same keys as a single file.
        self._name = f"batches seed {seed}" + (f" file {number}" if number else "")
        self._first_shift = _key(f"{self._name} shift") % self.n_targets if shifted else 0
        # Where nothing is left over, any shift will do: it divides the text at other places.
        self._shift_back = (left_over or context_length - context_length // 3) if shifted else 0

    def take(self, first: int, length: int) -> NDArray[np.integer]:
        """Windows `first` to `first + length` of an infinite sequence of epochs."""
        epoch, position = divmod(first, self.n)
        parts = [np.empty(0, np.int64)]
        while length:
            end = min(position + length, self.n)
            shuffle = KeyedPermutation(self.n, _key(f"{self._name} epoch {epoch}"))
            starts = shuffle(np.arange(position, end)) * self.context_length + self._shift(epoch)
            parts.append(starts % self.n_targets)
            length -= end - position
            epoch, position = epoch + 1, 0
        return self.file.windows(np.concatenate(parts), self.context_length + 1)

    def _shift(self, epoch: int) -> int:
        """The place where the windows of an epoch begin: where those of the previous one ended, on the ring of all
        targets."""
        return (self._first_shift - epoch * self._shift_back) % self.n_targets


def document_ids(tokens: Int64[Tensor, "batch position"], separator: int) -> Int64[Tensor, "batch position"]:
    """The number, within its window, of the document of each token; a document starts with its separator.

    So a document's first token is predicted from the preceding separator only, as in generation, and its last token
    predicts the following separator: nothing is predicted from another document, and every target counts.
    """
    return (tokens == separator).cumsum(dim=1)


def evaluation_windows(
    token_file: TokenFile, context_length: int, stride: int, batch_size: int
) -> Iterator[tuple[Int64[Tensor, "batch time"], Int64[Tensor, "batch time"]]]:
    """Yield (inputs, targets) in which each token of the file but the first is a target exactly once, in order.

    A window of `context_length` inputs starts every `stride` tokens (1 to context_length). Targets that an earlier
    window has scored are -1; so all targets after the first window have at least context_length - stride + 1 tokens of
    context. The end of the last window is padded with inputs 0 and targets -1; the last batch may have fewer than
    `batch_size` rows.

    Raises NapkinError if the file has fewer than two tokens or `stride` is out of range.
    """
    _require(context_length >= 1, "context_length", context_length)
    _require(batch_size >= 1, "batch_size", batch_size)
    if not 1 <= stride <= context_length:
        raise NapkinError(
            f"a stride of {stride} is not possible: choose from 1 to {context_length}, the context length"
        )
    if token_file.n_tokens < 2:
        raise _too_few_tokens(token_file, context_length=1)
    return _evaluation_windows(token_file, context_length, stride, batch_size)


def _evaluation_windows(
    token_file: TokenFile, context_length: int, stride: int, batch_size: int
) -> Iterator[tuple[Int64[Tensor, "batch time"], Int64[Tensor, "batch time"]]]:
    last = token_file.n_tokens - 1
    n_windows = 1 + max(0, -(-(last - context_length) // stride))
    columns = np.arange(context_length + 1)
    for first in range(0, n_windows, batch_size):
        windows = np.arange(first, min(first + batch_size, n_windows))[:, None]
        positions = windows * stride + columns
        begin, end = int(positions[0, 0]), min(int(positions[-1, -1]), last)
        tokens = token_file.stretch(begin, end + 1)[np.minimum(positions, last) - begin].astype(np.int64)
        beyond = positions > last
        scored_before = (windows > 0) & (columns[1:] <= context_length - stride)
        inputs = np.where(beyond[:, :-1], 0, tokens[:, :-1])
        targets = np.where(beyond[:, 1:] | scored_before, IGNORE_INDEX, tokens[:, 1:])
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def _key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _to_tensor(tokens: NDArray[np.integer]) -> Int64[Tensor, "rows columns"]:
    return torch.from_numpy(tokens.astype(np.int64))


def _require(possible: bool, name: str, value: int) -> None:
    if not possible:
        raise NapkinError(f"a {name} of {value} is not possible: choose 1 or more")


def _too_few_tokens(token_file: TokenFile, context_length: int) -> NapkinError:
    n_tokens = token_file.n_tokens
    way_out = f" or --model.context-length {1 << (n_tokens - 1).bit_length() - 1}" if n_tokens > 1 else ""
    return NapkinError(
        f"'{token_file.path}' holds {n_tokens} tokens, a batch needs {context_length + 1}: use more text{way_out}"
    )


MAX_EPOCHS = 40
"""Four epochs are nearly as good as new text; after about 40, more add nothing (Muennighoff et al. 2023)."""


def repetition_warnings(batches: Batches, steps: int) -> list[str]:
    """A line for each file whose windows occur more than once in a batch, and for each that is read more than
    `MAX_EPOCHS` times in `steps` steps."""
    warnings: list[str] = []
    of_files = zip(batches.tokens.files, batches.windows_of_files, batches.epochs_of_files(steps), strict=True)
    for file, (n_windows, per_batch), epochs in of_files:
        if per_batch > n_windows:
            ways = "use more text"
            if len(batches.tokens.files) == 1:
                ways += f", or --training.batch-size {n_windows} at most"
            warnings.append(
                f"a batch takes {per_batch:,.4g} windows of '{file.path}', which has only {n_windows:,}: the same text "
                f"occurs {per_batch / n_windows:,.1f} times in a batch: {ways}"
            )
        if epochs > MAX_EPOCHS:
            most = int(MAX_EPOCHS * steps / epochs)
            warnings.append(
                f"the run reads '{file.path}' {epochs:,.0f} times: a model learns next to nothing new after about "
                f"{MAX_EPOCHS} epochs, and memorizes the text: use more text"
                + (f", or --training.steps {most} at most" if most else "")
            )
    return warnings


Batch = tuple[Int64[Tensor, "batch position"], ...]


class BatchFetcher:
    """Fetches batches on demand: `fetcher[i]` is `batches[i]` on the device."""

    def __init__(self, batches: Batches, device_type: str = "cpu") -> None:
        self.batches = batches
        self.device_type = device_type

    def __getitem__(self, index: int) -> Batch:
        """Return batch `index`, as `Batches` does."""
        return tuple(sent_to(self.device_type, tensor) for tensor in self.batches[index])

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
