"""Reinforcement learning as a way of tuning: prompts by step, a step of four phases, held-out tasks."""

import dataclasses
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from napkin.accounting.pricing import Measurement
from napkin.distributed.parallel_model import all_resident
from napkin.environments.registry import environment_named
from napkin.environments.tools import ToolEnvironment, tool_schemas, tools_named
from napkin.errors import NapkinError
from napkin.grading.reward import NamedFailures
from napkin.grading.sandbox.tool_program import ToolLimits
from napkin.model.transformer import Transformer
from napkin.planning.step.run_plan import Plan
from napkin.recipe.tuning_recipe import ReinforcementRecipe
from napkin.report.headline import CORRECT
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_record import MOST_ANSWERS, Answered, Said, write_answers
from napkin.train_step.step import Watch
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import IsFit, MeteredStep, no_watch
from napkin.training.method import Setting
from napkin.training.non_finite import Verdict
from napkin.tuning.method import TuningContext, TuningMethod, initial_weights, open_base, reference_model
from napkin.tuning.policy_gradient import parts_of
from napkin.tuning.reinforcement_plan import (
    PhaseMeters,
    PhaseMetrics,
    PhaseTimes,
    ReinforcementPlan,
    metered_rows,
    plan_reinforcement,
)
from napkin.tuning.reinforcement_step import (
    PHASES,
    Phases,
    ReinforcementOutcome,
    ReinforcementSettings,
    train_on_rollouts,
)
from napkin.tuning.rollout import Episode, RolloutSettings, roll_out

REASONS = {
    "equal_groups": "all completions of each prompt had the same reward: use prompts that are neither too hard nor too "
    "easy, or a larger rl.group_size",
    "cut_share": "every completion was truncated: use a larger rl.max_answer",
}
"""Why a step trained on nothing, by the metric that is then 1, and what may help."""


class LostSteps(Callback):
    """Counts the steps of this process that trained on nothing, and says so at the end if they are the majority."""

    def __init__(self) -> None:
        self.steps = 0
        self.lost = dict.fromkeys(REASONS, 0)

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        self.steps += 1
        for figure in REASONS:
            self.lost[figure] += (metrics.figures or {}).get(figure) == 1
        return metrics

    def on_end(self, loop: TrainingLoop) -> None:
        for figure, n in self.lost.items():
            if 2 * n > self.steps:
                loop.on_message(f"in {n:,} of {self.steps:,} steps {REASONS[figure]}")


class ReinforcementMethod(TuningMethod):
    """Trains on rewards of the model's own completions; the prompts of step i depend on rl.seed and i alone."""

    @classmethod
    def open(cls, context: TuningContext) -> "ReinforcementMethod":
        """Open the environment. Raises NapkinError for one that does not exist, and for parts of an algorithm that
        contradict each other."""
        recipe = context.recipe
        assert isinstance(recipe, ReinforcementRecipe)
        parts_of(recipe.rl)
        if recipe.data.train or recipe.data.validation:
            raise NapkinError(
                f"data.train is '{recipe.data.train}', and reinforcement learning reads no data there: name a file of "
                "prompts with --rl.environment"
            )
        if recipe.training.parallelism == "fsdp":
            raise NapkinError(
                "training.parallelism is 'fsdp', which divides weights, and rollouts need whole ones: use ddp"
            )
        return cls(context)

    def __init__(self, context: TuningContext) -> None:
        super().__init__(context)
        recipe = context.recipe
        assert isinstance(recipe, ReinforcementRecipe)
        self.config = recipe.rl
        self.environment, self.held_out = (
            environment_named(self.config.environment, reward=self.config.reward, held_out=held_out)
            for held_out in (False, True)
        )
        self.encoder = context.encoder
        if self.config.tools:
            limits = ToolLimits(seconds=self.config.tool_seconds, output_bytes=self.config.tool_output)
            tools = tools_named(self.config.tools, limits)
            self.environment, self.held_out = (
                ToolEnvironment(each, tools, calls=self.config.tool_calls) for each in (self.environment, self.held_out)
            )
            self.encoder = context.encoder.with_tools(tool_schemas(tools))
        self.settings = ReinforcementSettings(
            self.config,
            self.environment,
            self.encoder,
            self.max_tokens,
            self.packing,
        )

    @property
    def data_checksum(self) -> str:
        """The checksum of environment, reward and tools, their files if they have any, the encoder, and the seed."""
        config = self.config
        named = [config.environment, config.reward]
        parts = [*named, str(config.seed), self.encoder.fingerprint]
        if config.tools:
            parts += [str(each) for each in (config.tool_calls, config.tool_output, config.tool_seconds)]
        return sha256("\0".join(parts).encode() + b"".join(map(_file_content, named))).hexdigest()

    def batch(self, number: int) -> Sequence[int]:
        """The numbers of this rank's prompts: a range of the step's."""
        return own_range(self.recipe.training.batch_size, self.context)

    @property
    def has_second_model(self) -> bool:
        """True if the base model's weights are held too, to measure a divergence from; where adapters are trained, the
        model without them is the reference."""
        return self.config.kl_weight > 0 and self.context.recipe.adapter.kind == "none"

    def make_plan(self, setting: Setting) -> Plan:
        return plan_reinforcement(
            self.resolved,
            self.settings,
            self.batch(0),
            initial_weights(self.context.folder, self.context.recipe),
            setting.machine(self.recipe),
            setting.progress,
            has_second_model=self.has_second_model,
        )

    def step(self) -> MeteredStep:
        return ReinforcementStep(self)

    def evaluation(self) -> Callback:
        return HeldOutRollouts(self)

    def callbacks(self) -> list[Callback]:
        return [LostSteps()]


