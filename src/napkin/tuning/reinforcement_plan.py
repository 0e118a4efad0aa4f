"""The plan of a run of reinforcement learning, phase by phase.

Completion lengths are unknown in advance, so a trial rollout completes the prompts of a step with the initial weights.
The plan of the rollout is what the trial took; updates and log-probabilities are counted on fake tensors in the shapes
of the trial's completions, and priced like any step.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from napkin.accounting.ledger import METERED_STEP, Ledger
from napkin.accounting.metering import StepMeasurement, Stopwatch, meter_step
from napkin.accounting.pricing import Price, dollars
from napkin.accounting.quantities import QuantityRow, QuantityTable, Unit
from napkin.chats.token_sequence import Example, TokenSequence
from napkin.model.adapters import adapters_off
from napkin.planning.rules import multiplying_parameters_by_rule
from napkin.planning.step.machine import Machine, Progress
from napkin.planning.step.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import Initialize, TrainState, Watch, build_train_state
from napkin.tuning.example_plan import count_parts
from napkin.tuning.packing import SequenceMicroBatch, micro_batches_of
from napkin.tuning.policy_gradient import OLD, OLD_VALUES, FreshObjective, policy_objective
from napkin.tuning.reinforcement_step import PHASES, Phases, ReinforcementSettings, Result
from napkin.tuning.rollout import Rollout, roll_out
from napkin.tuning.sequence_step import (
    REFERENCE,
    Objective,
    loss_of_parts,
    score_parts,
    totals_of,
    with_known_coefficients,
)


@dataclass(frozen=True)
class PhaseMetrics:
    """The costs of a phase, per step; None is unknown."""

    tokens: float | None = None
    """Tokens through the model, padding included."""
    flops: float | None = None
    peak_bytes: float | None = None
    """The most bytes allocated while the phase runs, weights and optimizer state included."""
    seconds: float | None = None


ByPhase = Mapping[str, PhaseMetrics]


@dataclass(frozen=True, repr=False)
class ReinforcementPlan(Plan):
    """The plan of steps of several phases: the ledger has the operators of all phases and the bytes of the update, the
    price is the update's."""

    rule: dict[str, PhaseMetrics] = field(default_factory=dict)
    count: dict[str, PhaseMetrics] = field(default_factory=dict)
    update: dict[str, int] = field(default_factory=dict)
    """FLOPs of the update by pass: forward, backward and optimizer."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens through the model in all phases, on all devices, each of which has about as many."""
        return int(sum_of(self.count, "tokens") or 0) * self.resolved.layout.batch_parts

    @property
    def rule_flops(self) -> float:
        return sum_of(self.rule, "flops") or 0.0

    @property
    def flops_by_phase(self) -> dict[str, int]:
        """FLOPs of each phase before the update, and of each pass of the update."""
        before = {phase: int(each.flops) for phase, each in self.count.items() if each.flops and phase != "update"}
        return before | self.update

    def steps_like(self, tokens: Mapping[str, int]) -> float:
        """The number of planned steps that have the FLOPs of a step with so many tokens in its phases."""
        flops = [
            (each.flops or 0.0) * tokens.get(phase, 0) / each.tokens
            for phase, each in self.count.items()
            if each.tokens
        ]
        return sum(flops) / max(self.ledger.flops, 1)

    @property
    def peak_bytes(self) -> int:
        return int(max(each.peak_bytes or 0 for each in self.count.values()))

    @property
    def seconds_per_step(self) -> float:
        return sum_of(self.count, "seconds") or 0.0

    @property
    def longest_phase(self) -> str:
        """The phase that faster hardware would be bought for."""
        return max(self.count, key=lambda phase: self.count[phase].seconds or 0.0)

    def table(self) -> QuantityTable:
        whole = {row.quantity: row for row in super().table()}
        share = (self.count[self.longest_phase].seconds or 0.0) / max(self.seconds_per_step, 1e-30)
        attention = self.ledger.attention_flops / max(self.ledger.flops, 1)
        changed = {
            "FLOPs per step": replace(
                whole["FLOPs per step"],
                note="rule: the longest completions, 2·N per token forwards, 6·N with gradients; attention is "
                f"{attention:.1%} of count",
            ),
            "peak bytes": replace(whole["peak bytes"], count=self.peak_bytes, note="over all phases"),
            "seconds per step": replace(
                whole["seconds per step"],
                rule=None,
                note=f"count: the rollout as in a trial, updates operator by operator; {share:.0%} is "
                f"{self.longest_phase}: faster hardware is worth most there",
            ),
            "MFU": replace(whole["MFU"], rule=None),
            "seconds in all": replace(whole["seconds in all"], rule=None),
        }
        rows = [changed.get(name, row) for name, row in whole.items()]
        return QuantityTable([*rows, *phase_rows(self.rule, self.count, self.site.usd_per_hour)])


