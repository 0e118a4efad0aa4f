"""The fastest layouts of a recipe on so many devices: all that divide it, best first.

A layout is at least as long as its blocks take on one rank without a bubble; candidates are evaluated in that order,
until no other can be among the best. Memory excludes first. Pipelines are simulated only if their slowest rank alone
does not exclude them, with few micro-batches where more only repeat what these do.

`why_slower` and `why_too_large` say in a line what a layout loses by. The best layout is held to the bytes of its
counted step (`with_best_counted`).
"""

import dataclasses
import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from napkin.errors import NapkinError
from napkin.kernels.loss.cross_entropy import loss_chunk_size
from napkin.planning.layouts.costs import Choice, LayoutCosts
from napkin.planning.layouts.layout_plan import LayoutPlan, one_stage_seconds, plan_layout, simulated, update_seconds
from napkin.planning.layouts.rank_bytes import ranks_bytes
from napkin.planning.layouts.stages import (
    StageTime,
    once_per_step,
    send_seconds,
    stage_contents,
    stage_times,
    stages_of_ranks,
)
from napkin.planning.step.site import fits, memory_of, step_memory
from napkin.recipe.layout import Layout, refuse_impossible_layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig, PipelineScheduleName
from napkin.train_step.compile import Recompute
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes, format_seconds, format_share

BEST = 6
"""Layouts that a search returns, of different sizes of tensor, pipeline and expert."""
MOST_TOO_LARGE = 2
MOST_TENSOR = 64
MOST_CONTEXT = 64
MOST_STAGES_PER_RANK = 8
LEAST_TOKENS = 512
"""Fewest tokens of a rank's part of a sequence."""
MOST_TOKENS = 2**17
"""Most tokens of a micro-batch on one rank."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_REPEATS_FROM = 4
"""A schedule with more than so many times its ranks' micro-batches repeats itself."""


_SIZE = re.compile(r"(parallelism\.\w+) \d+\b")
"""Matches sizes in a refusal, so that layouts of other sizes are counted under the same reason."""


@dataclass(frozen=True)
class Found:
    """One choice with its seconds and its peak bytes."""

    choice: Choice
    seconds: float
    peak_bytes: float


@dataclass
class SearchResult:
    """The layouts that a search found, and the reasons against others."""

    plans: list[LayoutPlan]
    """The fastest that fit, of different sizes, fastest first; each planned in full."""
    too_large: list[LayoutPlan]
    """The fastest that would be faster than the best but do not fit, of different sizes."""
    considered: int
    """Choices that divide the recipe."""
    evaluated: int
    refused: Counter[str] = field(default_factory=Counter)
    """Number of layouts that napkin cannot train, by reason."""

    def as_values(self) -> dict[str, Any]:
        return {
            "considered": self.considered,
            "evaluated": self.evaluated,
            "layouts": [plan.as_values() for plan in self.plans],
            "too_large": [plan.as_values() for plan in self.too_large],
            "refused": dict(self.refused),
        }


def search_layouts(
    costs: LayoutCosts, *, best: int = BEST, trains: bool = True, progress: Callable[[str], None] = lambda doing: None
) -> SearchResult:
    """Rank all layouts of a recipe on the machine by tokens per second, and return the `best` of different sizes.

    Batch size, precision and optimizer are the recipe's; layout, micro-batch size, recomputation, schedule and chunk of
    the loss are searched. `trains` is whether layouts that napkin does not train are left out. Raises NapkinError where
    no layout divides the recipe, where none fits, or all are refused.
    """
    return _Search(costs, best, trains, progress).run()


