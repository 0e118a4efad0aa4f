"""The plan of a run of reinforcement learning, phase by phase.

Completion lengths are unknown in advance, so a trial rollout completes the prompts of a step with the initial weights.
The plan of the rollout is what the trial took; updates and log-probabilities are counted on fake tensors in the shapes
of the trial's completions, and priced like any step.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from napkin.accounting.ledger import Ledger
from napkin.accounting.metering import METERED_STEP, Stopwatch, meter_step
from napkin.accounting.pricing import Price
from napkin.accounting.quantities import QuantityTable
from napkin.chats.token_sequence import Example, TokenSequence
from napkin.model.adapters import adapters_off
from napkin.model.transformer import Transformer
from napkin.planning.rules.sizes import multiplying_parameters_by_rule
from napkin.planning.step.machine import Machine, Progress
from napkin.planning.step.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state
from napkin.tuning.example_plan import count_parts
from napkin.tuning.objective import REFERENCE, Objective, totals_of
from napkin.tuning.packing import SequenceMicroBatch, micro_batches_of
from napkin.tuning.phase_accounting import PhaseMetrics, joined, phase_rows, sum_of, tokens_of
from napkin.tuning.policy_loss import OLD, OLD_VALUES, FreshObjective, policy_objective
from napkin.tuning.reinforcement_step import ReinforcementSettings
from napkin.tuning.rollout import Rollout, roll_out
from napkin.tuning.sequence_step import loss_of_parts, score_parts, with_known_coefficients


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
        return int(tokens_of(self.count) or 0) * self.resolved.layout.batch_parts

    @property
    def rule_flops(self) -> float:
        return sum_of(each.flops for each in self.rule.values()) or 0.0

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
        return sum(each.seconds or 0.0 for each in self.count.values())

    @property
    def longest_phase(self) -> str:
        """The phase that faster hardware would be bought for."""
        return max(self.count, key=lambda phase: self.count[phase].seconds or 0.0)

    def table(self) -> QuantityTable:
        """The table of any plan, and rows for each phase."""
        whole = {row.quantity: row for row in super().table()}
        share = (self.count[self.longest_phase].seconds or 0.0) / max(self.seconds_per_step, 1e-30)
        changed = {
            "peak bytes": dataclasses.replace(whole["peak bytes"], count=self.peak_bytes, note="over all phases"),
            "seconds per step": dataclasses.replace(
                whole["seconds per step"],
                rule=None,
                note=f"count: the rollout as in a trial, updates operator by operator; {share:.0%} is "
                f"{self.longest_phase}: faster hardware is worth most there",
            ),
            "MFU": dataclasses.replace(whole["MFU"], rule=None),
            "seconds in all": dataclasses.replace(whole["seconds in all"], rule=None),
        }
        rows = [changed.get(name, row) for name, row in whole.items()]
        return QuantityTable([*rows, *phase_rows(self.rule, self.count, self.site.usd_per_hour)])

    def _why_flops_differ(self) -> str:
        share = self.ledger.attention_flops / max(self.ledger.flops, 1)
        return f"rule: the longest completions, 2·N per token forwards, 6·N with gradients; attention is {share:.1%}"


def plan_reinforcement(
    resolved: ResolvedRecipe,
    settings: ReinforcementSettings,
    prompts: Sequence[int],
    load: Callable[[Transformer], None],
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
    trial = _trial(resolved, settings, prompts, load)
    progress("counting the updates")
    sequences = [episode.sequence for episode in trial.rollout.episodes]
    updates = _counted_updates(resolved, settings, sequences)
    scores = _counted_scores(resolved, settings, sequences)
    progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    site = machine.site(resolved.precision, ceilings)
    rows, length = max((part.rows.inputs.shape for part in updates.parts), key=lambda shape: shape[0] * shape[1])
    alike = resolved.with_model(context_length=length).with_training(batch_size=rows, micro_batch_size=None)
    scored = [] if scores is None else [scores.ledger]
    prices = machine.price(dataclasses.replace(alike, world_size=1), [updates.ledger, *scored], ceilings, progress)
    optimizer_bytes = updates.ledger.resident_bytes - trial.weight_bytes
    count = {
        "rollout": PhaseMetrics(
            trial.tokens, trial.ledger.flops, trial.peak_bytes + optimizer_bytes, trial.seconds.get("rollout", 0.0)
        ),
        "reward": PhaseMetrics(seconds=trial.seconds.get("reward", 0.0)),
        "update": updates.metrics(prices[0]),
    }
    if scores is not None:
        metrics = scores.metrics(prices[1])
        count["log-probabilities"] = dataclasses.replace(
            metrics, peak_bytes=(metrics.peak_bytes or 0) + optimizer_bytes
        )
    if has_second_model:
        held = {
            phase: (each.peak_bytes or 0) + 4 * trial.n_parameters for phase, each in count.items() if each.peak_bytes
        }
        count |= {phase: dataclasses.replace(count[phase], peak_bytes=peak) for phase, peak in held.items()}
    rule = _rule(resolved, settings, len(prompts), sequences, scores)
    step = joined([trial.ledger, *scored, *[updates.ledger] * updates.times])
    by_pass = {name: updates.times * flops for name, flops in updates.ledger.flops_by("phase").items()}
    return ReinforcementPlan(resolved, step, prices[0], site, rule=rule, count=count, update=by_pass)


@dataclass(frozen=True)
class _Trial:
    """The cost of a trial rollout before the run."""

    rollout: Rollout
    seconds: dict[str, float]
    ledger: Ledger
    peak_bytes: int
    """The peak besides the weights, without the optimizer's state."""
    weight_bytes: int
    n_parameters: int

    @property
    def tokens(self) -> int:
        return self.rollout.computed_prompt_tokens + self.rollout.generated_tokens


def _trial(
    resolved: ResolvedRecipe,
    settings: ReinforcementSettings,
    prompts: Sequence[int],
    load: Callable[[Transformer], None],
) -> _Trial:
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
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in weights)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return _Trial(rollout, dict(watch.seconds), metered.ledger, metered.peak_bytes, nbytes, n_parameters)


@dataclass(frozen=True)
class _Counted:
    """The count of a phase on micro-batches."""

    ledger: Ledger
    parts: Sequence[SequenceMicroBatch]
    times: int = 1
    """How often a step repeats the phase."""
    passes: int = 1
    """Passes over all tokens in the ledger."""

    def metrics(self, price: Price) -> PhaseMetrics:
        """The whole phase's costs in a step."""
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
    """The longest completions; 2 FLOPs per parameter and token forwards, 6 with the backward pass."""
    model = resolved.recipe.model
    parameters = multiplying_parameters_by_rule(model)
    prompt = max(len(each.tokens) - each.n_trained for each in sequences)
    longest = min(prompt + settings.config.max_answer, model.context_length)
    tokens = n_prompts * settings.config.group_size * longest
    rule = {
        "rollout": PhaseMetrics(tokens, 2 * parameters * tokens),
        "update": PhaseMetrics(settings.config.epochs * tokens, 6 * parameters * tokens * settings.config.epochs),
    }
    if scores is not None:
        rule["log-probabilities"] = PhaseMetrics(scores.passes * tokens, 2 * parameters * tokens * scores.passes)
    return rule
