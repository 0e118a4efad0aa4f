"""Bits per byte of a text, document by document, from a random sample of windows as large as the wanted error needs.

A document is read alone, after the token that begins a text. Its first window scores up to a context of tokens, each
later one begins `stride` tokens further and scores the `stride` tokens that no earlier window has: every token of the
text once, none but the first ones with less than context - stride tokens before it. The bits are those of the text's
tokens, the bytes those of the text: the end of a document is not predicted.

Windows are drawn without replacement, so the error is that of the sample of this text (ratio estimate, Cochran 1977,
equation 6.13), not of this text as a sample of others; it is 0 where all were taken.
"""

import gzip
import hashlib
import lzma
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from napkin.data.permutation import KeyedPermutation
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.evaluation.ngrams.model import NgramModel
from napkin.hardware.host import detect_host
from napkin.kernels.loss.cross_entropy import target_log_probabilities
from napkin.model.kernel_forms import compiled_passes, is_worth_compiling
from napkin.model.transformer import HasModes, Transformer, evaluation_mode
from napkin.tokenizer.base import Tokenizer

LEAST_WINDOWS = 100
"""The fewest windows before the estimated error is used, since it is estimated from the windows themselves."""
_BATCH = 16
_ROWS_OF_LOGITS = 256
_Z = 1.959963984540054


@runtime_checkable
class ScoringModel(HasModes, Protocol):
    """The part of a model that scoring uses."""

    config: Any

    def hidden(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """The states that the head reads."""
        ...

    def logits_of(self, hidden: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows vocab_size"]:
        """Scores of the next token."""
        ...


@dataclass(frozen=True)
class Documents:
    """The tokens of documents, and the bytes of their texts."""

    ids: NDArray[np.integer]
    """Token ids of the documents, one after another, without separators."""
    ends: NDArray[np.int64]
    """The end of each document in `ids`."""
    surplus: NDArray[np.int64]
    """Bytes of each document's tokens that are not of its text, such as a space that its tokenizer puts first."""
    sha256: str
    """SHA-256 of the documents' texts: equal for all tokenizers that do not change them."""

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])


@dataclass(frozen=True)
class SampledBits:
    """Bits per byte of a sample of a text, and how sure they are."""

    bits_per_byte: float
    standard_error: float
    low: float
    """Lower end of the interval of 95% confidence."""
    high: float
    windows: int
    """Scored windows, of `all_windows`."""
    all_windows: int
    tokens: int
    all_tokens: int
    bytes: int
    context_length: int
    stride: int
    seed: int
    gzip_bits_per_byte: float
    """Compressed size of the same bytes, as one stream."""
    xz_bits_per_byte: float
    ngram_bits_per_byte: float | None = None
    """The bits per byte of an n-gram model on the same bytes, as one document, where one was given."""


def documents_of_tokens(token_file: TokenFile, tokenizer: Tokenizer) -> Documents:
    """The documents of a token file that the tokenizer made. Raises NapkinError where it holds no text."""
    tokens = np.asarray(token_file.tokens)
    is_separator = tokens == token_file.separator
    places = np.flatnonzero(is_separator)
    ends = np.append(places - np.arange(len(places)), len(tokens) - len(places))
    lengths = np.diff(ends, prepend=0)
    if not lengths.any():
        raise NapkinError(f"'{token_file.path}' holds no text, only separators: name a token file that does")
    ends = ends[lengths > 0]
    ids = tokens[~is_separator]
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    # A space that the tokenizer put before each document.
    has_space = np.array([tokenizer.strips_space and each.startswith(b" ") for each in tokenizer.vocabulary])
    surplus = has_space[ids[starts]].astype(np.int64)
    parts = (
        tokenizer.decode_bytes(ids[start:end].tolist())[extra:]
        for start, end, extra in zip(starts, ends, surplus, strict=True)
    )
    return Documents(ids, ends, surplus, _digest(parts))


def documents_of_texts(texts: Sequence[str], tokenizer: Tokenizer) -> Documents:
    """Encode texts. Raises NapkinError where the tokens of one are another text: its bytes would not be predicted."""
    texts = [text for text in texts if text]
    if not texts:
        raise NapkinError("there is no text: name a file that has some")
    ids, counts = tokenizer.encode_documents(texts, threads=detect_host().cores)
    ends = np.cumsum(counts)
    n_bytes = _bytes_of_ids(tokenizer)
    surplus = []
    for number, (text, end, count) in enumerate(zip(texts, ends.tolist(), counts.tolist(), strict=True)):
        own = ids[end - count : end]
        if tokenizer.decode(own.tolist()) != text:
            raise NapkinError(
                f"the tokenizer changes the text of document {number + 1:,} (normalization, or words that it does not "
                "know): the bits of another text do not compare; use a lossless tokenizer"
            )
        surplus.append(int(n_bytes[own].sum()) - len(text.encode()))
    return Documents(ids, ends, np.array(surplus), _digest(text.encode() for text in texts))


