"""Bytes of each rank of a layout: its part of the state, what is gathered, activations of all micro-batches in flight,
and buffers; by the count of napkin's own step, or by what another stack keeps (`stack.Memory`)."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.planning.layouts.costs import OUTSIDE_BYTES, Choice, LayoutCosts
from napkin.planning.layouts.stack import Kept, Memory
from napkin.planning.layouts.stages import (
    StageContent,
    blocks_by_recompute,
    held_parameters,
    is_sharded,
    outside_parameters,
    own_parameters,
    padded_parameters,
    replicas_of_experts,
    schedule_of,
    stages_of_ranks,
)
from napkin.recipe.layout import Layout

_TOKEN_BYTES = 16
_STEADY = 4
"""Micro-batches, as a multiple of the ranks times their stages, from which on no more of them are in flight."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at the moment of most."""

    parameters: float
    gradients: float
    optimizer_state: float
    gathered: float
    """Parameters and gradients of a layer that are whole while it computes, and copies of weights in fp8."""
    activations: float
    """Bytes that micro-batches in flight keep for their backward passes, copies of weights in a narrower format
    included."""
    working: float
    """Bytes that come and go in a block or in the head: the logits of a chunk, gradients of activations."""
    buffers: float
    """Messages between stages, and the tokens of a step."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def by_use(self) -> dict[str, float]:
        """Bytes by use, with the name of each use."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "gathered parameters": self.gathered,
            "activations": self.activations,
            "working memory": self.working,
            "buffers": self.buffers,
        }


def ranks_bytes(
    costs: LayoutCosts, choice: Choice, contents: Sequence[StageContent], micro_batches: int
) -> list[RankBytes]:
    """Bytes of the first rank of each stage's group, in the order of the pipeline's ranks."""
    layout = choice.layout
    flights = in_flight(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)
    by_shape: dict[tuple, RankBytes] = {}
    ranks: list[RankBytes] = []
    for stages, flight in zip(stages_of_ranks(layout), flights, strict=True):
        key = (tuple(contents[stage] for stage in stages), flight)
        if key not in by_shape:
            of_rank = _rank_bytes if costs.stack.memory is None else _stack_bytes
            by_shape[key] = of_rank(costs, choice, key[0], flight, micro_batches)
        ranks.append(by_shape[key])
    return ranks


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, pipeline: int, stages_per_rank: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """For each rank and each of its stages, the micro-batches whose activations it keeps when it keeps most in all."""
    if pipeline == 1:
        return ((1,),)
    # From there on a schedule repeats itself, and keeps no more activations.
    repeats = schedule != "gpipe" and micro_batches % pipeline == 0
    enough = min(micro_batches, _STEADY * pipeline * stages_per_rank) if repeats else micro_batches
    table = schedule_of(schedule, pipeline, stages_per_rank, enough)
    counts: list[tuple[int, ...]] = []
    for rank, actions in enumerate(table.actions):
        ends = "backward_weight" if any(action.kind == "backward_weight" for action in actions) else "backward"
        now = dict.fromkeys(table.stages_of(rank), 0)
        most, at_most = 0, dict(now)
        for stage, kind, _ in actions:
            now[stage] += (kind == "forward") - (kind == ends)
            if sum(now.values()) > most:
                most, at_most = sum(now.values()), dict(now)
        counts.append(tuple(at_most.values()))
    return tuple(counts)


