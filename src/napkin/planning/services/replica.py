"""Seconds of a server's steps, and its latencies and throughput under a steady load.

A step computes one token of each sequence that is being generated and, where requests are waiting, prompts too. It
takes the sum of: what every step and layer takes; its products, bound by the weights' bytes or by FLOPs; the cache's
bytes; attention of prompts; elementwise operators; all-reduces. The rates are those of the datasheet times the
constants of napkin.hardware.service_efficiency.

What a model computes, reads and keeps when it serves is counted from a prefill and a decode step of the real model
(`count_work`), traced on fake tensors through its KV cache, as a training step is. Blocks are alike, so two models, the
shallowest that has all kinds of blocks and one with a block more, give the operators of any depth.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError
from napkin.hardware.ceilings import efficiency_of
from napkin.hardware.device import Device
from napkin.hardware.service_efficiency import ServiceEfficiency
from napkin.hardware.target import CudaTarget
from napkin.inference.paged_cache import state_bytes_per_sequence
from napkin.inference.speculation import expected_tokens
from napkin.model.config import ModelConfig
from napkin.model.config_checks import mixer_pattern
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer
from napkin.planning.services.server_schedule import Load, Timeline, simulate_schedule

TRACED_TOKENS = 512
"""Tokens of the traced prompt, and in the cache of the longer of two decode steps: FLOPs of products grow with the
tokens, of attention with the pairs of tokens, and what a decode step reads with the tokens in the cache."""
_BYTES = 2
"""Bytes of a number in bf16."""
_WHOLE = ("norms", "other")
"""Components whose elementwise operators each rank of tensor computes in full: norms and the residual stream."""


@dataclass(frozen=True)
class ServiceWork:
    """The FLOPs and bytes of a model that serves, for any prompt and any number of sequences."""

    parameters: int
    n_layers: int
    d_model: int
    n_kv_heads: int
    """Heads that the cache holds; of latent attention one, which every rank of tensor has."""
    kv_numbers: int
    """Numbers that one token leaves in the cache, in all layers."""
    kv_reads: float
    """Times that a decode step reads them: more than once where layers share keys and values."""
    state_bytes: int
    """Bytes of a sequence's states, read and written in each decode step, however long it is; 0 without such layers."""
    state_flops: float
    """FLOPs of one token in the recurrence of all layers with a state."""
    prompt_state_flops: float
    """FLOPs of the state layers for a token of a prompt, which is scanned by chunks."""
    window: int | None
    """Most tokens of a sequence that a block with a window keeps; None is all."""
    windowed_share: float
    """Fraction of the blocks that have the window."""
    block_weights: int
    """Numbers in the matrices of all blocks that a token is multiplied with."""
    expert_weights: int
    """Numbers of `block_weights` in routed experts."""
    n_experts: int
    experts_per_token: int
    head_weights: int
    """Numbers in the output head, which only the last position of a prompt is multiplied with."""
    products: int
    """Number of matrix products with weights in a step, without the head's."""
    pair_flops: float
    """FLOPs of attention per pair of a query and a key that it sees, in all layers, in a decode step."""
    prompt_pair_flops: float
    """FLOPs per pair in a prompt: fewer with latent attention, which computes each head's keys then."""
    whole_bytes: float
    """Bytes per token that unfused elementwise operators read and write, of norms and the residual stream."""
    divided_bytes: float
    """Bytes per token that such operators move within attention and feed-forward layers, divided among tensor ranks."""

    @property
    def compares_latents(self) -> bool:
        """True if a decode step compares queries with the latents of latent attention."""
        return self.pair_flops > self.prompt_pair_flops

    def pairs(self, tokens: float) -> float:
        """Pairs of a query and a key that a causal mask leaves of a prompt; the mean of blocks with and without the
        window."""
        everything = tokens * (tokens + 1) / 2
        if self.window is None or tokens <= self.window:
            return everything
        seen = self.window * (self.window + 1) / 2 + (tokens - self.window) * self.window
        return self.windowed_share * seen + (1 - self.windowed_share) * everything

    def kept(self, context: Any) -> Any:
        """Tokens in the cache of a sequence of so many tokens; the mean of blocks with and without the window."""
        if self.window is None:
            return context
        return self.windowed_share * np.minimum(context, self.window) + (1 - self.windowed_share) * context

    def prefill_flops(self, tokens: float) -> float:
        """FLOPs of a prompt: all positions through the blocks, the last through the head."""
        per_token = 2 * self.block_weights + self.prompt_state_flops
        return per_token * tokens + 2 * self.head_weights + self.prompt_pair_flops * self.pairs(tokens)

    def decode_flops(self, sequences: float, context: float) -> float:
        """FLOPs of one token of each sequence, with so many in the cache."""
        per_token = 2 * (self.block_weights + self.head_weights) + self.pair_flops * self.kept(context)
        return sequences * (per_token + self.state_flops)

    def weights_read(self, tokens: Any) -> Any:
        """Numbers of the blocks' matrices that a step of so many tokens reads: of experts, those that any token chose,
        if each is as likely as another."""
        if not self.n_experts:
            return float(self.block_weights)
        all_experts = self.expert_weights * self.n_experts / self.experts_per_token
        chosen = 1 - (1 - self.experts_per_token / self.n_experts) ** np.maximum(1.0, tokens)
        return self.block_weights - self.expert_weights + all_experts * chosen