def cut_documents(documents: Documents, longest: int) -> Documents:
    """The same text as documents of at most this many tokens, each of which is read alone."""
    lengths = documents.ends - documents.starts
    pieces = -(-lengths // longest)
    firsts = np.cumsum(pieces) - pieces
    places = np.arange(int(pieces.sum())) - np.repeat(firsts, pieces)
    ends = np.minimum(np.repeat(documents.starts, pieces) + (places + 1) * longest, np.repeat(documents.ends, pieces))
    surplus = np.where(places == 0, np.repeat(documents.surplus, pieces), 0)
    return Documents(documents.ids, ends, surplus, documents.sha256)


@torch.inference_mode()
def sampled_bits(
    model: ScoringModel,
    documents: Documents,
    tokenizer: Tokenizer,
    start_ids: Sequence[int],
    *,
    stride: int | None = None,
    error: float | None = None,
    max_tokens: int | None = None,
    max_windows: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    ngrams: NgramModel | None = None,
    progress: Callable[[int, int, float | None], None] = lambda done, total, error: None,
) -> SampledBits:
    """Score windows in random order until the standard error is at most `error` bits per byte.

    Without `error`, to `max_tokens` or `max_windows`, but for the last batch of windows, or to the end of the text. At
    least one of `start_ids` stands before each document; `stride` None is half the context. `progress` is called with
    the windows scored, all of them, and the error so far. The model is in evaluation mode meanwhile, and then in the
    mode that it was in.
    """
    limit = model.config.context_length
    stride = max(1, limit // 2) if stride is None else stride
    _check(stride, limit, error, max_tokens, start_ids, tokenizer, documents)
    windows = _Windows(documents, limit, len(start_ids), stride)
    order = KeyedPermutation(windows.n, seed)
    n_bytes = _bytes_of_ids(tokenizer)
    taken: list[_Window] = []
    ratio, n_tokens, text_bytes = _Ratio(windows.n), 0, 0
    n_most = min(len(documents.ids), max_tokens or len(documents.ids))
    passes = _passes(model, n_most)
    for first in range(0, windows.n, _BATCH):
        batch = [windows[int(place)] for place in order(np.arange(first, min(windows.n, first + _BATCH)))]
        with passes():
            found = _bits(model, documents, batch, start_ids, device)
        for window, bits in zip(batch, found, strict=True):
            surplus = 0 if window.skipped else int(documents.surplus[window.document])
            size = int(n_bytes[documents.ids[window.first : window.stop]].sum()) - surplus
            ratio.add(bits, size)
            text_bytes += size
            n_tokens += window.stop - window.first
        taken += batch
        progress(len(taken), windows.n, ratio.error)
        is_sure = error is not None and len(taken) >= LEAST_WINDOWS and ratio.error <= error
        if is_sure or n_tokens >= (max_tokens or math.inf) or len(taken) >= (max_windows or math.inf):
            break
    # In the order of the text, from which compressors profit.
    ordered = sorted(taken, key=lambda window: window.first)
    text = b"".join(tokenizer.decode_bytes(documents.ids[each.first : each.stop].tolist()) for each in ordered)
    return SampledBits(
        bits_per_byte=ratio.estimate,
        standard_error=ratio.error,
        low=ratio.estimate - _Z * ratio.error,
        high=ratio.estimate + _Z * ratio.error,
        windows=len(taken),
        all_windows=windows.n,
        tokens=n_tokens,
        all_tokens=len(documents.ids),
        bytes=text_bytes,
        context_length=limit,
        stride=stride,
        seed=seed,
        gzip_bits_per_byte=8 * len(gzip.compress(text, compresslevel=9)) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=9)) / len(text),
        ngram_bits_per_byte=None if ngrams is None else ngrams.bits_per_byte([text]),
    )