def _rank_bytes(
    costs: LayoutCosts, choice: Choice, contents: Sequence[StageContent], flight: Sequence[int], micro_batches: int
) -> RankBytes:
    layout, size, recompute = choice.layout, choice.size, choice.recompute
    gathered = is_sharded(costs, layout) and costs.gather_bytes < costs.weight_bytes
    own = own_parameters(costs, layout, contents)
    replicas = layout.data * layout.context if layout.shard_optimizer and layout.shard == 1 else 1
    kept = [_kept_bytes(costs, choice, content, gathered) for content in contents]
    activations = sum(number * each for number, each in zip(flight, kept, strict=True))
    gradients = own * costs.weight_bytes
    if micro_batches == 1 and layout.token_parts == 1:
        # Gradients are allocated as activations are freed: only the larger of the two exists at a time.
        gradients = max(0.0, gradients - activations)
    if layout.shard == 1 and layout.pipeline == 1 and layout.token_parts > 1 and micro_batches > 1:
        # Gradients that are averaged over replicas stay allocated beside those that are accumulated.
        gradients *= 2
    # Whichever is larger: what a block needs in its backward pass, or the head, or the sum of two gradients of the
    # embedding, which comes when its micro-batch keeps nothing any more.
    whole, at_head = _whole_bytes(costs, layout, contents)
    # The loss has its gradients in the forward pass: without blocks, the thread of the backward pass has no products.
    has_blocks = any(content.blocks for content in contents)
    threads = 2 if has_blocks else int(contents[-1].last)
    workspaces = threads * costs.workspace_bytes
    moments = [(whole, float(workspaces))]
    for content, freed in zip(contents, kept, strict=True):
        moments += [(whole, costs.working_bytes(kind, size, recompute)) for kind, _ in content.blocks]
        if content.last:
            of_head = costs.head_working_bytes(size, choice.loss_chunk_size, recompute)
            if micro_batches > 1 and not is_sharded(costs, layout):
                # The loss has the gradient of the head's matrix in its forward pass, beside the sum of those before;
                # of shards, `_whole_bytes` has it.
                of_head += 4 * costs.model.vocab_size * costs.model.d_model / layout.tensor
            moments.append((at_head, workspaces + of_head))
        if content.first and micro_batches > 1:
            moments.append((whole, workspaces + 4 * costs.parameters(layout.tensor).embedding - freed))
    whole, working = max(moments, key=sum)
    return RankBytes(
        parameters=own * costs.weight_bytes,
        gradients=gradients,
        optimizer_state=own * costs.parts("none").state_bytes_per_parameter / replicas,
        gathered=whole,
        activations=activations,
        working=working,
        buffers=_buffer_bytes(costs, choice, micro_batches, costs.weight_bytes),
    )


def _buffer_bytes(costs: LayoutCosts, choice: Choice, micro_batches: int, number_bytes: float) -> float:
    """Bytes of a pipeline's messages to and from both neighbours, and of the tokens of a step."""
    tokens, layout = costs.tokens(choice.size), choice.layout
    stream = tokens * costs.model.d_model * number_bytes / layout.tensor
    return (4 * stream if layout.pipeline > 1 else 0.0) + _TOKEN_BYTES * micro_batches * tokens


def _kept_bytes(costs: LayoutCosts, choice: Choice, content: StageContent, gathered: bool) -> float:
    """Bytes that one micro-batch keeps in one stage."""
    size = choice.size
    kept = costs.kept_bytes("embedding", size, "none", gathered) if content.first else 0.0
    for kind, recompute, times in blocks_by_recompute(costs, choice, content):
        kept += times * costs.kept_bytes(kind, size, recompute, gathered)
    return kept


