"""Seconds of each stage of a layout for one micro-batch: what it computes, sends, and hides behind what it computes.

Ranks of tensor wait for each other before and after each pair of products (Korthikanti et al. 2022, section 4.2.2):
nothing hides it. A ring of context sends keys and values while it computes attention with those it has (Liu et al.
2023). Gathering and scattering of shards overlaps with the computation of the same pass, and lengthens it by
`Interconnect.slowdown`. Tokens that go to experts of other ranks are waited for.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from napkin.accounting.pipeline_simulation import StageSeconds
from napkin.distributed.mesh import experts_are_sharded
from napkin.hardware.cluster import Group, Interconnect
from napkin.planning.layouts.costs import BUCKET_BYTES, OUTSIDE_BYTES, Choice, LayoutCosts, Parameters
from napkin.recipe.layout import Layout
from napkin.train_step.compile import Recompute

Sender = Literal["tensor", "context", "expert", "shard", "data"]


@dataclass(frozen=True)
class StageContent:
    """The parts of a model that a stage holds; like stages cost alike."""

    dense: int
    """Blocks without experts in a model that has some."""
    blocks: int
    first: bool
    last: bool


@dataclass
class Sends:
    """Seconds of collectives in the two passes of a micro-batch, by dimension."""

    exposed: dict[Sender, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    hidden: dict[Sender, float] = field(default_factory=lambda: defaultdict(float))

    def waited(self, sender: Sender, backward: bool, seconds: float) -> None:
        """Nothing is computed meanwhile."""
        self.exposed[sender][backward] += seconds

    def overlapped(self, sender: Sender, backward: bool, seconds: float, computing: float, slowdown: float) -> None:
        """Hide as much as possible behind `computing` seconds, which it lengthens."""
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


def contents_of(layout: Layout, n_layers: int, n_dense: int) -> list[StageContent]:
    """The content of each stage. Raises NapkinError as `Layout.blocks_of_stages`."""
    stages = layout.blocks_of_stages(n_layers)
    found: list[StageContent] = []
    for number, blocks in enumerate(stages):
        dense = max(0, min(blocks.stop, n_dense) - blocks.start)
        found.append(StageContent(dense, len(blocks) - dense, number == 0, number == len(stages) - 1))
    return found


def stage_times(costs: LayoutCosts, choice: Choice, micro_batches: int) -> list[StageTime]:
    """The times of each stage, in the order of the forward pass."""
    model = costs.model
    contents = contents_of(choice.layout, model.n_layers, model.n_dense_layers if model.n_experts else 0)
    times = {content: _stage_time(costs, choice, content, micro_batches) for content in dict.fromkeys(contents)}
    return [times[content] for content in contents]


def groups(interconnect: Interconnect, layout: Layout) -> dict[str, Group]:
    """The ranks of each dimension, and where they are: neighbours in tensor are neighbours in a node."""
    tensor, context = layout.tensor, layout.context
    stride = tensor * context
    experts = layout.expert
    shards = layout.shard * context
    return {
        "tensor": interconnect.group(tensor),
        "context": interconnect.group(context, stride=tensor),
        "expert": interconnect.group(experts, stride=stride),
        "shard": interconnect.group(shards, stride=tensor),
        "shard of experts": interconnect.group(shards_of(layout)[1], stride=tensor * experts),
        "replica": interconnect.group(layout.data, stride=stride * layout.shard),
        "data": interconnect.group(layout.data * context, stride=tensor),
        "data of experts": interconnect.group(max(1, layout.data * context // experts), stride=tensor * experts),
        "pipeline": interconnect.group(min(2, layout.pipeline), stride=layout.world_size // layout.pipeline),
    }


def shards_of(layout: Layout) -> tuple[int, int]:
    """Among how many ranks FSDP2 divides parameters: all but experts, and experts."""
    if layout.shard == 1:
        return 1, 1
    shards = layout.shard * layout.context
    if layout.expert == 1:
        return shards, shards
    return shards, shards // layout.expert if experts_are_sharded(layout) else 1


def padded_parameters(costs: LayoutCosts, layout: Layout) -> Parameters:
    """Parameters of one rank of tensor and of expert before anything is sharded, as they are padded to be sharded."""
    return costs.padded(layout.tensor, layout.expert, *shards_of(layout))


def held_parameters(costs: LayoutCosts, layout: Layout, content: StageContent) -> tuple[int, int]:
    """Parameters of a stage on one rank before anything is sharded: all but experts, and experts."""
    each = padded_parameters(costs, layout)
    shared = each.dense * content.dense + each.block * content.blocks + outside_parameters(costs, layout, content)
    return shared, each.experts * content.blocks


def own_parameters(costs: LayoutCosts, layout: Layout, contents: Iterable[StageContent]) -> float:
    """Parameters of some stages on one rank, its shards where they are sharded."""
    held = [held_parameters(costs, layout, content) for content in contents]
    shards, of_experts = shards_of(layout)
    return sum(each[0] for each in held) / shards + sum(each[1] for each in held) / of_experts


def outside_parameters(costs: LayoutCosts, layout: Layout, content: StageContent) -> int:
    """Parameters of a stage's embedding and head; a head that is the embedding is held by the first and the last
    stage."""
    each = padded_parameters(costs, layout)
    twice = costs.model.tie_embeddings and content.last and not content.first
    return each.embedding * (content.first or twice) + each.head * content.last


def _stage_time(costs: LayoutCosts, choice: Choice, content: StageContent, micro_batches: int) -> StageTime:
    layout, size = choice.layout, choice.size
    gathered = layout.shard > 1 and costs.gather_bytes < costs.weight_bytes
    every = costs.resolved.recipe.training.recompute_every
    compute = StageSeconds()
    sends = Sends()
    attention = [0.0, 0.0]
    for part, number in (("dense", content.dense), ("block", content.blocks)):
        again = math.ceil(number / every) if choice.recompute != "none" else 0
        kinds: list[tuple[Recompute, int]] = [(choice.recompute, again), ("none", number - again)]
        for recompute, times in kinds:
            if times:
                compute += costs.seconds(part, size, recompute, gathered) * times  # pyright: ignore[reportArgumentType]
                forward, backward = costs.attention_seconds(size, recompute)
                attention[0] += times * forward
                attention[1] += times * backward
                _tensor_sends(costs, choice, sends, recompute, times)
                if part == "block" and layout.expert > 1:
                    _expert_sends(costs, choice, sends, recompute, times)
    if layout.context > 1:
        _ring_sends(costs, choice, sends, content.dense + content.blocks, attention)
        compute += _ring_merging(costs, choice) * (content.dense + content.blocks)
    if content.first:
        compute += costs.seconds("embedding", size, "none", False)
    if content.last:
        compute += costs.head_seconds(size, choice.loss_chunk_size, "none")
    if layout.tensor > 1:
        _vocabulary_sends(costs, choice, sends, content)
    if layout.shard > 1 and layout.pipeline == 1:
        _shard_sends(costs, layout, sends, content, compute)
    if micro_batches > 1:
        # Shards add up what was scattered; in a pipeline gradients stay whole until the end of the step.
        held = sum(held_parameters(costs, layout, content))
        added = costs.accumulate_seconds(held if layout.pipeline > 1 else own_parameters(costs, layout, [content]))
        compute += StageSeconds(backward_weight=added * (micro_batches - 1) / micro_batches)
    return StageTime(content, compute, sends)


def _tensor_sends(costs: LayoutCosts, choice: Choice, sends: Sends, recompute: Recompute, times: int) -> None:
    if choice.layout.tensor == 1:
        return
    interconnect, group = costs.interconnect, costs.interconnect.group(choice.layout.tensor)
    whole = costs.gathered_activation_bytes(choice.size)
    pairs = 1 if costs.model.block == "parallel" else 2
    gather = pairs * interconnect.seconds("all_gather", whole, group)
    scatter = pairs * interconnect.seconds("reduce_scatter", whole, group)
    again = {"none": 0.0, "selective": gather, "full": gather + scatter}[recompute]
    sends.waited("tensor", False, times * (gather + scatter))
    sends.waited("tensor", True, times * (gather + scatter + again))


def _vocabulary_sends(costs: LayoutCosts, choice: Choice, sends: Sends, content: StageContent) -> None:
    """The collectives of embedding and head, whose rows of the vocabulary are on all ranks of tensor."""
    interconnect, group = costs.interconnect, costs.interconnect.group(choice.layout.tensor)
    whole = costs.gathered_activation_bytes(choice.size)
    gather = interconnect.seconds("all_gather", whole, group)
    scatter = interconnect.seconds("reduce_scatter", whole, group)
    ends = content.first + content.last
    sends.waited("tensor", False, content.first * scatter + content.last * gather)
    sends.waited("tensor", True, content.first * gather + content.last * scatter)
    if ends and content.last:
        # The largest logit, the sum of exponentials and the target's logit of each token.
        sums = interconnect.seconds("all_reduce", 4 * costs.tokens(choice.size), group)
        sends.waited("tensor", False, 3 * sums)


def _expert_sends(costs: LayoutCosts, choice: Choice, sends: Sends, recompute: Recompute, times: int) -> None:
    layout = choice.layout
    group = groups(costs.interconnect, layout)["expert"]
    sent = costs.gathered_activation_bytes(choice.size) * costs.model.experts_per_token
    there_and_back = 2 * costs.interconnect.seconds("all_to_all", sent, group)
    sends.waited("expert", False, times * there_and_back)
    sends.waited("expert", True, times * there_and_back * (1 if recompute == "none" else 2))


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


def _shard_sends(
    costs: LayoutCosts, layout: Layout, sends: Sends, content: StageContent, compute: StageSeconds
) -> None:
    gathering, again, scattering, replicas = _shard_seconds(costs, layout, content)
    slowdown = costs.interconnect.slowdown
    before = compute.backward_input + compute.backward_weight + compute.recompute
    sends.overlapped("shard", False, gathering, compute.forward, slowdown)
    sends.overlapped("shard", True, again + scattering, before, slowdown)
    sends.overlapped("data", True, replicas, max(0.0, before - again - scattering), slowdown)


def _shard_seconds(costs: LayoutCosts, layout: Layout, content: StageContent) -> tuple[float, float, float, float]:
    """Seconds of gathering all parameters of a stage, gathering its blocks again, scattering gradients, and averaging
    them over replicas of the shards."""
    gathering = again = scattering = replicas = 0.0
    found = groups(costs.interconnect, layout)
    for unit in _units(costs, layout, content, found):
        seconds = unit.times * costs.interconnect.seconds("all_gather", unit.gather_bytes, unit.group)
        gathering += seconds
        # What lies outside of blocks stays whole between the two passes.
        again += seconds if unit.in_block else 0.0
        scattering += unit.times * costs.interconnect.seconds("reduce_scatter", unit.reduce_bytes, unit.group)
        if layout.data > 1:
            part = unit.reduce_bytes / unit.group.size
            replicas += unit.times * costs.interconnect.seconds("all_reduce", part, found["replica"])
    return gathering, again, scattering, replicas


class _Unit(NamedTuple):
    """Parameters that are gathered at a time."""

    times: int
    gather_bytes: int
    reduce_bytes: int
    group: Group
    in_block: bool = True


def _units(costs: LayoutCosts, layout: Layout, content: StageContent, found: dict[str, Group]) -> Iterator[_Unit]:
    each = padded_parameters(costs, layout)
    gather, reduce = costs.gather_bytes, costs.reduce_bytes
    apart = layout.expert > 1
    block = each.block + (0 if apart else each.experts)
    yield _Unit(content.dense, gather * each.dense, reduce * each.dense, found["shard"])
    yield _Unit(content.blocks, gather * block, reduce * block, found["shard"])
    if apart:
        yield _Unit(content.blocks, gather * each.experts, reduce * each.experts, found["shard of experts"])
    outside = OUTSIDE_BYTES * outside_parameters(costs, layout, content)
    yield _Unit(1, outside, outside, found["shard"], in_block=False)


def once_per_step(costs: LayoutCosts, layout: Layout, first: StageTime) -> dict[Sender, tuple[float, float]]:
    """Exposed and hidden seconds, by dimension, of what is sent once per step: in a pipeline, all that averages
    gradients; otherwise the all-reduce of ranks that hold parameters whole, behind the last backward pass.

    They are those of the first stage, whose backward pass ends last.
    """
    slowdown, compute = costs.interconnect.slowdown, first.compute
    if layout.shard > 1:
        if layout.pipeline == 1:
            return {}
        gathering, _, scattering, replicas = _shard_seconds(costs, layout, first.content)
        behind = min(gathering, compute.forward)
        exposed = gathering - behind + slowdown * behind + scattering
        return {"shard": (exposed, behind - slowdown * behind), "data": (replicas, 0.0)}
    averaging = _replica_seconds(costs, layout, first.content)
    behind = min(averaging, compute.of("backward")) if layout.pipeline == 1 else 0.0
    return {"data": (averaging - behind + slowdown * behind, behind - slowdown * behind)}


def _replica_seconds(costs: LayoutCosts, layout: Layout, content: StageContent) -> float:
    """Seconds of all-reducing the gradients of a stage among ranks that hold the same parameters whole."""
    if layout.data * layout.context == 1:
        return 0.0
    found = groups(costs.interconnect, layout)
    shared, experts = held_parameters(costs, layout, content)
    seconds = 0.0
    for parameters, group in ((shared, found["data"]), (experts, found["data of experts"])):
        if parameters:
            in_all = costs.weight_bytes * parameters
            buckets = -(-in_all // BUCKET_BYTES)
            seconds += buckets * costs.interconnect.seconds("all_reduce", in_all / buckets, group)
    return seconds


def send_seconds(costs: LayoutCosts, choice: Choice) -> float:
    """Seconds of sending one micro-batch's hidden states to the next stage; ranks of tensor send a part of the sequence
    each."""
    sent = costs.tokens(choice.size) * costs.model.d_model * costs.weight_bytes / choice.layout.tensor
    return costs.interconnect.seconds("send", sent, groups(costs.interconnect, choice.layout)["pipeline"])
