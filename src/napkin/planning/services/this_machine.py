"""A load on this machine's engine: its steps are timed alone, and its schedule is simulated with them.

A probe times steps of the engine's kind, decoding so many sequences and computing a chunk of a prompt, at a few sizes.
Between them seconds are interpolated. The simulation runs the engine's own scheduler (`napkin.inference.scheduler`),
with these seconds in place of a model.
"""

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from napkin.hardware.competition import Sampler
from napkin.inference.paged_cache import KVFormat, PagedCache
from napkin.inference.sampling import draw
from napkin.inference.scheduler import ScheduledSequence, Scheduler
from napkin.inference.service_load import Served, ServiceLoad, ServiceMeasurement
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.config_checks import mixer_pattern
from napkin.model.transformer import Transformer
from napkin.planning.services.replica import count_parameters

REPEATS = 5
MOST_PROBED_BYTES = 2**31
"""Most bytes of a probe's weights: a larger model is probed with fewer layers, at two depths."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of an engine's passes through a model, between the sizes at which they were timed."""

    decode: dict[tuple[int, int], float]
    """Seconds of decoding steps, by the number of sequences and the tokens that each holds."""
    prefill: dict[tuple[int, int], float]
    """Seconds of prefill steps, by the tokens of the chunk and of the prompt before it."""

    def decode_seconds(self, rows: int, context: float) -> float:
        """Seconds of a token for each of `rows` sequences, which hold `context` tokens on the average."""
        return _between(self.decode, rows, context)

    def prefill_seconds(self, tokens: int, before: float) -> float:
        return _between(self.prefill, tokens, before)


def speculating_steps(tested: StepSeconds, drafted: StepSeconds, proposed: int, tokens_per_pass: float) -> StepSeconds:
    """The seconds of steps with a draft, of which one stands for the share of a pass that a token takes.

    `tested` are passes of the model over `proposed` + 1 tokens, `drafted` steps of the draft, which the engine has
    compute a token more than is proposed; prompts go through both.
    """
    decode = {
        at: (seconds + (proposed + 1) * drafted.decode[at]) / tokens_per_pass for at, seconds in tested.decode.items()
    }
    return StepSeconds(decode, {at: seconds + drafted.prefill[at] for at, seconds in tested.prefill.items()})


