"""One prompt continued: token by token, by proposals, or by an engine whose keys and values are in int8."""

from collections.abc import Iterator, Sequence

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.generation import continue_prompt
from napkin.inference.paged_cache import KVFormat, bytes_per_token
from napkin.inference.request import Request
from napkin.inference.sampling import Draw
from napkin.inference.settings import Sampling
from napkin.inference.speculation import Proposer, speculate
from napkin.inference.speculation_plan import SpeculationMeter
from napkin.model.transformer import Transformer

_BLOCK = 16


def continue_with_engine(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    kv: KVFormat,
    stop: int | None = None,
) -> Iterator[Draw]:
    """Yield tokens that continue `prompt`, as `continue_prompt` does; end before `stop` or a stop id.

    Raises NapkinError where prompt and tokens exceed the model's context length: nothing is left out of the cache.
    """
    block_bytes = _BLOCK * bytes_per_token(model.config, model.head_weight.dtype, kv)
    n_blocks = -(-min(len(prompt) + max_new_tokens, model.config.context_length) // _BLOCK)
    stop_ids = () if stop is None else (stop,)
    engine = Engine(
        model, cache_bytes=n_blocks * block_bytes, max_running=1, block_size=_BLOCK, stop_ids=stop_ids, kv=kv
    )
    completion = engine.submit(Request(prompt, max_new_tokens, sampling))
    n_told = 0
    while engine.has_work:
        engine.step()
        yield from completion.draws[n_told:]
        n_told = len(completion.draws)


def continue_tokens(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop: int | None = None,
    proposer: Proposer | None = None,
    proposed: int | None = None,
    meter: SpeculationMeter | None = None,
    kv: KVFormat = "auto",
) -> Iterator[Draw]:
    """Yield tokens that continue `prompt`: with a proposer, in an engine of its own, or one by one.

    Raises NapkinError for a proposer where keys and values are not held as they are computed.
    """
    if proposer is not None:
        if kv != "auto":
            raise NapkinError(f"keys and values in {kv} do not go with a draft model or a lookup: use one of them")
        return speculate(model, prompt, max_new_tokens, sampling, proposer, proposed=proposed, stop=stop, meter=meter)
    if kv == "auto":
        return continue_prompt(model, prompt, max_new_tokens, sampling, stop=stop)
    return continue_with_engine(model, prompt, max_new_tokens, sampling, kv=kv, stop=stop)