def plan_reinforcement(
    resolved: ResolvedRecipe,
    settings: ReinforcementSettings,
    prompts: Sequence[int],
    load: Initialize,
    machine: Machine,
    progress: Progress,
    *,
    has_second_model: bool = False,
) -> ReinforcementPlan:
    """Plan steps like the one that will be metered.

    `load` sets the initial weights; `has_second_model` is whether they are held all the time, in fp32, as the reference
    of a divergence.
    """
    machine.prepare(resolved.recipe.training)
    progress("answering on trial")
    rollout, sampling, grading, sampled, weight_bytes, n_parameters = _trial(resolved, settings, prompts, load)
    progress("counting the updates")
    sequences = [episode.sequence for episode in rollout.episodes]
    updates = _counted_updates(resolved, settings, sequences)
    scores = _counted_scores(resolved, settings, sequences)
    progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    site = machine.site(resolved.precision, ceilings)
    rows, length = max((part.rows.inputs.shape for part in updates.parts), key=lambda shape: shape[0] * shape[1])
    alike = resolved.with_model(context_length=length).with_training(batch_size=rows, micro_batch_size=None)
    scored = [] if scores is None else [scores.ledger]
    prices = machine.price(replace(alike, world_size=1), [updates.ledger, *scored], ceilings, progress)
    count = {"rollout": sampling, "reward": grading, "update": updates.metrics(prices[0])}
    if scores is not None:
        count["log-probabilities"] = scores.metrics(prices[1])
    # The trial and the scores were counted without an optimizer; a reference is held besides, in fp32.
    optimizer_bytes = updates.ledger.resident_bytes - weight_bytes
    for phase, each in count.items():
        if each.peak_bytes is not None:
            held = (0 if phase == "update" else optimizer_bytes) + (4 * n_parameters if has_second_model else 0)
            count[phase] = replace(each, peak_bytes=each.peak_bytes + held)
    rule = _rule(resolved, settings, len(prompts), sequences, scores)
    step = joined([sampled, *scored, *[updates.ledger] * updates.times])
    by_pass = {name: updates.times * flops for name, flops in updates.ledger.flops_by("phase").items()}
    return ReinforcementPlan(resolved, step, prices[0], site, rule=rule, count=count, update=by_pass)


def _trial(
    resolved: ResolvedRecipe,
    settings: ReinforcementSettings,
    prompts: Sequence[int],
    load: Initialize,
) -> tuple[Rollout, PhaseMetrics, PhaseMetrics, Ledger, int, int]:
    """A rollout before the run: it, what it and its rewards cost, its ledger, the bytes and the number of weights."""
    device = resolved.precision.device_type
    model = build_train_state(resolved, initialize=load).model
    weights = [*model.parameters(), *model.buffers()]
    sample = partial(
        roll_out,
        model,
        settings.environment,
        settings.tokens,
        settings.rollout,
        step=METERED_STEP,
        prompts=prompts,
        autocast=resolved.precision.autocast,
    )
    # Metered first, which also warms what the second is timed with.
    metered = meter_step(model, sample, device_type=device, resident=weights if device == "cpu" else None)
    watch = Stopwatch(device)
    rollout = sample(watch=watch)
    tokens = rollout.computed_prompt_tokens + rollout.generated_tokens
    sampling = PhaseMetrics(tokens, metered.ledger.flops, metered.peak_bytes, watch.seconds.get("rollout", 0.0))
    grading = PhaseMetrics(seconds=watch.seconds.get("reward", 0.0))
    weight_bytes = sum(tensor.untyped_storage().nbytes() for tensor in weights)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return rollout, sampling, grading, metered.ledger, weight_bytes, n_parameters


@dataclass(frozen=True)
class _Counted:
    """The count of a phase on micro-batches."""

    ledger: Ledger
    parts: Sequence[SequenceMicroBatch]
    times: int = 1
    """Number of times a step repeats the phase."""
    passes: int = 1
    """Passes over all tokens in the ledger."""

    def metrics(self, price: Price) -> PhaseMetrics:
        tokens = sum(part.rows.inputs.numel() for part in self.parts)
        return PhaseMetrics(
            self.times * self.passes * tokens,
            self.times * self.ledger.flops,
            self.ledger.peak_bytes,
            self.times * price.seconds,
        )