def _whole_bytes(costs: LayoutCosts, layout: Layout, contents: Sequence[StageContent]) -> tuple[float, float]:
    """Bytes of what FSDP2 has whole, as it allocates them: in the backward pass of a block, and while norm, head and
    loss run.

    In a block these are the block and the one that is gathered ahead, its gradients, and all that lies outside of
    blocks with its gradients; at the head the last block is still whole.
    """
    if not is_sharded(costs, layout):
        return 0.0, 0.0
    outside = OUTSIDE_BYTES * sum(outside_parameters(costs, layout, content) for content in contents)
    if layout.pipeline > 1:
        # Parameters are gathered once per step, and gradients are accumulated unsharded.
        parameters = sum(sum(held_parameters(costs, layout, content)) for content in contents)
        whole = (costs.gather_bytes + costs.reduce_bytes) * (parameters - outside // OUTSIDE_BYTES) + 2 * outside
        return whole, whole
    block, blocks = padded_parameters(costs, layout).largest_block, sum(content.n_blocks for content in contents)
    whole = costs.gather_bytes * block * min(2, blocks) + outside
    return whole + costs.weight_bytes * block + outside * contents[-1].last, costs.gather_bytes * block + outside


def _stack_bytes(
    costs: LayoutCosts, choice: Choice, contents: Sequence[StageContent], flight: Sequence[int], micro_batches: int
) -> RankBytes:
    """Bytes of a rank of another stack, by what it says that it keeps."""
    memory, layout = costs.stack.memory, choice.layout
    assert memory is not None
    parameters = [held_parameters(costs, layout, content) for content in contents]
    own, sharded = own_parameters(costs, layout, contents), is_sharded(costs, layout)
    dense, experts = sum(each[0] for each in parameters), sum(each[1] for each in parameters)
    state = own
    if layout.shard_optimizer and not sharded:
        state = dense / (layout.data * layout.context) + experts / max(1, replicas_of_experts(layout))
    outside = sum(outside_parameters(costs, layout, content) for content in contents)
    fp8 = memory.fp8_copy_bytes if costs.in_fp8 else 0.0
    in_blocks = dense + experts - outside
    whole = _gathered_bytes(costs, layout, contents, outside) if sharded else fp8 * in_blocks
    weights = own
    if costs.in_fp8 and memory.fp8_copies_only and not sharded:
        weights = own - in_blocks
    activations = working = 0.0
    for number, content in zip(flight, contents, strict=True):
        activations += number * _kept_by_stack(costs, choice, content, memory)
        working = max(working, _working_of_stack(costs, choice, content, memory))
    return RankBytes(
        parameters=memory.weight_bytes * weights,
        gradients=memory.gradient_bytes * own,
        optimizer_state=memory.state_bytes * state,
        gathered=whole,
        activations=activations,
        working=working,
        buffers=_buffer_bytes(costs, choice, micro_batches, costs.activation_bytes),
    )


def _gathered_bytes(costs: LayoutCosts, layout: Layout, contents: Sequence[StageContent], outside: int) -> float:
    """Bytes of what is whole at a time: two blocks and the gradients of one, and what lies outside of blocks; in a
    pipeline all that the rank's stages have, with the gradients that micro-batches add up, until the end of the
    step."""
    if layout.pipeline > 1:
        parameters = sum(sum(held_parameters(costs, layout, content)) for content in contents)
        return (costs.gather_bytes + costs.reduce_bytes) * parameters
    block = padded_parameters(costs, layout).largest_block
    return (2 * costs.gather_bytes + costs.reduce_bytes) * block + costs.gather_bytes * outside


def _token_bytes(costs: LayoutCosts, choice: Choice, kept: Kept, memory: Memory, *, experts: bool) -> float:
    """Bytes that a block keeps of one token of a rank, which ranks of tensor divide."""
    model, tensor = costs.model, choice.layout.tensor
    heads, kv_heads = model.n_heads, max(model.resolved_n_kv_heads, tensor)
    wide = kept.d_model * model.d_model
    inner = (kept.heads * heads + kept.kv_heads * kv_heads) * model.resolved_head_dim
    n_up = 2 if model.gated else 1
    width = kept.up * n_up + kept.activated
    if not experts:
        inner += width * model.resolved_d_ff
    else:
        d_expert = model.resolved_d_expert or model.resolved_d_ff
        inner += width * d_expert * (model.experts_per_token + model.n_shared_experts)
        inner += kept.dispatched * model.experts_per_token * model.d_model
    scale = costs.activation_bytes / 2
    return scale * (wide / (tensor if memory.splits_sequence else 1) + inner / tensor)


def _kept_by_stack(costs: LayoutCosts, choice: Choice, content: StageContent, memory: Memory) -> float:
    tokens, bytes_kept = costs.tokens(choice.size), 0.0
    for kind, recompute, times in blocks_by_recompute(costs, choice, content):
        kept = memory.kept_of(recompute, fp8=costs.in_fp8)
        bytes_kept += times * tokens * _token_bytes(costs, choice, kept, memory, experts=kind.experts)
    return bytes_kept * max(0.0, 1 - memory.offloaded_blocks / costs.model.n_layers)


def _working_of_stack(costs: LayoutCosts, choice: Choice, content: StageContent, memory: Memory) -> float:
    """Bytes that come and go: what a block computes again and the gradients of its widest part, or the logits."""
    tokens, model = costs.tokens(choice.size), costs.model
    in_block = 0.0
    for kind, recompute, _ in blocks_by_recompute(costs, choice, content):
        experts = kind.experts
        every, kept = (memory.kept_of(each, fp8=costs.in_fp8) for each in ("none", recompute))
        whole = _token_bytes(costs, choice, every, memory, experts=experts)
        again = whole - _token_bytes(costs, choice, kept, memory, experts=experts)
        widest = Kept(d_model=4, up=2, activated=2, dispatched=2)
        in_block = max(in_block, tokens * (again + _token_bytes(costs, choice, widest, memory, experts=experts)))
    logits = 0.0
    if content.last:
        logits = tokens * memory.logits_bytes * model.vocab_size / choice.layout.tensor
    return max(in_block, logits)
