"""A step of reinforcement learning: completions, their rewards, log-probabilities, and updates on them.

Each rank completes prompts of its own; rewards are gathered, so that baselines and metrics are those of the whole
batch.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.ranks import ALONE
from napkin.environments.environment import Environment
from napkin.errors import NapkinError
from napkin.model.adapters import adapters_off
from napkin.model.transformer import Transformer
from napkin.recipe.layout import Layout
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.train_step.step import TrainState, Watch
from napkin.tuning.packing import Packing, tokens_in_rows
from napkin.tuning.policy_gradient import (
    OLD,
    OLD_VALUES,
    SAMPLER,
    Credit,
    FreshObjective,
    advantages_of,
    parts_of,
    policy_objective,
    trained_examples,
)
from napkin.tuning.rollout import (
    ConversationTokens,
    Rollout,
    RolloutSettings,
    roll_out,
    roll_out_unequal,
    seed_of_draw,
)
from napkin.tuning.sampler_correction import sampler_gap
from napkin.tuning.sequence_step import REFERENCE, Objective, SequenceScores, score_examples, train_on_examples

PHASES = ("rollout", "reward", "log-probabilities", "update")

Result = TypeVar("Result")


@dataclass(frozen=True)
class ReinforcementSettings:
    """Everything that a step needs besides the model."""

    config: ReinforcementConfig
    environment: Environment
    tokens: ConversationTokens
    max_tokens: int
    """The size of a micro-batch, padding included."""
    packing: Packing = "packed"

    @property
    def rollout(self) -> RolloutSettings:
        """Sampling settings for training rollouts."""
        config = self.config
        return RolloutSettings(
            config.group_size, config.max_answer, config.temperature, config.seed, config.answers_at_a_time
        )

    @property
    def n_updates(self) -> int:
        return self.config.epochs * self.config.updates_per_rollout

    @property
    def needs_old(self) -> bool:
        """True if log-probabilities from before the first update take a pass of their own. A single update needs none:
        its own log-probabilities are the old ones."""
        return self.n_updates > 1 or self.config.algorithm == "ppo" or self.config.sampler_ratio_limit > 0


@dataclass(frozen=True)
class ReinforcementOutcome:
    """The outcome of a step, over all ranks."""

    loss: float
    """The loss of the last update."""
    metrics: dict[str, float | None]
    tokens: int
    """Sampled tokens that were trained on."""
    updates: int
    """Number of updates made; parts with nothing to train on have none."""
    computed: dict[str, int]
    """Tokens through the model by phase, padding included, on this rank."""
    rollout: Rollout
    """This rank's rollout."""


class Phases:
    """Runs the phases of a step; timing and metering override `run`."""

    def run(self, phase: str, function: Callable[[], Result]) -> Result:
        """Run one of `PHASES`; "reward" runs within "rollout"."""
        return function()