class ReinforcementStep(MeteredStep):
    """The step of a `ReinforcementMethod`."""

    # It waits for processes that judge completions.
    computes_all_the_time = False

    def __init__(self, method: ReinforcementMethod) -> None:
        super().__init__()
        self.method = method
        self.last: ReinforcementOutcome | None = None
        self._reference: Transformer | None = None
        self._times = PhaseTimes()
        self._meters: PhaseMeters | None = None
        self._metered_tokens: dict[str, int] = {}
        self._failures = NamedFailures()

    def batch(self, loop: TrainingLoop, number: int) -> Sequence[int]:
        return self.method.batch(number)

    def train(self, loop: TrainingLoop, number: int, batch: Sequence[int], watch: Watch, is_fit: IsFit) -> Tensor:
        self.last = self._taken(loop, number, batch, watch, is_fit, Phases() if watch is no_watch else self._times)
        self._times.end_step()
        episodes = (episode for group in self.last.rollout.groups for episode in group)
        for reason in self._failures.new(episode.failure for episode in episodes):
            loop.on_message(f"a reward could not be computed and counts as 0: {reason}")
        return torch.tensor(self.last.loss)

    def _taken(
        self, loop: TrainingLoop, number: int, batch: Sequence[int], watch: Watch, is_fit: IsFit, phases: Phases
    ) -> ReinforcementOutcome:
        if self._reference is None and self.method.has_second_model:
            base = open_base(self.method.context.recipe.tuning.start)
            self._reference = reference_model(base, loop.preparation.precision)
        return train_on_rollouts(
            loop.train_state,
            number,
            batch,
            self.method.settings,
            reference=self._reference,
            watch=watch if watch is no_watch else self._times.watching(watch),
            # The loop's own watch, which does not abandon a step that has changed weights.
            later_watch=watch if watch is no_watch else loop.watch,
            is_fit=is_fit,
            phases=phases,
        )

    def _meter(self, loop: TrainingLoop, number: int, batch: Sequence[int], verdict: Verdict) -> None:
        """Meter each phase separately."""
        train_state = loop.train_state
        reference = [] if self._reference is None else list(self._reference.parameters())
        meters = PhaseMeters(
            train_state.model,
            loop.device_type,
            lambda: [*all_resident(train_state.model, train_state.optimizer), *reference],
        )
        self.last = self._taken(loop, number, batch, no_watch, verdict, meters)
        self._meters, self._metered_tokens = meters, dict(self.last.computed)
        self.metered = meters.step

    def in_planned_steps(self, loop: TrainingLoop) -> float:
        """Compare by the tokens of each phase: completions are longer or shorter than those of the trial."""
        plan = loop.preparation.plan
        if not isinstance(plan, ReinforcementPlan) or self.last is None:
            return 1.0
        return plan.steps_like(self.last.computed)

    def measurement(self, loop: TrainingLoop) -> Measurement | None:
        measurement, plan = super().measurement(loop), loop.preparation.plan
        if measurement is None or self._meters is None or plan is None:
            return measurement
        seconds = self._times.medians
        phases = {
            phase: PhaseMetrics(
                self._metered_tokens.get(phase),
                None if meter is None else meter.ledger.flops,
                None if meter is None else meter.peak_bytes,
                seconds.get(phase),
            )
            for phase in PHASES
            for meter in [self._meters.found.get(phase)]
        }
        return dataclasses.replace(measurement, further=metered_rows(phases, plan.site.usd_per_hour))

    def micro_batches(self, loop: TrainingLoop, batch: Sequence[int]) -> int:
        """The most that the first update can have, by the longest completions."""
        config = self.method.config
        tokens = len(batch) * config.group_size * config.max_answer // config.updates_per_rollout
        return max(tokens // self.method.settings.max_tokens, 1)

    def tensors(self, batch: Sequence[int]) -> dict[str, Tensor]:
        episodes = [] if self.last is None else self.last.rollout.episodes
        return {f"answer {number}": torch.from_numpy(each.sequence.tokens) for number, each in enumerate(episodes)}

    def tokens(self, loop: TrainingLoop) -> tuple[int, int, float | None]:
        assert self.last is not None
        loop.history.tokens += self.last.tokens
        # Steps differ in their number of updates, which the optimizer counts.
        loop.history.updates = int(loop.train_state.optimizer.param_groups[0]["step"])
        return loop.history.tokens, self.last.tokens, None

    def further_metrics(self) -> dict[str, float | None]:
        assert self.last is not None
        return self.last.metrics


class HeldOutRollouts(Callback):
    """Completes held-out tasks greedily before the first step, after it, and when an evaluation is due."""

    def __init__(self, method: ReinforcementMethod) -> None:
        self.method = method

    def on_start(self, loop: TrainingLoop) -> None:
        if loop.step == 0 and self.method.config.evaluation_prompts:
            with loop.watch("evaluation"):
                evaluation = self._answered(loop, 0)
            loop.on_message(
                f"before the first step: held-out reward {evaluation['held-out reward']:.3f}, "
                f"{evaluation[CORRECT]:.1%} correct"
            )

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        if not (loop.step == 1 or loop.evaluation_is_due) or not self.method.config.evaluation_prompts:
            return metrics
        with loop.watch("evaluation"), loop.train_state.averaged():
            evaluation = self._answered(loop, loop.step)
        return dataclasses.replace(metrics, figures={**(metrics.figures or {}), **evaluation}, seconds=loop.seconds)

    def _answered(self, loop: TrainingLoop, step: int) -> dict[str, float]:
        """Complete this rank's held-out tasks, the same ones at every evaluation, greedily; a collective."""
        method, config, ranks = self.method, self.method.config, loop.ranks
        episodes: list[Episode] = []
        if own := own_range(config.evaluation_prompts, method.context):
            episodes = roll_out(
                loop.train_state.model,
                method.held_out,
                method.encoder,
                RolloutSettings(1, config.max_answer, 0.0, config.seed, config.answers_at_a_time),
                step=0,
                prompts=own,
                autocast=loop.train_state.precision.autocast,
            ).episodes
        own_episodes = [[each.reward, each.truncated, each.sequence.n_trained] for each in episodes]
        everyone = [each for part in ranks.all_gather(own_episodes) for each in part]
        if ranks.is_rank_zero:
            write_answers(loop.run.path, step, map(_answered, episodes[:MOST_ANSWERS]))
        n = len(everyone)
        return {
            "held-out reward": sum(reward for reward, _, _ in everyone) / n,
            CORRECT: sum(reward >= 1 for reward, _, _ in everyone) / n,
            "held-out cut_share": sum(truncated for _, truncated, _ in everyone) / n,
            "held-out length": sum(length for _, _, length in everyone) / n,
        }


def own_range(n: int, context: TuningContext) -> range:
    """This rank's share of the numbers below n."""
    rank, size = context.setting.ranks.info.rank, context.setting.ranks.world_size
    return range(n * rank // size, n * (rank + 1) // size)


def _answered(episode: Episode) -> Answered:
    messages = tuple(Said(each.role, each.content) for each in episode.messages)
    return Answered(messages, episode.reward, episode.sequence.n_trained, episode.ending, episode.failure)


def _file_content(name: str) -> bytes:
    """The content of FILE.py:NAME, or of a file of prompts; empty for what is bundled."""
    path = Path(name.partition(".py:")[0] + ".py" if ".py:" in name else name)
    return path.read_bytes() if path.is_file() else b""