@functools.lru_cache(maxsize=16)
def count_work(config: ModelConfig) -> ServiceWork:
    """Count a prefill and two decode steps of the model, without allocating it."""
    # A period of layers is one, those that share keys and values, or a pattern of mixers.
    period = config.kv_sharing if config.is_hybrid is False else len(mixer_pattern(config.mixers))
    layers = config.n_dense_layers + 1
    layers += (config.n_layers - layers) % period
    shallow, deep = (_figures(dataclasses.replace(config, n_layers=n)) for n in (layers, layers + period))
    # Figures of the model of all layers, from those of two depths.
    more = (config.n_layers - layers) / period
    whole = {name: first + more * (deep[name] - first) for name, first in shallow.items()}
    return ServiceWork(
        parameters=round(whole["parameters"]),
        n_layers=config.n_layers,
        d_model=config.d_model,
        n_kv_heads=config.cached_widths[0],
        kv_numbers=config.cached_numbers,
        kv_reads=1.0 if config.kv_sharing == 1 else config.n_attention_layers / config.n_kv_layers,
        state_bytes=state_bytes_per_sequence(config, torch.bfloat16) if config.has_states else 0,
        state_flops=whole["state_flops"],
        prompt_state_flops=whole["prompt_state_flops"],
        window=config.attention_window,
        windowed_share=sum(window is not None for window in config.attention_windows) / config.n_layers,
        # A decode step has one token, so that the FLOPs of products are twice the numbers of their matrices.
        block_weights=round(whole["block_flops"]) // 2,
        expert_weights=round(whole["expert_flops"]) // 2,
        n_experts=config.n_experts,
        experts_per_token=config.experts_per_token if config.n_experts else 0,
        head_weights=round(whole["head_flops"]) // 2,
        products=round(whole["products"]),
        pair_flops=whole["pair_flops"],
        prompt_pair_flops=whole["prompt_pair_flops"],
        whole_bytes=whole["whole_bytes"],
        divided_bytes=whole["divided_bytes"],
    )