def _counted_updates(
    resolved: ResolvedRecipe, settings: ReinforcementSettings, sequences: Sequence[TokenSequence]
) -> _Counted:
    """Count all updates of an epoch, one after the other, in the shapes of their parts of the completions."""
    names = ["advantages", *([OLD] if settings.needs_old else [])]
    names += [REFERENCE] if settings.config.kl_weight else []
    names += [OLD_VALUES, "returns"] if settings.config.algorithm == "ppo" else []
    size, n = settings.config.group_size, settings.config.updates_per_rollout
    groups = [sequences[first : first + size] for first in range(0, len(sequences), size)]
    updates = [
        _parts(resolved, settings, [each for group in groups[part::n] for each in group], names)
        for part in range(min(n, resolved.recipe.training.batch_size))
    ]
    objective = policy_objective(settings.config)
    counted: Objective = objective if settings.needs_old else FreshObjective(objective)
    totals = [totals_of(parts) for parts in updates]
    ends = np.cumsum([0, *map(len, updates)]).tolist()

    def step(train_state: TrainState, parts: Sequence[SequenceMicroBatch]) -> None:
        for own_totals, (begin, end) in zip(totals, pairwise(ends), strict=True):
            own = parts[begin:end]
            loss_of = loss_of_parts(own, counted, own_totals, {})
            train_state.step_on_sequences(0, [part.rows for part in own], loss_of)

    known = [with_known_coefficients(parts, counted, each) for parts, each in zip(updates, totals, strict=True)]
    everything = [part for parts in known for part in parts]
    return _Counted(count_parts(resolved, everything, step), everything, settings.config.epochs)


def _counted_scores(
    resolved: ResolvedRecipe, settings: ReinforcementSettings, sequences: Sequence[TokenSequence]
) -> _Counted | None:
    """Count the passes without gradients, of the model and of its reference; None where a step has none."""
    passes = settings.needs_old + (settings.config.kl_weight > 0)
    if not passes:
        return None
    parts = _parts(resolved, settings, sequences, [])

    def step(train_state: TrainState, parts: Sequence[SequenceMicroBatch]) -> None:
        model, autocast = train_state.parallel_model, train_state.precision.autocast
        if settings.needs_old:
            score_parts(model, parts, autocast=autocast)
        if settings.config.kl_weight:
            with adapters_off(train_state.model):
                score_parts(model, parts, autocast=autocast)

    return _Counted(count_parts(resolved, parts, step, updates=False), parts, passes=passes)


def _parts(
    resolved: ResolvedRecipe,
    settings: ReinforcementSettings,
    sequences: Sequence[TokenSequence],
    names: Sequence[str],
) -> list[SequenceMicroBatch]:
    """Pack sequences with stand-ins of these names; at least one micro-batch, even without sequences."""
    examples: list[Example] = [
        (each.with_values(**dict.fromkeys(names, torch.zeros(each.n_trained).numpy())),) for each in sequences
    ]
    return micro_batches_of(
        examples,
        max_tokens=settings.max_tokens,
        row_length=resolved.recipe.model.context_length,
        packing=settings.packing,
        temperature=settings.config.temperature,
        at_least=1,
    )


def _rule(
    resolved: ResolvedRecipe,
    settings: ReinforcementSettings,
    n_prompts: int,
    sequences: Sequence[TokenSequence],
    scores: _Counted | None,
) -> dict[str, PhaseMetrics]:
    """The longest completions, each turn as long as it may be; 2 FLOPs per parameter and token forwards, 6 with the
    backward pass."""
    model = resolved.recipe.model
    parameters = multiplying_parameters_by_rule(model)
    prompt = max(len(each.tokens) - each.n_trained for each in sequences)
    turns = settings.config.tool_calls + 1 if settings.config.tools else 1
    longest = min(prompt + turns * settings.config.max_answer, model.context_length)
    tokens = n_prompts * settings.config.group_size * longest
    rule = {
        "rollout": PhaseMetrics(tokens, 2 * parameters * tokens),
        "update": PhaseMetrics(settings.config.epochs * tokens, 6 * parameters * tokens * settings.config.epochs),
    }
    if scores is not None:
        rule["log-probabilities"] = PhaseMetrics(scores.passes * tokens, 2 * parameters * tokens * scores.passes)
    return rule


# The accounts of a step by phase: tokens, FLOPs, peak bytes, seconds and dollars.


_UNITS: dict[str, Unit] = {"tokens": "count", "flops": "FLOP", "peak_bytes": "bytes", "seconds": "seconds"}