def train_on_rollouts(
    train_state: TrainState,
    number: int,
    prompts: Sequence[int],
    settings: ReinforcementSettings,
    *,
    reference: Transformer | None = None,
    watch: Watch = lambda part: nullcontext(),
    later_watch: Watch | None = None,
    is_fit: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
    phases: Phases | None = None,
) -> ReinforcementOutcome:
    """Sample completions of this rank's prompts of step `number`, given by number, and train on them; a collective.

    `reference` is the model that a divergence is measured from, with a kl_weight; None is the model in training without
    its adapters. `watch` times phases and the parts of updates; after the first update `later_watch` does, since a step
    that has changed weights is not repeated. Updates end where `is_fit` refuses one. Raises NapkinError for a model
    that ranks divide.
    """
    phases, parallel = phases or Phases(), train_state.parallel_model
    if parallel.layout.strategy == "fsdp":
        raise NapkinError("rollouts need unsharded weights, which fsdp does not keep: use ddp")

    def roll(draw: int, prompts: Sequence[int]) -> Rollout:
        return roll_out(
            train_state.model,
            settings.environment,
            settings.tokens,
            replace(settings.rollout, seed=seed_of_draw(settings.config.seed, draw)),
            step=number,
            prompts=prompts,
            autocast=train_state.precision.autocast,
            watch=watch,
        )

    redraws = parts_of(settings.config).redraws
    rollout = phases.run("rollout", lambda: roll_out_unequal(roll, prompts, redraws))
    computed = {"rollout": rollout.computed_prompt_tokens + rollout.generated_tokens}
    sequences = [[episode.sequence for episode in group] for group in rollout.groups]

    def scored() -> list[list[TokenSequence]]:
        with watch("log-probabilities"):
            return _with_scores(train_state, sequences, settings, reference, computed)

    if settings.needs_old or settings.config.kl_weight:
        sequences = phases.run("log-probabilities", scored)
    everyone = _Everyone(parallel, rollout)
    with watch("advantages"):
        credit = everyone.credit(settings.config)
        examples = trained_examples(settings.config, sequences, everyone.own(credit))
    n_parts = min(settings.config.updates_per_rollout, len(everyone.lengths))
    parts: list[list[Example]] = [[] for _ in range(n_parts)]
    for place, group in enumerate(examples, start=everyone.first):
        parts[place % n_parts] += group
    trained_tokens = everyone.lengths * credit.trained_on.numpy()
    # Parts of which no rank trains on a token have no update.
    parts = [each for part, each in enumerate(parts) if trained_tokens[part::n_parts].any()]

    def updated() -> _Updates:
        return _update(train_state, number, parts, settings, computed, watch, later_watch or watch, is_fit)

    updates = phases.run("update", updated)
    gap = {} if not settings.needs_old else everyone.gathered_gap(sequences)
    again = {"redrawn": everyone.redrawn / len(everyone.answers)} if redraws else {}
    metrics: dict[str, float | None] = {**everyone.metrics(credit), **again, **updates.metrics, **gap}
    n_trained = int(trained_tokens.sum())
    return ReinforcementOutcome(updates.loss, metrics, n_trained, updates.made, computed, rollout)


@dataclass
class _Updates:
    loss: float = 0.0
    made: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def _update(
    train_state: TrainState,
    number: int,
    parts: Sequence[list[Example]],
    settings: ReinforcementSettings,
    computed: dict[str, int],
    watch: Watch,
    later_watch: Watch,
    is_fit: Callable[[Tensor, Tensor], bool],
) -> _Updates:
    """Train on each part, as often as there are epochs; metrics are means over the updates."""
    policy = policy_objective(settings.config)
    objective: Objective = policy if settings.needs_old else FreshObjective(policy)
    result, fit = _Updates(), True

    def judge(loss: Tensor, norm: Tensor) -> bool:
        nonlocal fit
        fit = is_fit(loss, norm)
        return fit

    metrics: list[dict[str, float]] = []
    for part in [*parts] * settings.config.epochs:
        step = train_on_examples(
            train_state,
            number,
            part,
            objective,
            max_tokens=settings.max_tokens,
            packing=settings.packing,
            temperature=settings.config.temperature,
            divided=True,
            watch=later_watch if result.made else watch,
            is_fit=judge,
        )
        computed["update"] = computed.get("update", 0) + step.tokens_computed
        metrics.append(step.metrics)
        result.loss = step.loss
        if not fit:
            break
        result.made += 1
    if not metrics:
        # Nothing to train on: all groups are alike, or no completion has a reward.
        is_fit(torch.zeros(()), torch.zeros(()))
    for name in sorted({name for each in metrics for name in each}):
        values = [each[name] for each in metrics if name in each]
        result.metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return result


