"""Seconds of each stage of a layout: what it computes, sends, and hides behind what it computes.

Ranks of tensor wait for each other before and after each pair of products (Korthikanti et al. 2022, section 4.2.2):
nothing hides it. A ring of context sends keys and values while it computes attention with those it has (Liu et al.
2023). Gathering and scattering of shards overlaps with the computation of the same pass, and lengthens it by
`Interconnect.slowdown`. Tokens that go to experts of other ranks are waited for.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from napkin.accounting.pipeline_schedules import PipelineSchedule, pipeline_schedule
from napkin.accounting.pipeline_simulation import StageSeconds
from napkin.distributed.ranks import experts_are_sharded
from napkin.hardware.cluster import Group, Interconnect
from napkin.model.config import ModelConfig
from napkin.planning.layouts.costs import BUCKET_BYTES, OUTSIDE_BYTES, Choice, LayoutCosts, Parameters
from napkin.planning.layouts.counted_parts import BlockKind, block_kinds
from napkin.planning.layouts.exchange import exchange_seconds
from napkin.planning.layouts.stack import Exchange, Stack
from napkin.recipe.layout import Layout
from napkin.train_step.compile import Recompute

Sender = Literal["tensor", "context", "expert", "shard", "data"]


@dataclass(frozen=True)
class StageContent:
    """The parts of a model that a stage holds; like stages cost alike."""

    blocks: tuple[tuple[BlockKind, int], ...]
    """The kinds of its blocks, and how many it has of each."""
    first: bool
    last: bool

    @property
    def n_blocks(self) -> int:
        """The number of its blocks."""
        return sum(number for _, number in self.blocks)


@dataclass
class Sends:
    """Seconds of collectives in the two passes of a micro-batch, by dimension."""

    exposed: dict[Sender, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    hidden: dict[Sender, float] = field(default_factory=lambda: defaultdict(float))

    def waited(self, sender: Sender, forward: float, backward: float) -> None:
        self.exposed[sender][0] += forward
        self.exposed[sender][1] += backward

    def overlapped(self, sender: Sender, backward: bool, seconds: float, computing: float, slowdown: float) -> None:
        """Hide as much as possible behind `computing` seconds, which become longer."""
        both = min(seconds, computing)
        self.exposed[sender][backward] += seconds - both + slowdown * both
        self.hidden[sender] += both - slowdown * both


@dataclass(frozen=True)
class StageTime:
    """One micro-batch in one stage."""

    content: StageContent
    compute: StageSeconds
    sends: Sends

    @property
    def seconds(self) -> StageSeconds:
        """Seconds with all that the stage waits for."""
        forward = sum(each[0] for each in self.sends.exposed.values())
        backward = sum(each[1] for each in self.sends.exposed.values())
        return self.compute + StageSeconds(forward, backward)


def stage_times(costs: LayoutCosts, choice: Choice, micro_batches: int) -> list[StageTime]:
    """The times of each stage, in the order of the forward pass. Raises NapkinError as `Layout.blocks_of_stages`."""
    contents = stage_contents(costs.model, choice.layout)
    times = {content: _stage_time(costs, choice, content, micro_batches) for content in dict.fromkeys(contents)}
    return [times[content] for content in contents]


def stage_contents(model: ModelConfig, layout: Layout) -> tuple[StageContent, ...]:
    """The parts of a model in each stage, in the order of the forward pass."""
    return _contents(block_kinds(model), layout.blocks_of_stages(model.n_layers))


@functools.lru_cache(maxsize=1024)
def _contents(kinds: tuple[BlockKind, ...], stages: tuple[range, ...]) -> tuple[StageContent, ...]:
    return tuple(
        StageContent(
            # In a fixed order, so that equal stages compare equal.
            tuple(sorted(Counter(kinds[blocks.start : blocks.stop]).items(), key=repr)),
            number == 0,
            number == len(stages) - 1,
        )
        for number, blocks in enumerate(stages)
    )


def groups(interconnect: Interconnect, layout: Layout) -> dict[str, Group]:
    """The ranks of each dimension, and where they are: neighbours in tensor are neighbours in a node."""
    tensor, context = layout.tensor, layout.context
    stride = tensor * context
    experts = layout.expert
    of_expert = 1 if layout.whole_experts else stride
    shards = layout.shard * context
    return {
        "tensor": interconnect.group(tensor),
        "context": interconnect.group(context, stride=tensor),
        "expert": interconnect.group(experts, stride=of_expert),
        "shard": interconnect.group(shards, stride=tensor),
        "shard of experts": interconnect.group(shards_of(layout)[1], stride=of_expert * experts),
        "replica": interconnect.group(layout.data, stride=stride * layout.shard),
        "data": interconnect.group(layout.data * context, stride=tensor),
        "data of experts": interconnect.group(max(1, replicas_of_experts(layout)), stride=of_expert * experts),
        "pipeline": interconnect.group(min(2, layout.pipeline), stride=layout.world_size // layout.pipeline),
    }


def replicas_of_experts(layout: Layout) -> int:
    """The number of ranks that hold the same experts, where nothing is sharded."""
    ranks = layout.data * layout.context * (layout.tensor if layout.whole_experts else 1)
    return ranks // layout.expert


def shards_of(layout: Layout, over_context: bool = False) -> tuple[int, int]:
    """Among how many ranks FSDP2 divides parameters: all but experts, and experts. `over_context` is whether ranks of
    context shard them where no others do."""
    if layout.shard == 1 and not (over_context and layout.context > 1):
        return 1, 1
    shards = layout.shard * layout.context
    if layout.expert == 1:
        return shards, shards
    if layout.whole_experts:
        return shards, max(1, shards * layout.tensor // layout.expert)
    return shards, shards // layout.expert if experts_are_sharded(layout) else 1


def is_sharded(costs: LayoutCosts, layout: Layout) -> bool:
    """True if ranks hold shards of parameters and gather them."""
    return shards_of(layout, costs.stack.shards_over_context)[0] > 1


def padded_parameters(costs: LayoutCosts, layout: Layout) -> Parameters:
    """Parameters of one rank of tensor and of expert before anything is sharded, as they are padded to be sharded."""
    shards = shards_of(layout, costs.stack.shards_over_context)
    return costs.padded(layout.tensor, layout.expert, *shards, layout.whole_experts)


def held_parameters(costs: LayoutCosts, layout: Layout, content: StageContent) -> tuple[int, int]:
    """Parameters of a stage on one rank before anything is sharded: all but experts, and experts."""
    each = padded_parameters(costs, layout)
    shared, experts = each.of_blocks(content.blocks)
    return shared + outside_parameters(costs, layout, content), experts


def own_parameters(costs: LayoutCosts, layout: Layout, contents: Iterable[StageContent]) -> float:
    """Parameters of some stages on one rank, its shards where they are sharded."""
    parameters = [held_parameters(costs, layout, content) for content in contents]
    shards, of_experts = shards_of(layout, costs.stack.shards_over_context)
    return sum(each[0] for each in parameters) / shards + sum(each[1] for each in parameters) / of_experts


def outside_parameters(costs: LayoutCosts, layout: Layout, content: StageContent) -> int:
    """Parameters of a stage's embedding and head; a head that is the embedding is held by the first and the last
    stage."""
    each = padded_parameters(costs, layout)
    twice = costs.model.tie_embeddings and content.last and not content.first
    return each.embedding * (content.first or twice) + each.head * content.last


def blocks_by_recompute(
    costs: LayoutCosts, choice: Choice, content: StageContent
) -> Iterator[tuple[BlockKind, Recompute, int]]:
    """The blocks of a stage, by their kinds and how they recompute."""
    every = costs.resolved.recipe.training.recompute_every
    for kind, number in content.blocks:
        again = -(-number // every) if choice.recompute != "none" else 0
        if again:
            yield kind, choice.recompute, again
        if number - again:
            yield kind, "none", number - again


def _stage_time(costs: LayoutCosts, choice: Choice, content: StageContent, micro_batches: int) -> StageTime:
    layout, size, interconnect = choice.layout, choice.size, costs.interconnect
    gathered = is_sharded(costs, layout) and costs.gather_bytes < costs.weight_bytes
    compute, sends = StageSeconds(), Sends()
    attention = [0.0, 0.0]
    whole = costs.gathered_activation_bytes(size)
    gather = scatter = 0.0
    if layout.tensor > 1:
        ranks = interconnect.group(layout.tensor)
        gather = interconnect.seconds("all_gather", whole, ranks)
        scatter = interconnect.seconds("reduce_scatter", whole, ranks)
    dispatch = combine = 0.0
    exchange = costs.stack.exchange
    if layout.expert > 1:
        experts = groups(interconnect, layout)["expert"]
        # Ranks of tensor each send a part of the sequence.
        tokens = costs.tokens(size) / layout.tensor
        dispatch, combine = exchange_seconds(
            interconnect, experts, costs.model, tokens, exchange, costs.activation_bytes
        )
    pairs = 1 if costs.model.block == "parallel" else 2
    for kind, recompute, times in blocks_by_recompute(costs, choice, content):
        of_part = costs.seconds(kind, size, recompute, gathered) * times
        compute += of_part
        if kind.experts:
            host = times * costs.host_seconds(kind, size, recompute)
            device = of_part.forward + of_part.of("backward") + times * 2 * (dispatch + combine)
            compute += of_part * max(0.0, (host - device) / device)
        forward, backward = costs.attention_seconds(kind, size, recompute)
        attention[0] += times * forward
        attention[1] += times * backward
        if layout.tensor > 1:
            both = pairs * gather + pairs * scatter
            selective = pairs * gather if costs.stack.gathers_again else 0.0
            again = {"none": 0.0, "selective": selective, "full": both}[recompute]
            backward = times * (both + again)
            tensor_sends(costs.stack, interconnect, layout.tensor, sends, of_part, times * both, backward)
        if kind.experts and layout.expert > 1:
            # Gradients of a token's results go the way of the token, those of the token the way of its results.
            sent_again = recompute == "full" or (recompute == "selective" and exchange.sent_again)
            again = dispatch + combine if sent_again else 0.0
            if recompute == "full" and costs.stack.stops_recomputation:
                again = dispatch
            waiting = exchange.synchronising_seconds
            forward = times * (dispatch + combine + waiting)
            backward = times * (dispatch + combine + again + (waiting if again else 0.0))
            compute += expert_sends(exchange, interconnect, sends, of_part, forward, backward)
    if layout.context > 1:
        _ring_sends(costs, choice, sends, content.n_blocks, attention)
        compute += _ring_merging(costs, choice) * content.n_blocks
    if content.first:
        compute += costs.seconds("embedding", size, "none", False)
    if content.last:
        compute += costs.head_seconds(size, choice.loss_chunk_size, "none")
    if layout.tensor > 1:
        _vocabulary_sends(costs, choice, content, sends, gather, scatter)
    if is_sharded(costs, layout) and layout.pipeline == 1:
        _shard_sends(costs, layout, content, sends, compute)
    if micro_batches > 1:
        # Shards add up what was scattered; in a pipeline gradients stay whole until the end of the step.
        parameters = sum(held_parameters(costs, layout, content))
        added = costs.accumulate_seconds(
            parameters if layout.pipeline > 1 else own_parameters(costs, layout, [content])
        )
        compute += StageSeconds(backward_weight=added * (micro_batches - 1) / micro_batches)
    return StageTime(content, compute, sends)


def _vocabulary_sends(
    costs: LayoutCosts, choice: Choice, content: StageContent, sends: Sends, gather: float, scatter: float
) -> None:
    """What ranks of tensor send for embedding and head, of whose rows of the vocabulary each has a part."""
    first, last, interconnect = content.first, content.last, costs.interconnect
    sends.waited("tensor", first * scatter + last * gather, first * gather + last * scatter)
    if last:
        # The largest logit, the sum of exponentials and the target's logit of each token.
        ranks = interconnect.group(choice.layout.tensor)
        sums = interconnect.seconds("all_reduce", 4 * costs.tokens(choice.size), ranks)
        sends.waited("tensor", 3 * sums, 0.0)


def _shard_sends(
    costs: LayoutCosts, layout: Layout, content: StageContent, sends: Sends, compute: StageSeconds
) -> None:
    """What shards gather and scatter, and copies of them reduce, while the stage computes."""
    gathering, again, scattering, replicas = _shard_seconds(costs, layout, content)
    backward = compute.backward_input + compute.backward_weight + compute.recompute
    slowdown = costs.interconnect.slowdown
    sends.overlapped("shard", False, gathering, compute.forward, slowdown)
    sends.overlapped("shard", True, again + scattering, backward, slowdown)
    sends.overlapped("data", True, replicas, max(0.0, backward - again - scattering), slowdown)


def tensor_sends(
    stack: Stack,
    links: Interconnect,
    tensor: int,
    sends: Sends,
    compute: StageSeconds,
    forward: float,
    backward: float,
) -> None:
    """Wait for collectives of ranks of tensor; where they are cut into as many pieces as ranks, all but the first piece
    hide behind the products of the previous one."""
    if not stack.overlaps_tensor:
        sends.waited("tensor", forward, backward)
        return
    first, slowdown = 1 / tensor, links.slowdown
    sends.waited("tensor", first * forward, first * backward)
    sends.overlapped("tensor", False, (1 - first) * forward, compute.forward, slowdown)
    sends.overlapped("tensor", True, (1 - first) * backward, compute.of("backward"), slowdown)


def expert_sends(
    exchange: Exchange, links: Interconnect, sends: Sends, compute: StageSeconds, forward: float, backward: float
) -> StageSeconds:
    """Wait for the exchanges of experts, or hide them behind the same blocks of another micro-batch, whose forward and
    backward passes take turns with this one's. Returns by how much computing is longer.

    Multiprocessors that only send are missing from what computes, all the time. Where none are set aside, the exchange
    lengthens what it hides behind as other collectives do.
    """
    if not exchange.behind_other_micro_batch:
        sends.waited("expert", forward, backward)
        return StageSeconds()
    taken = exchange.multiprocessors / (links.multiprocessors or math.inf)
    longer = compute * (taken / (1 - taken))
    both = compute.forward + compute.of("backward") + longer.forward + longer.of("backward")
    share = min(1.0, both / (forward + backward)) if forward + backward else 0.0
    slowdown = 0.0 if taken else links.slowdown
    sends.overlapped("expert", False, forward, share * forward, slowdown)
    sends.overlapped("expert", True, backward, share * backward, slowdown)
    return longer


def _ring_sends(costs: LayoutCosts, choice: Choice, sends: Sends, blocks: int, attention: Sequence[float]) -> None:
    """Keys and values go around in context - 1 turns, in the backward pass their gradients too."""
    layout, model, interconnect = choice.layout, costs.model, costs.interconnect
    group = interconnect.group(layout.context, stride=layout.tensor)
    heads = max(1, model.resolved_n_kv_heads // layout.tensor)
    sent = 2 * costs.tokens(choice.size) * heads * model.resolved_head_dim * costs.activation_bytes
    turns = layout.context - 1
    for backward in (False, True):
        sending = blocks * turns * interconnect.seconds("send", sent * (1 + backward), group)
        behind = attention[backward] * turns / layout.context
        sends.overlapped("context", backward, sending, behind, interconnect.slowdown)


def _ring_merging(costs: LayoutCosts, choice: Choice) -> StageSeconds:
    """Seconds of a block's merging: each turn's outputs are added to those so far, in fp32, and its gradients
    backward."""
    model, turns = costs.model, choice.layout.context - 1
    heads = model.n_heads // choice.layout.tensor
    numbers = costs.tokens(choice.size) * heads * model.resolved_head_dim
    seconds = turns * (_MERGED_BYTES * numbers / costs.ceilings.bandwidth(_MERGED_BYTES * numbers))
    launches = turns * _MERGING_CALLS * costs.ceilings.seconds_per_operator
    return StageSeconds(seconds + launches, 2 * seconds + launches)


_MERGED_BYTES = 16
"""Bytes per number of a turn's output: read and rescaled beside the sum so far, which is read and written."""
_MERGING_CALLS = 6