def windows_for(pilot: SampledBits, *, error: float | None, max_tokens: int | None) -> int:
    """The number of windows that a measurement takes, by the spread of those of a pilot."""
    most = pilot.all_windows
    if max_tokens is not None:
        most = min(most, -(-max_tokens * pilot.windows // pilot.tokens))
    if error is None or pilot.windows == pilot.all_windows:
        return most
    spread = pilot.standard_error**2 * pilot.windows / (1 - pilot.windows / pilot.all_windows)
    needed = math.ceil(spread / (error**2 + spread / pilot.all_windows))
    return min(most, max(needed, min(LEAST_WINDOWS, pilot.all_windows)))


@dataclass(frozen=True)
class _Window:
    """Tokens `first` to `stop` are scored, after those from `begin` on and what is left of the start ids."""

    document: int
    begin: int
    first: int
    stop: int
    skipped: int
    """Tokens of start ids and document before the window; 0 of the first one."""


class _Windows:
    """All windows of the documents, indexable without being stored in a list."""

    def __init__(self, documents: Documents, limit: int, n_start: int, stride: int) -> None:
        self._starts, self._ends = documents.starts, documents.ends
        self._n_start, self._stride = n_start, stride
        self._in_first = limit - n_start + 1
        lengths = self._ends - self._starts
        counts = 1 + np.maximum(0, -(-(lengths - self._in_first) // stride))
        self._until = np.cumsum(counts)
        self.n = int(self._until[-1])

    def __getitem__(self, number: int) -> _Window:
        document = int(np.searchsorted(self._until, number, side="right"))
        place = number - (int(self._until[document - 1]) if document else 0)
        start, end = int(self._starts[document]), int(self._ends[document])
        skipped = place * self._stride
        first = start if not place else start + self._in_first + skipped - self._stride
        return _Window(
            document,
            begin=start + max(0, skipped - self._n_start),
            first=first,
            stop=min(end, start + self._in_first + skipped),
            skipped=skipped,
        )


def _passes(model: ScoringModel, n_tokens: int) -> Callable[[], AbstractContextManager[None]]:
    """The context in which a model reads that many tokens: compiled kernels in bf16 on a CPU, where they save time."""
    if not isinstance(model, Transformer) or (model.device.type, model.dtype) != ("cpu", torch.bfloat16):
        return nullcontext
    return partial(compiled_passes, model) if is_worth_compiling(model.config, n_tokens, trained=False) else nullcontext


def _bits(
    model: ScoringModel, documents: Documents, batch: list[_Window], start_ids: Sequence[int], device: Any
) -> list[float]:
    """The bits of the scored tokens of each window."""
    rows = [[*start_ids[window.skipped :], *documents.ids[window.begin : window.stop].tolist()] for window in batch]
    found = [0.0] * len(batch)
    for together in _alike([len(row) - 1 for row in rows]):
        width = len(rows[together[-1]]) - 1
        inputs = torch.tensor([rows[i][:-1] + [0] * (width - len(rows[i]) + 1) for i in together], device=device)
        with evaluation_mode(model):
            hidden = model.hidden(inputs)
        counts = [batch[i].stop - batch[i].first for i in together]
        ends = zip(hidden, together, counts, strict=True)
        scored = torch.cat([states[len(rows[i]) - 1 - count : len(rows[i]) - 1] for states, i, count in ends])
        wanted = [id_ for i, count in zip(together, counts, strict=True) for id_ in rows[i][-count:]]
        nats = [
            -target_log_probabilities(model.logits_of(states), ids).double()
            for states, ids in zip(
                scored.split(_ROWS_OF_LOGITS), torch.tensor(wanted, device=device).split(_ROWS_OF_LOGITS), strict=True
            )
        ]
        for i, own in zip(together, torch.cat(nats).split(counts), strict=True):
            found[i] = float(own.sum()) / math.log(2)
    return found


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """The numbers of rows that go through the model together, shorter ones first and the longest of each last: padding
    is less than a fifth of what is computed."""
    passes: list[list[int]] = []
    n_tokens = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        n_tokens += lengths[number]
        if not passes or 0.8 * lengths[number] * (len(passes[-1]) + 1) > n_tokens:
            passes.append([])
            n_tokens = lengths[number]
        passes[-1].append(number)
    return passes


class _Ratio:
    """Bits per byte of the windows so far, and its standard error, from sums."""

    def __init__(self, all_windows: int) -> None:
        self._all_windows = all_windows
        self._n = 0
        self._sums = np.zeros(2)
        self._products = np.zeros((2, 2))

    def add(self, bits: float, n_bytes: int) -> None:
        each = np.array([bits, n_bytes])
        self._n += 1
        self._sums += each
        self._products += np.outer(each, each)

    @property
    def estimate(self) -> float:
        return float(self._sums[0] / self._sums[1])

    @property
    def error(self) -> float:
        """Infinite for one window of several."""
        if self._n == self._all_windows:
            return 0.0
        if self._n < 2:
            return math.inf
        residual = np.array([1.0, -self.estimate])
        spread = max(0.0, float(residual @ self._products @ residual)) / (self._n - 1)
        return math.sqrt((1 - self._n / self._all_windows) * spread / self._n) / float(self._sums[1] / self._n)


def _digest(texts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _bytes_of_ids(tokenizer: Tokenizer) -> NDArray[np.int64]:
    return np.array([len(each) for each in tokenizer.vocabulary], dtype=np.int64)


def _check(
    stride: int,
    limit: int,
    error: float | None,
    max_tokens: int | None,
    start_ids: Sequence[int],
    tokenizer: Tokenizer,
    documents: Documents,
) -> None:
    if not start_ids:
        raise NapkinError("the model has no token that stands before a text: the first token has no probability")
    most = limit - len(start_ids) + 1
    if not 1 <= stride <= most:
        raise NapkinError(f"a stride of {stride} is not possible: choose from 1 to {most}")
    if error is not None and not 0 < error < math.inf:
        raise NapkinError(f"an error of {error} bits per byte is not possible: use a number above 0, such as 0.01")
    if max_tokens is not None and max_tokens < 1:
        raise NapkinError(f"--max-tokens is {max_tokens}: use 1 or more")
    unknown = tokenizer.unknown_id
    if unknown is not None and (n_unknown := int(np.count_nonzero(documents.ids == unknown))):
        raise NapkinError(
            f"{n_unknown:,} tokens are words that the tokenizer does not know, whose bytes are lost: bits per byte "
            "need a lossless tokenizer, such as --kind bpe"
        )
