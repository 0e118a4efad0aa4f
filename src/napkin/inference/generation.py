"""Tokens that continue a prompt, one after another, with keys and values of earlier ones in a cache; and their text as
they come: whole characters only, and never a part of a stop text."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.decoding_forms import choose_decoding_forms
from napkin.inference.sampling import Draw, draw
from napkin.inference.settings import Sampling
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer, evaluation_mode
from napkin.tokenizer.base import Tokenizer

PREFILL_CHUNK = 512
"""Tokens of a prompt that go through the model at a time: enough to keep a processor busy, and scores stay small."""


def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop: int | None = None,
    chunk_size: int = PREFILL_CHUNK,
) -> Iterator[int]:
    """The tokens of `continue_prompt`."""
    for drawn in continue_prompt(model, prompt, max_new_tokens, sampling, stop=stop, chunk_size=chunk_size):
        yield drawn.token


def continue_prompt(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop: int | None = None,
    chunk_size: int = PREFILL_CHUNK,
) -> Iterator[Draw]:
    """Yield tokens that continue `prompt`, which holds at least one; end before `stop` or a stop id.

    A sequence that would exceed the model's context length loses its oldest tokens, down to three quarters of that
    length, so that the rest goes through the model again once for many tokens and not for each. `sampling.stop` is for
    text, see `napkin.inference.generation`.
    """
    if not prompt:
        raise NapkinError("the prompt holds no token: begin with a separator or with text")
    if not torch.is_autocast_enabled(model.device.type):
        use_decoding_kernels(model)
        choose_decoding_forms(model)
    limit = model.config.context_length
    tokens, ends = list(prompt), {*sampling.stop_ids, stop}
    cache = cache_for(model, 1, min(limit, len(prompt) + max(max_new_tokens, 1)))
    new = tokens[-limit:]
    for number in range(max_new_tokens):
        if cache.lengths[0] + len(new) > limit:
            cache.truncate(0)
            new = tokens[-kept_tokens(limit) :]
        logits = last_logits(model, new, cache, 1, chunk_size=chunk_size)
        (drawn,) = draw(logits, [sampling], [number], [tokens])
        if drawn.token in ends:
            return
        tokens.append(drawn.token)
        new = [drawn.token]
        yield drawn


def cache_for(model: Transformer, batch_size: int, capacity: int, *, slack: int = 0) -> ContiguousCache:
    """A cache for a model, where it is and in the dtype of its products: that of its embedding, or of autocast."""
    device = model.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.embedding.dtype
    return ContiguousCache(model.config, batch_size, capacity, dtype=dtype, device=device, slack=slack)


@torch.inference_mode()
def prefill(
    model: Transformer, sequences: Sequence[Sequence[int]], cache: ContiguousCache, *, chunk_size: int = PREFILL_CHUNK
) -> Float[Tensor, "batch vocab_size"]:
    """Extend each sequence of a cache by at least one token, a chunk of all at a time; logits after the last of each.

    Logits are computed for the last position only.
    """
    if len(sequences) == 1:
        return last_logits(model, sequences[0], cache, 1, chunk_size=chunk_size)
    last: dict[int, Tensor] = {}
    for hidden, counts in hidden_states(model, sequences, cache, chunk_size):
        last |= {row: hidden[row, count - 1] for row, count in enumerate(counts) if count}
    assert len(last) == len(sequences), "a sequence without a token has no last position"
    return model.logits_of(torch.stack([last[row] for row in range(len(sequences))])).float()


def hidden_states(
    model: Transformer, sequences: Sequence[Sequence[int]], cache: ContiguousCache, chunk_size: int
) -> Iterator[tuple[Float[Tensor, "batch chunk d_model"], list[int]]]:
    """Extend each sequence of a cache, a chunk of all at a time: hidden states, and how many of each sequence are not
    padding."""
    for start in range(0, max(map(len, sequences)), chunk_size):
        parts = [list(tokens[start : start + chunk_size]) for tokens in sequences]
        counts = [len(part) for part in parts]
        padded = [part + [0] * (max(counts) - len(part)) for part in parts]
        extending = cache.extend(max(counts), counts)
        # Layers are not even visited if the mode need not change: a visit takes as long as a token of a small model.
        with evaluation_mode(model) if model.training else nullcontext():
            hidden = model.hidden(torch.tensor(padded, device=cache.device), cache=extending)
        yield hidden, counts


@torch.inference_mode()
def last_logits(
    model: Transformer, tokens: Sequence[int], cache: ContiguousCache, n_last: int, *, chunk_size: int = PREFILL_CHUNK
) -> Float[Tensor, "n_last vocab_size"]:
    """Extend a cache of one sequence by tokens, a chunk at a time; the logits after each of the last `n_last`."""
    if model.decode_blocks is not None:
        logits = model.decode_blocks.logits(model, tokens, cache, n_last)
        if logits is not None:
            return logits
    parts = [hidden[0, -n_last:] for hidden, _ in hidden_states(model, [tokens], cache, chunk_size)]
    return model.logits_of(torch.cat(parts)[-n_last:]).float()


def kept_tokens(limit: int) -> int:
    """How many of the newest tokens of a sequence that has outgrown the context go through the model again. A quarter
    of the context is left free, so that this happens once for many tokens and not for each.
    """
    return limit - limit // 4


def stream_text(
    draws: Iterable[Draw],
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    *,
    at_start: bool = False,
    on_draw: Callable[[Draw], object] = lambda drawn: None,
) -> Iterator[str]:
    """Yield the text of drawn tokens as they come, up to a stop text; `on_draw` is called with each token.

    `at_start` is that of `TextStream`.
    """
    text = TextStream(tokenizer, stop, at_start=at_start)
    for drawn in draws:
        on_draw(drawn)
        if piece := text.push(drawn.token):
            yield piece
        if text.stopped:
            return
    if piece := text.finish():
        yield piece


class TextStream:
    """Turns tokens into text piece by piece; the pieces together are the text of their bytes.

    Tokens continue a text unless they are `at_start`: then the space is left out that some tokenizers put before one.

    A token may end within a character: its bytes wait for the rest. Text that may be the beginning of a stop text is
    held back until that is decided; if one is found, the text ends before it, and `stopped` is True.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, at_start: bool = False) -> None:
        self.stopped = False
        self._leaves_out_space = at_start and tokenizer.strips_space
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain after one more token; it may be empty."""
        if token >= self._tokenizer.vocab_size:
            return ""  # The model's vocabulary may be padded: such an id has no text.
        content = self._tokenizer.decode_bytes([token])
        if self._leaves_out_space and content:
            self._leaves_out_space, content = False, content.removeprefix(b" ")
        return self._released(self._decoder.decode(content))

    def finish(self) -> str:
        """The rest, where no more tokens come; a part of a character becomes U+FFFD."""
        text = self._released(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _released(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        ends = [place for each in self._stop if (place := text.find(each)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which a stop text begins."""
    return next(length for length in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:length]))