def _shard_seconds(costs: LayoutCosts, layout: Layout, content: StageContent) -> tuple[float, float, float, float]:
    """Seconds of gathering all parameters of a stage, gathering its blocks again, scattering gradients, and averaging
    them over replicas of the shards."""
    gathering = again = scattering = replicas = 0.0
    interconnect, process_groups = costs.interconnect, groups(costs.interconnect, layout)
    each, apart = padded_parameters(costs, layout), layout.expert > 1
    # What is gathered together: how often, how many parameters, and among which ranks; the last entry is what lies
    # outside of blocks.
    units = []
    for kind, times in content.blocks:
        units.append((times, each.shared[kind] + (0 if apart else each.experts[kind]), process_groups["shard"]))
        if apart and each.experts[kind]:
            units.append((times, each.experts[kind], process_groups["shard of experts"]))
    units.append((1, outside_parameters(costs, layout, content), process_groups["shard"]))
    for number, (times, parameters, group) in enumerate(units, start=1):
        outside = number == len(units)
        gather_bytes = (OUTSIDE_BYTES if outside else costs.gather_bytes) * parameters
        reduce_bytes = (OUTSIDE_BYTES if outside else costs.reduce_bytes) * parameters
        seconds = times * interconnect.seconds("all_gather", gather_bytes, group)
        gathering += seconds
        # Parameters outside of blocks stay gathered between the two passes.
        again += 0.0 if outside else seconds
        scattering += times * interconnect.seconds("reduce_scatter", reduce_bytes, group)
        if layout.data > 1:
            replicas += times * interconnect.seconds("all_reduce", reduce_bytes / group.size, process_groups["replica"])
    return gathering, again, scattering, replicas