def _figures(config: ModelConfig) -> dict[str, float]:
    """Counted figures of a model of some depth; each is linear in the number of blocks."""
    prefill, short, long = (
        count_forward(config, new, cached) for new, cached in ((TRACED_TOKENS, 0), (1, 0), (1, TRACED_TOKENS))
    )
    products = [row for row in short.rows if row.contraction and not row.of_activations]
    blocks = [row for row in products if row.component != "head"]
    # The layers of a mixer are modules of their own; the steps of its scan multiply activations.
    scans = [
        [row.flops for row in each.rows if row.of_activations and ".mixer" in row.module] for each in (prefill, short)
    ]
    prompt_scan, step_scan = map(sum, scans)
    touched = {True: 0, False: 0}
    for row in prefill.rows:
        if not row.contraction and row.component != "embedding":
            touched[row.component in _WHOLE] += row.bytes_read + row.bytes_written
    return {
        "parameters": short.parameters,
        "block_flops": sum(row.flops for row in blocks),
        "expert_flops": sum(row.flops for row in blocks if ".experts" in row.module),
        "head_flops": sum(row.flops for row in products if row.component == "head"),
        "products": len(blocks),
        "pair_flops": (long.attention_flops - short.attention_flops) / TRACED_TOKENS,
        "prompt_pair_flops": (prefill.attention_flops - prompt_scan) / TRACED_TOKENS**2,
        "state_flops": step_scan,
        "prompt_state_flops": prompt_scan / TRACED_TOKENS,
        "whole_bytes": touched[True] / TRACED_TOKENS,
        "divided_bytes": touched[False] / TRACED_TOKENS,
    }


def count_forward(config: ModelConfig, new: int, cached: int = 0) -> Ledger:
    """The ledger of a forward pass in bf16 without gradients, over `new` tokens of a sequence of which the cache holds
    `cached`; the head reads the last position.

    Attention is counted as one kernel, without a window: what a window leaves of pairs and cache, `ServiceWork` knows.
    """
    config = dataclasses.replace(
        config,
        context_length=max(new + cached, config.context_length),
        attention="sdpa",
        attention_softcap=None,
        attention_window=None,
        full_attention_every=None,
        # The mask is part of a server's kernel too.
        positions="none" if config.positions == "alibi" else config.positions,
    )

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(model, Transformer)
        cache.lengths = [cached]
        with torch.no_grad():
            return model.logits_of(model.hidden(ids, cache=cache.extend(new))[:, -1:])

    with FakeTensorMode():
        model = Transformer(config, dtype=torch.bfloat16).eval()
        cache = ContiguousCache(config, capacity=new + cached, dtype=torch.bfloat16)
        ids = torch.zeros(1, new, dtype=torch.int64)
        return count(model, ids, step, target=CudaTarget(), warm_up=0)


def count_parameters(config: ModelConfig) -> int:
    """Parameters of a whole model, without allocating them; the embedding is the head, if they are tied."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


WeightFormat = Literal["bf16", "fp8", "fp8_block", "nvfp4"]
KVFormat = Literal["bf16", "fp8"]

WEIGHT_BYTES: dict[WeightFormat, float] = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1 + 4 / 128**2, "nvfp4": 4.5 / 8}
"""Per number of the blocks' matrices, scales included; embedding and head stay in bf16."""
KV_BYTES: dict[KVFormat, float] = {"bf16": 2.0, "fp8": 1.0}
PRODUCT_FORMATS: dict[WeightFormat, str] = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
"""Formats that the products are computed in."""
OTHER_BYTES = {"rest": 2_000_000_000, "all": 5_000_000_000}
"""Bytes of a device beside weights and cache: activations, graphs, collectives' buffers. Where a server uses a share
of all memory, as vLLM, they and the CUDA context are a part of that. Approximate."""


@dataclass(frozen=True)
class DraftWork:
    """A smaller model that proposes tokens, several of which the model tests in one pass.

    A pass is expected to give (1 - α^(γ + 1)) / (1 - α) tokens of each sequence, where α is the chance that a proposal
    is accepted and γ the number of proposals, if each is accepted or not by itself (Leviathan et al. 2023, equation 1).
    """

    work: ServiceWork
    acceptance: float
    proposed: int

    @property
    def tokens_per_pass(self) -> float:
        return expected_tokens(self.acceptance, self.proposed)


