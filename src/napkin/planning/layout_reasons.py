"""Why one layout is slower than another, or does not fit, in one line each."""

from napkin.planning.layout_memory import RankBytes
from napkin.planning.layout_plan import LayoutPlan
from napkin.units import format_bytes, format_seconds, format_share

_NAMES = {
    "forward": "a slower forward pass",
    "backward_input": "a slower backward pass",
    "backward_weight": "slower gradients of weights",
    "recompute": "recomputation",
    "tensor exposed": "exposed collectives of tensor",
    "context exposed": "an exposed ring of context",
    "expert exposed": "tokens sent to experts",
    "shard exposed": "exposed gathering and scattering of shards",
    "data exposed": "exposed averaging of gradients",
    "bubble": "the bubble of the pipeline",
    "update": "the update",
}
_NEARLY = 0.003
MOST_REASONS = 2


def why_slower(plan: LayoutPlan, best: LayoutPlan) -> str:
    """What takes longer than in the best layout, the largest first; and what takes less."""
    behind = plan.seconds - best.seconds
    if behind < _NEARLY * best.seconds:
        return "as fast, within the accuracy of a plan"
    longer = sorted(
        ((plan.by_kind.get(kind, 0.0) - best.by_kind.get(kind, 0.0), kind) for kind in _NAMES), reverse=True
    )
    told = [(more, kind) for more, kind in longer[:MOST_REASONS] if more > behind / 4]
    reasons = " and ".join(f"{_NAMES[kind]} (+{format_seconds(more)})" for more, kind in told)
    return f"{format_share(behind / best.seconds)} slower: {reasons or 'a little of everything'}"


def why_too_large(plan: LayoutPlan) -> str:
    """What takes most of the rank that does not fit."""
    rank = plan.ranks[plan.largest_rank]
    parts = sorted(((size, name) for name, size in described(rank).items()), reverse=True)[:2]
    largest = " and ".join(f"{name} {format_bytes(size)}" for size, name in parts)
    faster = f"would take {format_seconds(plan.seconds)}" if plan.layout.pipeline == 1 else "would be faster"
    needed = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.site.memory_bytes)} per device"
    return f"{faster}, but needs {needed}: {largest}"


def described(rank: RankBytes) -> dict[str, float]:
    """Bytes by what they are for, in words."""
    return {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer state": rank.optimizer_state,
        "gathered parameters": rank.gathered,
        "activations": rank.activations,
        "working memory": rank.working,
        "buffers": rank.buffers,
    }


def layout_name(plan: LayoutPlan) -> str:
    """Sizes, schedule, and how each rank computes its rows."""
    choice, layout = plan.choice, plan.layout
    parts = [str(layout)]
    if layout.pipeline > 1 and layout.stages_per_rank > 1:
        parts[0] += f" of {layout.stages_per_rank} stages"
    if layout.shard_optimizer:
        parts.append("optimizer state shared")
    parts.append(f"micro-batch {choice.micro_batch_size}")
    if choice.recompute != "none":
        parts.append(f"recompute {choice.recompute}")
    return ", ".join(parts)


def recipe_tables(plan: LayoutPlan) -> str:
    """[parallelism] and the fields of [training] that make a recipe train as planned, to be pasted into it."""
    choice, layout = plan.choice, plan.layout
    lines = ["[parallelism]"]
    lines += [f"{name} = {size}" for name, size in reversed(layout.sizes.items()) if size > 1 or name in _ALWAYS]
    if layout.expert > 1:
        lines.append(f"expert = {layout.expert}")
    if layout.pipeline > 1:
        lines.append(f'schedule = "{layout.schedule}"')
        if layout.stages_per_rank > 1:
            lines.append(f"stages_per_rank = {layout.stages_per_rank}")
    if layout.shard_optimizer:
        lines.append("shard_optimizer = true")
    training = plan.resolved.recipe.training
    lines += [
        "",
        "[training]",
        f"batch_size = {training.batch_size}",
        f"micro_batch_size = {choice.micro_batch_size}",
        f'recompute = "{choice.recompute}"',
        f"loss_chunk_size = {choice.loss_chunk_size}",
        f'parallelism = "{"fsdp" if layout.shard > 1 else "ddp"}"',
    ]
    return "\n".join(lines)


_ALWAYS = ("data", "shard")
"""Left out, they would be what the other sizes leave."""
