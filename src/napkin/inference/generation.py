"""Tokens that continue a prompt, one after another; keys and values of earlier ones are kept in a cache."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.sampling import Draw, draw
from napkin.inference.settings import Sampling
from napkin.model.kv_cache import ContiguousCache
from napkin.model.language_model import evaluation_mode
from napkin.model.transformer import Transformer

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
    text, see `napkin.inference.text_stream`.
    """
    if not prompt:
        raise NapkinError("the prompt holds no token: begin with a separator or with text")
    limit = model.config.context_length
    tokens, ends = list(prompt), {*sampling.stop_ids, stop}
    cache = cache_for(model, 1, min(limit, len(prompt) + max(max_new_tokens, 1)))
    new = tokens[-limit:]
    for number in range(max_new_tokens):
        if cache.lengths[0] + len(new) > limit:
            cache.truncate(0)
            new = tokens[-kept_tokens(limit) :]
        logits = next_logits(model, new, cache, chunk_size=chunk_size)
        (drawn,) = draw(logits, [sampling], [number], [tokens])
        if drawn.token in ends:
            return
        tokens.append(drawn.token)
        new = [drawn.token]
        yield drawn


def cache_for(model: Transformer, batch_size: int, capacity: int, *, slack: int = 0) -> ContiguousCache:
    """A cache for a model, where it is and in the dtype of its products: that of its embedding, or of autocast."""
    weight = model.embedding.weight
    device_type = weight.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    return ContiguousCache(model.config, batch_size, capacity, dtype=dtype, device=weight.device, slack=slack)


@torch.inference_mode()
def next_logits(
    model: Transformer, tokens: Sequence[int], cache: ContiguousCache, *, chunk_size: int = PREFILL_CHUNK
) -> Float[Tensor, "1 vocab_size"]:
    """Extend a cache of one sequence by tokens, a chunk at a time; the logits of the token after the last."""
    return prefill(model, [tokens], cache, chunk_size=chunk_size)


@torch.inference_mode()
def prefill(
    model: Transformer, sequences: Sequence[Sequence[int]], cache: ContiguousCache, *, chunk_size: int = PREFILL_CHUNK
) -> Float[Tensor, "batch vocab_size"]:
    """Extend each sequence of a cache by at least one token, a chunk of all at a time; logits after the last of each.

    Of every position but the last, logits are not computed.
    """
    last: dict[int, Tensor] = {}
    for hidden, counts in hidden_states(model, sequences, cache, chunk_size):
        last |= {row: hidden[row, count - 1] for row, count in enumerate(counts) if count}
    assert len(last) == len(sequences), "a sequence without a token has no last position"
    return model.logits_of(torch.stack([last[row] for row in range(len(sequences))])).float()


def hidden_states(
    model: Transformer, sequences: Sequence[Sequence[int]], cache: ContiguousCache, chunk_size: int
) -> Iterator[tuple[Float[Tensor, "batch chunk d_model"], list[int]]]:
    """Extend each sequence of a cache, a chunk of all at a time: hidden states, and how many of each are no padding."""
    for start in range(0, max(map(len, sequences)), chunk_size):
        parts = [list(tokens[start : start + chunk_size]) for tokens in sequences]
        counts = [len(part) for part in parts]
        padded = [part + [0] * (max(counts) - len(part)) for part in parts]
        yield _hidden(model, torch.tensor(padded, device=cache.device), cache, counts), counts


@torch.inference_mode()
def last_logits(
    model: Transformer, tokens: Sequence[int], cache: ContiguousCache, n_last: int, *, chunk_size: int = PREFILL_CHUNK
) -> Float[Tensor, "n_last vocab_size"]:
    """Extend a cache of one sequence by tokens, a chunk at a time; the logits after each of the last `n_last`."""
    hidden = torch.cat(
        [
            _hidden(model, part[None], cache, [len(part)])[0, -n_last:]
            for part in torch.tensor(tokens, device=cache.device).split(chunk_size)
        ]
    )
    return model.logits_of(hidden[-n_last:]).float()


def kept_tokens(limit: int) -> int:
    """Of a sequence that has grown beyond a context length: how many of its newest tokens go through the model again.

    A quarter of the context is left free, so that this is done once for many tokens and not for each.
    """
    return limit - limit // 4


def _hidden(model: Transformer, tokens: Tensor, cache: ContiguousCache, counts: Sequence[int]) -> Tensor:
    extending = cache.extend(tokens.shape[1], counts)
    if not model.training:
        # Not even a look at each layer's mode, which takes as long as a small model's token.
        return model.hidden(tokens, cache=extending)
    with evaluation_mode(model):
        return model.hidden(tokens, cache=extending)