@dataclass(frozen=True)
class Replica:
    """A model on some ranks of tensor, as one server runs it; bytes are of one device.

    With a draft, which is in bf16 and divided like the model, a step is the share of a pass that one token takes on the
    average: the draft computes the proposals one after another, then the model tests them.
    """

    work: ServiceWork
    device: Device
    server: ServiceEfficiency
    tensor: int = 1
    weights: WeightFormat = "bf16"
    kv: KVFormat = "bf16"
    draft: DraftWork | None = None

    @cached_property
    def drafting(self) -> "Replica | None":
        """The draft on the same ranks, as a replica without a draft."""
        if self.draft is None:
            return None
        return dataclasses.replace(self, work=self.draft.work, weights="bf16", draft=None)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights on one rank, those of a draft included."""
        return self.model_weight_bytes + (0.0 if self.drafting is None else self.drafting.weight_bytes)

    @cached_property
    def kv_token_bytes(self) -> float:
        """Bytes that one token leaves in a rank's cache, those of a draft included."""
        return self.model_kv_token_bytes + (0.0 if self.drafting is None else self.drafting.kv_token_bytes)

    @cached_property
    def model_weight_bytes(self) -> float:
        """Bytes of the model's weights on one rank."""
        work = self.work
        experts = work.expert_weights * work.n_experts / work.experts_per_token if work.n_experts else 0
        matrices = work.block_weights - work.expert_weights + experts
        return (matrices * WEIGHT_BYTES[self.weights] + 2 * (work.parameters - matrices)) / self.tensor

    @cached_property
    def model_kv_token_bytes(self) -> float:
        """Bytes that one token of the model leaves in a rank's cache; each rank has at least one of its heads."""
        heads = math.ceil(self.work.n_kv_heads / self.tensor) / self.work.n_kv_heads
        return self.work.kv_numbers * heads * KV_BYTES[self.kv]

    @cached_property
    def kv_pool_bytes(self) -> float:
        """The bytes left for the KV cache: below 0 where the weights do not fit."""
        if self.server.memory_share_is_of_rest:
            rest = self.device.usable_bytes - self.weight_bytes - OTHER_BYTES["rest"]
            return self.server.memory_share * rest if rest > 0 else rest
        return self.server.memory_share * self.device.memory_bytes - self.weight_bytes - OTHER_BYTES["all"]

    def sequences(self, tokens: float) -> int:
        """Return the number of sequences of this length that fit."""
        return max(0, math.floor(self.kv_pool_bytes / self.sequence_bytes(tokens)))

    def sequence_bytes(self, tokens: float) -> float:
        """Bytes of a rank's memory that a sequence of so many tokens takes: keys and values, and states."""
        return self.kv_token_bytes * self.work.kept(tokens) + self.work.state_bytes

    @cached_property
    def product_peak(self) -> float:
        """Dense FLOP/s of the format of the products; fp16 takes the place of bf16 on devices without it."""
        name = PRODUCT_FORMATS[self.weights]
        return self._attention_peak if name == "bf16" else self.device.peak(name)

    @property
    def ridge(self) -> float:
        """FLOPs per byte below which the device is bound by bytes, by the datasheet (Williams et al. 2009)."""
        return self.product_peak / self.device.memory_bandwidth

    def step_bytes(self, sequences: float, context: float, prompt_tokens: float = 0.0) -> float:
        """Bytes of weights and cache that a step reads; of a whole pass and its proposals, with a draft."""
        proposals = 0.0
        if self.draft is not None and self.drafting is not None:
            proposals = self.draft.proposed * self.drafting.step_bytes(sequences, context)
            prompt_tokens += self.draft.proposed * sequences
        read = self.work.weights_read(sequences + prompt_tokens) * WEIGHT_BYTES[self.weights]
        head = 2.0 * self.work.head_weights
        per_sequence = (
            self.work.kept(context) * self.model_kv_token_bytes * self.work.kv_reads + 2 * self.work.state_bytes
        )
        return proposals + (read + head) / self.tensor + sequences * per_sequence

    def pass_flops(self, sequences: float, context: float) -> float:
        """FLOPs of the step, or of the pass and its proposals, whose bytes are `step_bytes`, of all ranks together."""
        if self.draft is None:
            return self.work.decode_flops(sequences, context)
        tested = self.work.decode_flops(sequences * (self.draft.proposed + 1), context)
        return tested + self.draft.proposed * self.draft.work.decode_flops(sequences, context)

    def step_seconds(self, sequences: Any, context: Any, prompt_tokens: Any = 0.0, pairs: Any = 0.0) -> Any:
        """Seconds of a step of one token for each of `sequences`, each with `context` tokens in the cache, and of
        prompts of `prompt_tokens` in all, whose queries and keys make `pairs`: of numbers, or arrays of steps."""
        alone = self.model_seconds(sequences, context, prompt_tokens, pairs)
        if self.draft is None or self.drafting is None:
            return alone
        # Prompts go through both models; what they add to a step of the model stays what it is.
        proposals, tested = self.proposal_seconds(sequences, context), self.tested_seconds(sequences, context)
        prompts = np.where(np.greater(prompt_tokens, 0), self.drafting.model_seconds(0.0, 0.0, prompt_tokens, pairs), 0)
        per_token = (proposals + tested) / self.draft.tokens_per_pass
        shared = np.where(np.greater(sequences, 0), per_token + alone - self.model_seconds(sequences, context), alone)
        return shared + prompts

    def proposal_seconds(self, sequences: Any, context: Any) -> Any:
        """Seconds of the draft's steps before a pass of the model; 0 without a draft."""
        if self.draft is None or self.drafting is None:
            return 0.0
        return self.draft.proposed * self.drafting.model_seconds(sequences, context)

    def tested_seconds(self, sequences: Any, context: Any) -> Any:
        """Seconds of a pass of the model over a token of each sequence and its proposals, which are like tokens of a
        prompt that see all of the sequence."""
        proposals = 0 if self.draft is None else self.draft.proposed
        new = proposals * sequences
        return self.model_seconds(sequences, context, new, new * self.work.kept(context))

    def model_seconds(self, sequences: Any, context: Any, prompt_tokens: Any = 0.0, pairs: Any = 0.0) -> Any:
        """`step_seconds` of the model without a draft."""
        work, server, tensor = self.work, self.server, self.tensor
        tokens = sequences + prompt_tokens
        bandwidth = self.device.memory_bandwidth
        weights = work.weights_read(tokens) * WEIGHT_BYTES[self.weights] / tensor / (bandwidth * server.weight_share)
        # The cubic mean of both bounds: near the ridge a product takes a quarter longer than either.
        flops = 2 * work.block_weights * tokens / tensor / (self.product_peak * server.product_share)
        products = np.cbrt(weights * weights * weights + flops * flops * flops)
        head = 2 * work.head_weights / tensor / (bandwidth * server.weight_share)
        kept, rate = work.kept(context), tensor * self._attention_peak * server.attention_share
        per_sequence = kept * self.model_kv_token_bytes * work.kv_reads + 2 * work.state_bytes
        cache = sequences * per_sequence / (bandwidth * server.kv_share)
        if work.compares_latents:
            # All heads read the same bytes: the products may take longer.
            cache = np.maximum(cache, sequences * kept * work.pair_flops / rate)
        attention = (work.prompt_pair_flops * pairs + work.prompt_state_flops * prompt_tokens) / rate
        touched = tokens * (work.whole_bytes + work.divided_bytes / tensor)
        elementwise = server.activation_share * touched / bandwidth
        fixed = work.n_layers * server.layer_seconds + server.step_seconds + server.sequence_seconds * sequences
        if self.weights == "nvfp4":
            # A kernel before each product finds the scales of its input.
            fixed += work.products * efficiency_of(self.device).kernel_seconds
        return fixed + products + head + cache + attention + elementwise + self._collectives_seconds(tokens)

    @cached_property
    def _attention_peak(self) -> float:
        return self.device.peak(sixteen_bits(self.device))

    @cached_property
    def _link_bandwidth(self) -> float:
        """The bandwidth that collectives reach in training."""
        device = self.device
        bridged = device.link is None or ("bridge" in device.link and self.tensor > 2)
        link = device.host_bandwidth if bridged else device.link_bandwidth
        if link is None:
            raise NapkinError(f"{device.name}: its link's bandwidth is not known, so that --tensor can only be 1")
        return efficiency_of(device).link_share * link

    def _collectives_seconds(self, tokens: Any) -> Any:
        """Two all-reduces per layer of the residual stream of all tokens, in bf16: of few bytes each rank sends to each
        other at once, of many in a ring of two rounds."""
        if self.tensor == 1:
            return 0.0
        server, ranks = self.server, self.tensor
        message = 2 * self.work.d_model * tokens
        direct = (ranks - 1) * message / (self._link_bandwidth * server.direct_share)
        ring = 2 * (ranks - 1) / ranks * message / (self._link_bandwidth * server.ring_share)
        sending = np.minimum(direct, 3 * server.collective_seconds + ring)
        return 2 * self.work.n_layers * (server.collective_seconds + sending)