def probe_steps(
    config: ModelConfig,
    load: ServiceLoad,
    running: int,
    prefill_chunk: int,
    dtype: torch.dtype,
    *,
    kv: KVFormat = "auto",
    model: Transformer | None = None,
    n_new: int = 1,
    progress: Callable[[str], None] = lambda doing: None,
) -> StepSeconds:
    """Time the passes that a load needs, on the model or on one of its shape; those that decode are over `n_new` tokens
    of each sequence."""
    contexts = sorted({load.input_tokens, load.input_tokens + load.output_tokens - 1})
    rows = sorted({1, running})
    chunk = min(prefill_chunk, load.input_tokens)
    before = sorted({0, (load.input_tokens - 1) // chunk * chunk})
    chunks = sorted({max(1, chunk // 8), chunk})

    def probed(probe: Transformer) -> StepSeconds:
        progress(f"timing steps of {probe.config.n_layers} layers")
        with Sampler(probe.head_weight.device.type) as sampler:
            timer = _Timer(probe, max(running * (contexts[-1] + n_new), before[-1] + chunk), running, kv, sampler)
            decode = {(each, context): timer.seconds(each, context, n_new) for each in rows for context in contexts}
            prefill = {(each, start): timer.seconds(1, start, each) for each in chunks for start in before}
        return StepSeconds(decode, prefill)

    if model is not None:
        return probed(model)
    if count_parameters(config) * dtype.itemsize <= MOST_PROBED_BYTES:
        return probed(Transformer(config, dtype=dtype))
    period = max(config.kv_sharing, len(mixer_pattern(config.mixers)))
    depths = [config.n_dense_layers + period, config.n_dense_layers + 3 * period]
    few, more = (probed(Transformer(dataclasses.replace(config, n_layers=n), dtype=dtype)) for n in depths)
    factor = (config.n_layers - depths[0]) / (depths[1] - depths[0])
    pairs = ((few.decode, more.decode), (few.prefill, more.prefill))
    return StepSeconds(*({at: one + factor * (other[at] - one) for at, one in first.items()} for first, other in pairs))


@dataclass(frozen=True)
class Simulation(ServiceMeasurement):
    """The latencies of all requests of a simulated load."""

    waiting: float
    """Mean seconds until a request was among those that run."""
    busy: float
    """Fraction of the time in which prompts are computed."""


def simulate_engine(
    load: ServiceLoad,
    steps: StepSeconds,
    max_running: int,
    prefill_chunk: int,
    *,
    n_blocks: int | None = None,
    block_size: int = 16,
) -> Simulation:
    """Run the engine's scheduler with those seconds; without n_blocks the cache has room for all.

    A request must fit into the cache: the engine refuses those that do not.
    """
    size = -(-(load.input_tokens + load.output_tokens) // block_size)
    scheduler = Scheduler[_Simulated](
        n_blocks or max_running * size, block_size=block_size, max_running=max_running, prefill_chunk=prefill_chunk
    )
    arrivals = load.arrivals() if load.rate is not None else []
    n_sent, now, waited, prefilled = 0, 0.0, 0.0, 0.0
    ended: list[Served] = []
    while len(ended) < load.requests:
        while n_sent < load.requests and (
            n_sent - len(ended) < load.concurrency if load.concurrency is not None else arrivals[n_sent] <= now
        ):
            # Prompts share no prefix, like random ones: each repeats a token of its own.
            prompt = [n_sent] * load.input_tokens
            sent_at = arrivals[n_sent] if arrivals else now
            scheduler.add(_Simulated(n_sent, prompt, load.input_tokens, load.output_tokens, sent_at=sent_at))
            n_sent += 1
        if not scheduler.waiting and not scheduler.running:
            now = max(now, arrivals[n_sent])
            continue
        waited += sum(now - each.sent_at for each in scheduler.admit() if each.first_at is None)
        for each in scheduler.passes():
            context = statistics.mean(sequence.n_computed for sequence in each.sequences)
            if each.sequences[0].decodes:
                now += steps.decode_seconds(len(each.sequences), context)
            else:
                seconds = steps.prefill_seconds(each.n_new, context)
                now, prefilled = now + seconds, prefilled + seconds
            for sequence in each.sequences:
                scheduler.advance(sequence, each.n_new)
                if sequence.n_computed < len(sequence.tokens):
                    continue
                # It draws a token where it is computed to its end, and has been served with the last one.
                sequence.tokens.append(sequence.number)
                sequence.first_at = now if sequence.first_at is None else sequence.first_at
                if not sequence.wants_more:
                    scheduler.finish(sequence)
                    n_tokens, begun = sequence.max_new_tokens, sequence.first_at
                    ended.append(Served(begun - sequence.sent_at, (now - begun) / max(1, n_tokens - 1), n_tokens))
    return Simulation(tuple(ended), now, waited / load.requests, prefilled / now)


@dataclass(eq=False)
class _Simulated(ScheduledSequence):
    """A request of the simulation."""

    sent_at: float = field(kw_only=True)
    first_at: float | None = None


class _Timer:
    """Times passes of a model through a cache that holds zeros."""

    def __init__(self, model: Transformer, tokens: int, rows: int, kv: KVFormat, sampler: Sampler) -> None:
        self.model, self.sampler = model.eval(), sampler
        self.block_size = 16
        # Each row has blocks of its own, of which the last may be part empty.
        n_blocks = -(-tokens // self.block_size) + 256
        place = {"dtype": model.dtype, "device": model.device}
        self.cache = PagedCache(model.config, n_blocks, self.block_size, kv=kv, n_states=rows, **place)

    @torch.inference_mode()
    def seconds(self, rows: int, context: int, n_new: int) -> float:
        """Seconds of a pass and of sampling a token for each row, from a few repetitions."""
        each = -(-(context + n_new) // self.block_size)
        tables = [list(range(row * each, (row + 1) * each)) for row in range(rows)]
        tokens = torch.zeros(rows, n_new, dtype=torch.int64, device=self.cache.device)
        settings, histories = [Sampling(temperature=1.0, top_p=1.0)] * rows, [[0]] * rows

        def step() -> None:
            extending = self.cache.extend(tables, [context] * rows, [n_new] * rows, n_new)
            hidden = self.model.hidden(tokens, cache=extending)
            draw(self.model.logits_of(hidden[:, -1]).float(), settings, [0] * rows, histories)

        taken = [self.sampler.sample(step) for _ in range(1 + REPEATS)]
        return self.sampler.seconds(taken[1:])


def _between(known: dict[tuple[int, int], float], at: float, other: float) -> float:
    """Bilinear through the four known points; on a line or at a point where there are fewer."""
    firsts, seconds = sorted({first for first, _ in known}), sorted({second for _, second in known})
    along = [_line(seconds, [known[first, second] for second in seconds], other) for first in firsts]
    return _line(firsts, along, at)


def _line(places: list[int], values: list[float], at: float) -> float:
    if len(places) == 1:
        return values[0]
    return values[0] + (at - places[0]) * (values[1] - values[0]) / (places[1] - places[0])