def _with_scores(
    train_state: TrainState,
    groups: Sequence[Sequence[TokenSequence]],
    settings: ReinforcementSettings,
    reference: Transformer | None,
    computed: dict[str, int],
) -> list[list[TokenSequence]]:
    """Add the trainer's log-probabilities, values, and the reference's log-probabilities."""
    examples: list[Example] = [(sequence,) for group in groups for sequence in group]
    values: list[dict[str, NDArray[np.float32]]] = [{} for _ in examples]
    n_tokens = tokens_in_rows(
        examples,
        max_tokens=settings.max_tokens,
        row_length=train_state.model.config.context_length,
        packing=settings.packing,
    )

    def scores_of(model: ParallelModel) -> list[SequenceScores]:
        computed["log-probabilities"] = computed.get("log-probabilities", 0) + n_tokens
        scores = score_examples(
            model,
            examples,
            max_tokens=settings.max_tokens,
            packing=settings.packing,
            temperature=settings.config.temperature,
            divided=True,
            autocast=train_state.precision.autocast,
        )
        return [each for (each,) in scores]

    if settings.needs_old:
        for each, found in zip(values, scores_of(train_state.parallel_model), strict=True):
            each[OLD] = found.log_probabilities
            if found.scalars is not None:
                each[OLD_VALUES] = found.scalars
    if settings.config.kl_weight:
        # A model in training is its own reference without its adapters.
        frozen = train_state.parallel_model if reference is None else ParallelModel(reference, ALONE, Layout())
        with adapters_off(frozen.model):
            for each, found in zip(values, scores_of(frozen), strict=True):
                each[REFERENCE] = found.log_probabilities
    scored = iter([example[0].with_values(**each) for example, each in zip(examples, values, strict=True)])
    return [[next(scored) for _ in group] for group in groups]


class _Everyone:
    """Rewards and lengths of all ranks' completions, in the order of prompts."""

    def __init__(self, parallel: ParallelModel, rollout: Rollout) -> None:
        self.ranks = parallel.ranks
        own = [
            [
                {
                    "reward": episode.reward,
                    "length": episode.sequence.n_trained,
                    "truncated": episode.truncated,
                    "turns": episode.turns,
                    "parts": episode.parts,
                    "failed": episode.failure is not None,
                }
                for episode in group
            ]
            for group in rollout.groups
        ]
        everyone = self.ranks.all_gather([own, rollout.redrawn])
        gathered = [groups for groups, _ in everyone]
        self.redrawn: int = sum(redrawn for _, redrawn in everyone)
        self.first = sum(len(each) for each in gathered[: self.ranks.info.rank])
        self.n_own = len(own)
        self.answers: list[list[dict[str, Any]]] = [group for each in gathered for group in each]
        self.lengths = self._table("length").astype(np.int64)

    def credit(self, config: ReinforcementConfig) -> Credit:
        truncated = self._table("truncated").astype(bool)
        return advantages_of(config, self._table("reward"), self.lengths, truncated)

    def own(self, credit: Credit) -> Credit:
        rows = slice(self.first, self.first + self.n_own)
        return replace(
            credit, advantages=credit.advantages[rows], trained_on=credit.trained_on[rows], rewards=credit.rewards[rows]
        )

    def metrics(self, credit: Credit) -> dict[str, float]:
        rewards = self._table("reward")
        parts = sorted({name for group in self.answers for each in group for name in each["parts"]})
        metrics = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "length": float(self.lengths.mean()),
            "length_max": float(self.lengths.max()),
            "cut_share": float(self._table("truncated").mean()),
            "equal_groups": credit.equal_groups / len(self.answers),
            "learned_share": float(credit.trained_on.double().mean()),
            "turns": float(self._table("turns").mean()),
            "reward_failures": float(self._table("failed").sum()),
        }
        for name in parts:
            values = [each["parts"].get(name, 0.0) for group in self.answers for each in group]
            metrics[f"part {name}"] = float(np.mean(values))
        return metrics

    def gathered_gap(self, groups: Sequence[Sequence[TokenSequence]]) -> dict[str, float]:
        """The gap between sampler and trainer, where the trainer's log-probabilities took a pass of their own."""
        values = [sequence.values for group in groups for sequence in group]
        old = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *(each[OLD] for each in values)]))
        sampler = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *(each[SAMPLER] for each in values)]))
        gap = sampler_gap(sampler.double(), old.double())
        largest = float(gap["sampler_gap"].max()) if len(old) else 0.0
        everyone = self.ranks.all_gather([len(old), largest, {name: float(each.sum()) for name, each in gap.items()}])
        n_tokens = max(sum(n for n, _, _ in everyone), 1)
        means = {name: sum(sums[name] for _, _, sums in everyone) / n_tokens for name in gap}
        return {**means, "sampler_gap_max": max(most for _, most, _ in everyone)}

    def _table(self, name: str) -> NDArray[np.float64]:
        return np.array([[each[name] for each in group] for group in self.answers], dtype=np.float64)