TOKENS = "tokens per step"
"""The row of all phases' tokens."""


def sum_of(by_phase: ByPhase, what: str) -> float | None:
    """Add up the known values of all phases; None without any."""
    known = [value for each in by_phase.values() if (value := getattr(each, what)) is not None]
    return sum(known) if known else None


def joined(ledgers: Sequence[Ledger]) -> Ledger:
    """One ledger of consecutive computations; its bytes are those of the last."""
    *before, last = ledgers
    n_before = sum(len(each.rows) for each in before)
    unknown = [Counter(each.unknown_operators) for each in ledgers]
    return replace(
        last,
        rows=tuple(row for each in ledgers for row in each.rows),
        timeline=tuple(moment._replace(row=moment.row + n_before) for moment in last.timeline),
        unknown_operators=dict(sum(unknown, Counter())),
    )


def phase_rows(rule: ByPhase, count: ByPhase, usd_per_hour: float | None) -> list[QuantityRow]:
    """The rows of a plan: the tokens of a step, and each quantity of each phase that it has."""
    rows = [QuantityRow(TOKENS, "count", sum_of(rule, "tokens"), sum_of(count, "tokens"))]
    nothing = PhaseMetrics()
    for phase in PHASES:
        by_rule, counted = rule.get(phase, nothing), count.get(phase, nothing)
        for what, unit in _UNITS.items():
            metrics = getattr(by_rule, what), getattr(counted, what)
            if metrics != (None, None):
                rows.append(QuantityRow(row_name(phase, what), unit, *metrics))
        if usd_per_hour is not None and counted.seconds is not None:
            rows.append(QuantityRow(row_name(phase, "dollars"), "USD", None, dollars(counted.seconds, usd_per_hour)))
    return rows


def metered_rows(metered: ByPhase, usd_per_hour: float | None) -> dict[str, float]:
    rows: dict[str, float] = {TOKENS: sum_of(metered, "tokens") or 0}
    for phase, metrics in metered.items():
        for what in _UNITS:
            value = getattr(metrics, what)
            if value is not None:
                rows[row_name(phase, what)] = value
        if usd_per_hour is not None and metrics.seconds is not None:
            rows[row_name(phase, "dollars")] = dollars(metrics.seconds, usd_per_hour)
    return rows


def row_name(phase: str, what: str) -> str:
    """A row's name, such as "rollout: peak bytes"."""
    return f"{phase}: {'FLOPs' if what == 'flops' else what.replace('_', ' ')}"


@dataclass
class PhaseTimes(Phases):
    """Times the phases of steps; grading within the rollout is a phase of its own."""

    steps: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each step, by phase."""
    _now: dict[str, float] = field(default_factory=dict)

    def run(self, phase: str, function: Callable[[], Result]) -> Result:
        begin, graded = time.perf_counter(), self._now.get("reward", 0.0)
        result = function()
        # Grading within the phase was timed by `watching`.
        within = self._now.get("reward", 0.0) - graded
        self._now[phase] = self._now.get(phase, 0.0) + time.perf_counter() - begin - within
        return result

    def watching(self, watch: Watch) -> Watch:
        """Wrap a watch so that the seconds of "reward" are kept here too."""

        @contextmanager
        def watched(part: str) -> Iterator[None]:
            begin = time.perf_counter()
            with watch(part):
                yield
            if part == "reward":
                self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - begin

        return watched

    def end_step(self) -> None:
        for phase, seconds in self._now.items():
            self.steps.setdefault(phase, []).append(seconds)
        self._now = {}

    @property
    def medians(self) -> dict[str, float]:
        return {phase: statistics.median(seconds) for phase, seconds in self.steps.items()}


@dataclass
class PhaseMeters(Phases):
    """Meters the phases of one step."""

    model: nn.Module
    device_type: str
    resident: Callable[[], Iterable[Tensor]]
    """The tensors that last: weights and the optimizer's state."""
    found: dict[str, StepMeasurement] = field(default_factory=dict)

    def run(self, phase: str, function: Callable[[], Result]) -> Result:
        results: list[Result] = []
        self.found[phase] = meter_step(
            self.model,
            lambda: results.append(function()),
            device_type=self.device_type,
            resident=self.resident() if self.device_type == "cpu" else None,
        )
        return results[0]

    @property
    def step(self) -> StepMeasurement:
        """All phases together: their operators, and the largest of their peaks."""
        found = [self.found[phase] for phase in PHASES if phase in self.found]
        ledger = joined([each.ledger for each in found])
        return replace(found[-1], ledger=ledger, peak_bytes=max(each.peak_bytes for each in found))