def sixteen_bits(device: Device) -> str:
    """The format of 16 bits that a device multiplies in: bf16, or fp16 where it has no bf16."""
    return "fp16" if "bf16" not in device.peaks and "fp16" in device.peaks else "bf16"


@dataclass(frozen=True)
class ServiceTimes:
    """Mean latencies of the requests of a load, in seconds, and their parts."""

    time_to_first_token: float
    time_per_output_token: float
    running: float
    """Mean number of sequences that are generated at a time."""
    decode_step: float
    """Seconds of a step without a prompt."""
    waiting: float
    """Mean seconds until a request is among those that are computed."""
    busy: float
    """Fraction of the time in which prompts are computed."""


def timeline_of(replica: Replica, load: Load) -> Timeline:
    """The steps of a replica under a load.

    Raises NapkinError where not one sequence fits.
    """
    tokens = load.input_tokens + load.output_tokens
    if replica.sequences(tokens) < 1:
        raise NapkinError(
            f"{replica.device.name}: a sequence of {tokens:,.0f} tokens does not fit beside the weights: use more "
            "ranks of tensor or narrower weights"
        )
    # With a window, a sequence keeps fewer tokens than it has; states are the same for any number of them.
    per_token = replica.sequence_bytes(tokens) / tokens
    cache_tokens = max(tokens, replica.kv_pool_bytes / per_token)
    return simulate_schedule(load, replica.server.schedule, cache_tokens, replica.work.pairs, replica.step_seconds)


def times_of(replica: Replica, load: Load, timeline: Timeline) -> ServiceTimes:
    """Price the steps of a load, and take the means over its requests."""
    served = timeline.priced(replica.step_seconds)
    weights = load.weights(timeline.wave)
    around = replica.server.request_seconds
    return ServiceTimes(
        float(np.average(served.first_token, weights=weights)) + around,
        float(np.average(served.per_token, weights=weights)),
        running=served.running,
        decode_step=float(replica.step_seconds(served.running, load.input_tokens + load.output_tokens / 2)),
        waiting=float(np.average(served.waiting, weights=weights)),
        busy=served.in_prompts / served.seconds,
    )


def tokens_per_second(load: Load, times: ServiceTimes, ttft: float = 1.0, tpot: float = 1.0) -> float:
    """Output tokens of all clients, each of which has one request in flight (Little's law); with factors of both
    times."""
    assert load.concurrency is not None
    request = ttft * times.time_to_first_token + (load.output_tokens - 1) * tpot * times.time_per_output_token
    return load.concurrency * load.output_tokens / request