def once_per_step(costs: LayoutCosts, layout: Layout, first: StageTime) -> dict[Sender, tuple[float, float]]:
    """Exposed and hidden seconds, by dimension, of what is sent once per step: in a pipeline, all that averages
    gradients; otherwise the all-reduce of ranks that hold parameters whole, behind the last backward pass.

    They are those of the first stage, whose backward pass ends last.
    """
    slowdown, compute = costs.interconnect.slowdown, first.compute
    if is_sharded(costs, layout):
        if layout.pipeline == 1:
            return {}
        gathering, _, scattering, replicas = _shard_seconds(costs, layout, first.content)
        behind = min(gathering, compute.forward)
        exposed = gathering - behind + slowdown * behind + scattering
        return {"shard": (exposed, behind - slowdown * behind), "data": (replicas, 0.0)}
    if layout.shard_optimizer and costs.stack.gathers_behind_compute:
        return _shared_optimizer_sends(costs, layout, first)
    averaging = 0.0
    if layout.data * layout.context > 1:
        process_groups, parameters = groups(costs.interconnect, layout), held_parameters(costs, layout, first.content)
        for number, group in zip(parameters, (process_groups["data"], process_groups["data of experts"]), strict=True):
            if number:
                in_all = costs.weight_bytes * number
                buckets = -(-in_all // BUCKET_BYTES)
                averaging += buckets * costs.interconnect.seconds("all_reduce", in_all / buckets, group)
    behind = min(averaging, compute.of("backward")) if layout.pipeline == 1 else 0.0
    return {"data": (averaging - behind + slowdown * behind, behind - slowdown * behind)}


def _shared_optimizer_sends(costs: LayoutCosts, layout: Layout, first: StageTime) -> dict[Sender, tuple[float, float]]:
    """The same where ranks of data share the optimizer's state: gradients are scattered behind the stage's last
    backward pass, updated parameters gathered behind the first forward pass."""
    scattering = gathering = 0.0
    process_groups = groups(costs.interconnect, layout)
    both = held_parameters(costs, layout, first.content)
    for parameters, group in zip(both, (process_groups["data"], process_groups["data of experts"]), strict=True):
        scattering += costs.interconnect.seconds("reduce_scatter", costs.reduce_bytes * parameters, group)
        gathering += costs.interconnect.seconds("all_gather", costs.activation_bytes * parameters, group)
    sends = Sends()
    sends.overlapped("data", True, scattering, first.compute.of("backward"), costs.interconnect.slowdown)
    sends.overlapped("data", False, gathering, first.compute.forward, costs.interconnect.slowdown)
    return {"data": (sum(sends.exposed["data"]), sends.hidden["data"])}


def send_seconds(costs: LayoutCosts, choice: Choice) -> float:
    """Seconds of sending one micro-batch's hidden states to the next stage; ranks of tensor send a part of the sequence
    each."""
    sent = costs.tokens(choice.size) * costs.model.d_model * costs.weight_bytes / choice.layout.tensor
    return costs.interconnect.seconds("send", sent, groups(costs.interconnect, choice.layout)["pipeline"])


@functools.lru_cache(maxsize=512)
def schedule_of(schedule: str, pipeline: int, stages_per_rank: int, micro_batches: int) -> PipelineSchedule:
    return pipeline_schedule(schedule, pipeline, micro_batches, stages_per_rank=stages_per_rank)


@functools.lru_cache(maxsize=1024)
def stages_of_ranks(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The stages that each rank of the pipeline holds, in order."""
    if layout.pipeline == 1:
        return ((0,),)
    stages = range(layout.stages)
    ranks: list[list[int]] = [[] for _ in range(layout.pipeline)]
    for stage in stages:
        turn, place = divmod(stage, layout.pipeline)
        back = layout.schedule == "zb-v" and turn % 2
        ranks[layout.pipeline - 1 - place if back else place].append(stage)
    return tuple(map(tuple, ranks))