def candidates(costs: LayoutCosts) -> Iterator[Choice]:
    """All choices that divide a recipe's model and batch among the machine's devices."""
    for layout, size in _layouts(costs.resolved, costs.site.n_devices, costs.interconnect.devices_per_node):
        of_device = loss_chunk_size(-(-costs.model.vocab_size // layout.tensor), costs.machine.gpu_bytes)
        chunk = min(of_device, size * costs.model.context_length // layout.context)
        for recompute in RECOMPUTE:
            yield Choice(layout=layout, micro_batch_size=size, recompute=recompute, loss_chunk_size=chunk)


class _Search:
    def __init__(self, costs: LayoutCosts, best: int, trains: bool, progress: Callable[[str], None]) -> None:
        self.costs = costs
        self.best = best
        self.trains = trains
        self.progress = progress
        self.fastest: dict[tuple, Found] = {}
        self.beyond: list[tuple[float, Choice, float]] = []
        """The layouts that do not fit, each with its least seconds and its bytes, in the order of the seconds."""
        self.refusals: dict[tuple[Layout, int, Recompute], str | None] = {}
        self.refused: Counter[str] = Counter()
        self.evaluated = 0

    def run(self) -> SearchResult:
        queue: list[tuple[float, int, Choice]] = []
        for number, choice in enumerate(candidates(self.costs)):
            queue.append((self._least_seconds(choice), number, choice))
        if not queue:
            batch_size, n = self.costs.resolved.recipe.training.batch_size, self.costs.site.n_devices
            raise NapkinError(
                f"training.batch_size {batch_size} does not divide among {n} devices in any layout: use a multiple of "
                f"{n}, --training.batch-size {n * -(-batch_size // n)}"
            )
        considered = len(queue)
        self.progress(f"{considered:,} layouts")
        heapq.heapify(queue)
        while queue and queue[0][0] < self._to_beat():
            least, _, choice = heapq.heappop(queue)
            self._evaluate(choice, least)
            if self.evaluated % 500 == 0:
                self.progress(f"{self.evaluated:,} of {considered:,} layouts")
        if not self.fastest:
            raise NapkinError(self._nothing(considered))
        fastest = sorted(self.fastest.values(), key=lambda each: each.seconds)[: self.best]
        best = fastest[0].seconds
        too_large = map(self._planned, self._faster_but_too_large(best))
        return SearchResult(
            plans=sorted(map(self._planned, fastest), key=lambda plan: plan.seconds),
            too_large=[plan for plan in too_large if plan.seconds < best],
            considered=considered,
            evaluated=self.evaluated,
            refused=self.refused,
        )

    def _planned(self, found: Found) -> LayoutPlan:
        return plan_layout(self.costs.resolved, self.costs.machine, found.choice, costs=self.costs)

    def _to_beat(self) -> float:
        """Seconds of the slowest that would be returned."""
        return _slowest_of(self.fastest, self.best)

    def _least_seconds(self, choice: Choice) -> float:
        """Computation of all blocks and the head, evenly on all ranks, nothing sent but what tensor waits for."""
        costs, layout = self.costs, choice.layout
        gathered = layout.shard > 1 and costs.gather_bytes < costs.weight_bytes
        least = costs.least_seconds(choice.size, choice.recompute, gathered, choice.loss_chunk_size)
        return self._micro_batches(choice) * least / layout.pipeline

    def _evaluate(self, choice: Choice, least_seconds: float) -> None:
        if self.trains and self._refused(choice):
            return
        self.evaluated += 1
        contents = stage_contents(self.costs.model, choice.layout)
        peak = max(rank.total for rank in ranks_bytes(self.costs, choice, contents, self._micro_batches(choice)))
        if fits(peak, self.costs.site.memory_bytes):
            self._price(self.fastest, choice, peak, self._to_beat())
        else:
            self.beyond.append((least_seconds, choice, peak))

    def _micro_batches(self, choice: Choice) -> int:
        batch_size = self.costs.resolved.recipe.training.batch_size
        return batch_size // (choice.layout.batch_parts * choice.micro_batch_size)

    def _price(self, fastest: dict[tuple, Found], choice: Choice, peak: float, limit: float) -> None:
        """Keep a choice that takes less than `limit` seconds, and less than its variants."""
        costs, layout, micro_batches = self.costs, choice.layout, self._micro_batches(choice)
        # Layouts that differ in their schedules, or in how those that split the batch also split sequences or hold
        # replicas, are variants of one.
        key = layout.tensor, layout.pipeline, layout.expert, layout.shard > 1
        if key in fastest:
            limit = min(limit, fastest[key].seconds)
        stages = stage_times(costs, choice, micro_batches)
        seconds = update_seconds(costs, choice, [stage.content for stage in stages])
        seconds += sum(exposed for exposed, _ in once_per_step(costs, layout, stages[0]).values())
        if layout.pipeline == 1:
            seconds += one_stage_seconds(stages[0], micro_batches)
        else:
            sending = send_seconds(costs, choice)
            if seconds + longest_rank_seconds(choice, stages, sending, micro_batches) >= limit:
                return
            seconds += pipeline_seconds(choice, stages, sending, micro_batches)
        if seconds < limit:
            fastest[key] = Found(choice, seconds, peak)

    def _faster_but_too_large(self, limit: float) -> list[Found]:
        """The fastest below `limit` seconds of those that do not fit, in the order of their seconds."""
        fastest: dict[tuple, Found] = {}
        for least_seconds, choice, peak in self.beyond:
            to_beat = min(limit, _slowest_of(fastest, MOST_TOO_LARGE))
            if least_seconds >= to_beat:
                break
            self._price(fastest, choice, peak, to_beat)
        return sorted(fastest.values(), key=lambda each: each.seconds)[:MOST_TOO_LARGE]

    def _refused(self, choice: Choice) -> bool:
        key = choice.layout, choice.micro_batch_size, choice.recompute
        if key not in self.refusals:
            self.refusals[key] = refusal(self.costs.resolved.recipe, choice)
        reason = self.refusals[key]
        if reason is not None:
            self.refused[_SIZE.sub(r"\1", reason)] += 1
        return reason is not None

    def _nothing(self, considered: int) -> str:
        """The message where no layout was found: the reason for most refusals, or the least memory that was missing."""
        if not self.beyond:
            (reason, number), devices = self.refused.most_common(1)[0], self.costs.site.n_devices
            return f"none of {considered:,} layouts of {devices} devices trains, {number:,} of them because {reason}"
        _, least, peak = min(self.beyond, key=lambda each: each[2])
        return (
            f"no layout of {self.costs.site.name} fits: the least is {format_bytes(peak)} per device with "
            f"{least.layout}; {memory_of(self.costs.site.device_name, self.costs.site.memory_bytes)}: use more "
            "devices, a smaller --model.context-length or a smaller model"
        )


def _slowest_of(found: dict[tuple, Found], number: int) -> float:
    """Seconds of the slowest of the `number` fastest; infinite where there are fewer."""
    if len(found) < number:
        return math.inf
    return heapq.nsmallest(number, (each.seconds for each in found.values()))[-1]


def refusal(recipe: Recipe, choice: Choice) -> str | None:
    """Why napkin does not train a recipe in a layout; None if it does."""
    training = dataclasses.replace(
        recipe.training, micro_batch_size=choice.micro_batch_size, recompute=choice.recompute
    )
    try:
        refuse_impossible_layout(dataclasses.replace(recipe, training=training), choice.layout)
    except NapkinError as error:
        return str(error)
    return None


def longest_rank_seconds(choice: Choice, stages: list[StageTime], sending: float, micro_batches: int) -> float:
    """Least seconds of a pipeline: until a rank begins, all that it computes, and until the first rank is done with
    the last micro-batch that this rank sent back."""
    layout = choice.layout
    seconds = [stage.seconds for stage in stages]
    longest, before, after = 0.0, 0.0, 0.0
    for held in stages_of_ranks(layout):
        busy = sum(seconds[stage].forward + seconds[stage].of("backward") for stage in held)
        longest = max(longest, before + micro_batches * busy + after)
        first = seconds[held[0]]
        before += first.forward + sending
        after += 0.0 if layout.splits_backward else first.of("backward") + sending
    return longest


def pipeline_seconds(choice: Choice, stages: list[StageTime], sending: float, micro_batches: int) -> float:
    """Seconds of the simulated schedule; one of many micro-batches grows by the same time with each round of them."""
    ranks = choice.layout.pipeline
    rounds, rest = divmod(micro_batches, ranks)
    if rounds <= _REPEATS_FROM + 1 or (rest and choice.layout.schedule not in ("gpipe", "1f1b")):
        return simulated(choice, stages, sending, micro_batches).seconds
    few = [simulated(choice, stages, sending, (_REPEATS_FROM + more) * ranks + rest).seconds for more in (0, 1)]
    return few[1] + (rounds - _REPEATS_FROM - 1) * (few[1] - few[0])


def _layouts(resolved: ResolvedRecipe, n_devices: int, per_node: int) -> Iterator[tuple[Layout, int]]:
    """Layouts and micro-batch sizes."""
    model, batch_size = resolved.recipe.model, resolved.recipe.training.batch_size
    for tensor in tensor_sizes(resolved, n_devices):
        for context in _divisors(n_devices // tensor, most=MOST_CONTEXT):
            if context > 1 and (
                model.context_length % (2 * context * tensor) or model.context_length // context < LEAST_TOKENS
            ):
                continue
            for pipeline in _divisors(n_devices // tensor // context, most=model.n_layers):
                parts = n_devices // tensor // context // pipeline
                if batch_size % parts:
                    continue
                # No sharding, sharding over all, and over the ranks of 1, 4 and 16 nodes.
                within = max(1, per_node // (tensor * context))
                shards = sorted(n for n in {1, parts, within, 4 * within, 16 * within} if parts % n == 0)
                experts = [n for n in _divisors(model.n_experts or 1, most=parts) if parts % n == 0]
                for shard in shards:
                    for expert in experts:
                        data = parts // shard
                        layout = Layout(
                            tensor=tensor, context=context, pipeline=pipeline, shard=shard, data=data, expert=expert
                        )
                        yield from _variants(layout, resolved, batch_size // parts)


def _variants(layout: Layout, resolved: ResolvedRecipe, rows: int) -> Iterator[tuple[Layout, int]]:
    """Variants of schedule, sharing of optimizer state, and micro-batch size."""
    n_layers, context_length = resolved.recipe.model.n_layers, resolved.recipe.model.context_length
    shares = (False, True) if layout.shard == 1 and layout.data > 1 else (False,)
    for size in _divisors(rows, most=max(1, MOST_TOKENS * layout.context // context_length)):
        micro_batches = rows // size
        for schedule, per_rank in _schedules(layout.pipeline, n_layers, micro_batches):
            for share in shares:
                yield (
                    dataclasses.replace(layout, schedule=schedule, stages_per_rank=per_rank, shard_optimizer=share),
                    size,
                )


def _schedules(pipeline: int, n_layers: int, micro_batches: int) -> Iterator[tuple[PipelineScheduleName, int]]:
    if pipeline == 1:
        yield "1f1b", 1
        return
    if micro_batches < pipeline:
        yield "gpipe", 1
        return
    yield "1f1b", 1
    if micro_batches % pipeline == 0:
        yield "zb-h1", 1
        for per_rank in range(2, MOST_STAGES_PER_RANK + 1):
            if n_layers % (pipeline * per_rank) == 0:
                yield "interleaved-1f1b", per_rank
    if 2 * pipeline <= n_layers and micro_batches >= 2 * pipeline - 1:
        yield "zb-v", 2


def tensor_sizes(resolved: ResolvedRecipe, n_devices: int) -> list[int]:
    """Sizes of tensor that divide the model: heads, keys and values, d_ff and the sequence."""
    model = resolved.recipe.model
    alike = math.gcd(model.n_heads, model.resolved_n_kv_heads, model.context_length, model.resolved_d_ff)
    return [size for size in _divisors(alike, most=MOST_TENSOR) if n_devices % size == 0]


def _divisors(number: int, *, most: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({size for size in itertools.chain(low, (number // each for each in low)) if size <= most})


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
    """The parts that take longer than in the best layout, the largest first; and those that take less."""
    behind = plan.seconds - best.seconds
    if behind < _NEARLY * best.seconds:
        return "as fast, within the accuracy of a plan"
    longer = sorted(
        ((plan.by_kind.get(kind, 0.0) - best.by_kind.get(kind, 0.0), kind) for kind in _NAMES), reverse=True
    )
    named = [(more, kind) for more, kind in longer[:MOST_REASONS] if more > behind / 4]
    reasons = " and ".join(f"{_NAMES[kind]} (+{format_seconds(more)})" for more, kind in named)
    return f"{format_share(behind / best.seconds)} slower: {reasons or 'a little of everything'}"


def why_too_large(plan: LayoutPlan) -> str:
    """The largest parts of the rank that does not fit."""
    rank = plan.ranks[plan.largest_rank]
    parts = sorted(((size, name) for name, size in rank.by_use.items()), reverse=True)[:2]
    largest = " and ".join(f"{name} {format_bytes(size)}" for size, name in parts)
    faster = f"would take {format_seconds(plan.seconds)}" if plan.layout.pipeline == 1 else "would be faster"
    needed = f"{format_bytes(plan.peak_bytes)} of {format_bytes(step_memory(plan.site.memory_bytes))} per device"
    return f"{faster}, but needs {needed}: {largest}"


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


def with_best_counted(found: SearchResult, progress: Callable[[str], None] = lambda doing: None) -> SearchResult:
    """The result with the step of its best layout counted; those that do not fit by count come to the ones too large.

    Raises NapkinError where none of them fits.
    """
    plans, too_large = list(found.plans), list(found.too_large)
    while plans:
        counted = with_counted_bytes(plans[0], progress)
        if counted.fits:
            return dataclasses.replace(found, plans=[counted, *plans[1:]], too_large=too_large)
        too_large.append(counted)
        del plans[0]
    least = min(too_large, key=lambda plan: plan.peak_bytes)
    raise NapkinError(
        f"no layout of {least.site.name} fits: the least by count is {format_bytes(least.peak_bytes)} per device with "
        f"{least.layout}; {memory_of(least.site.device_name, least.site.memory_bytes)}: use more devices or "
        "a smaller model"
    )


def with_counted_bytes(plan: LayoutPlan, progress: Callable[[str], None] = lambda doing: None) -> LayoutPlan:
    """The plan with the peak bytes of the rank that is expected to need most: its real step on fake tensors."""
    choice, layout = plan.choice, plan.layout
    parallelism = ParallelismConfig(
        data=layout.data,
        shard=layout.shard,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank if layout.stages_per_rank > 1 else None,
        blocks_per_stage=layout.blocks_per_stage,
        shard_optimizer=layout.shard_optimizer,
    )
    resolved = plan.resolved.with_training(
        micro_batch_size=choice.micro_batch_size,
        recompute=choice.recompute,
        loss_chunk_size=choice.loss_chunk_size,
        parallelism="fsdp" if layout.shard > 1 else "ddp",
    )
    resolved = dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, parallelism=parallelism))
    rank = plan.largest_rank * (resolved.world_size // plan.layout.pipeline)
    named = f"counting the step of rank {rank}"
    ledger = count_step(resolved, rank, progress=lambda calls: progress(f"{named}: {calls:,} operator calls"))
    return dataclasses.replace(plan, counted_bytes=ledger.peak_bytes)
