"""Batches out of a token file, for training in a shuffled order and for evaluation in the text's own.

There is no loader with a state: training batch i is a pure function of (seed, i). So a run resumes at any
step, and its order does not depend on how many processes read it.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Int64
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from napkin.data.permutation import KeyedPermutation
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError

IGNORED = -1


class Batches:
    """An endless sequence of training batches: `batches[i]` for any i ≥ 0, at once and always the same.

    The file is cut into `n_windows` windows of context_length + 1 tokens, each beginning with the last token
    of the one before, so that every token but the first is a target once an epoch (up to context_length - 1
    at the end of the file are left over). Each epoch takes all windows in an order of its own; a batch may
    straddle epochs. Of each batch only `rows` are read: the order does not depend on who takes which.

    Raises NapkinError where the file holds less than one window.
    """

    def __init__(
        self,
        token_file: TokenFile,
        *,
        context_length: int,
        batch_size: int,
        seed: int,
        rows: slice = slice(None),
    ) -> None:
        _require(context_length >= 1, "context_length", context_length)
        _require(batch_size >= 1, "batch_size", batch_size)
        self.token_file = token_file
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        self.rows = rows
        self.n_windows = (token_file.n_tokens - 1) // context_length
        if not self.n_windows:
            raise _too_few_tokens(token_file, context_length)
        self._windows = sliding_window_view(token_file.tokens, context_length + 1)[::context_length]

    @property
    def batches_per_epoch(self) -> float:
        """How many batches see each window once; no whole number where the last one straddles two epochs."""
        return self.n_windows / self.batch_size

    def __getitem__(
        self, index: int
    ) -> tuple[
        Int64[Tensor, "rows context_length"],
        Int64[Tensor, "rows context_length"],
    ]:
        """Return (inputs, targets) of batch `index`; targets are the inputs' successors."""
        if index < 0:
            raise IndexError(f"batch {index} does not exist: batches are counted from 0 and have no end")
        tokens = self._windows[self._window_numbers(index)[self.rows]]
        return _to_tensor(tokens[:, :-1]), _to_tensor(tokens[:, 1:])

    def _window_numbers(self, index: int) -> NDArray[np.int64]:
        epoch, position = divmod(index * self.batch_size, self.n_windows)
        parts: list[NDArray[np.int64]] = []
        missing = self.batch_size
        while missing:
            end = min(position + missing, self.n_windows)
            shuffle = KeyedPermutation(self.n_windows, _epoch_key(self.seed, epoch))
            parts.append(shuffle(np.arange(position, end)))
            missing -= end - position
            epoch, position = epoch + 1, 0
        return np.concatenate(parts)


def evaluation_windows(
    token_file: TokenFile, context_length: int, stride: int, batch_size: int
) -> Iterator[tuple[Int64[Tensor, "batch time"], Int64[Tensor, "batch time"]]]:
    """Yield (inputs, targets) that predict each token of the file but the first exactly once, in their order.

    Windows of `context_length` inputs begin every `stride` tokens (1 to context_length). Targets that an
    earlier window has scored are -1, so that all others, after the first window, see at least
    context_length - stride + 1 tokens. The end of the last window is padded with inputs 0 and targets -1; the
    last batch may have fewer than `batch_size` rows.

    Raises NapkinError where the file holds fewer than two tokens or `stride` is not possible.
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
        tokens = token_file.tokens[np.minimum(positions, last)].astype(np.int64)
        beyond = positions > last
        scored_before = (windows > 0) & (columns[1:] <= context_length - stride)
        inputs = np.where(beyond[:, :-1], 0, tokens[:, :-1])
        targets = np.where(beyond[:, 1:] | scored_before, IGNORED, tokens[:, 1:])
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def _epoch_key(seed: int, epoch: int) -> int:
    digest = blake2b(f"batches seed {seed} epoch {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


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
