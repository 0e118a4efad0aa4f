"""A step of reinforcement learning: what it learns, from which answers, with which figures."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from napkin.environments.environment import Task, ask
from napkin.model.adapters import add_adapters
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig, ReinforcementRecipe
from napkin.train_step.step import TrainState, build_train_state
from napkin.tuning.policy_gradient import SAMPLER
from napkin.tuning.reinforcement_step import ReinforcementOutcome, ReinforcementSettings, train_on_rollouts
from oracles.letter_games import CONFIG, Letters, Turns

PROMPTS = range(4)


def train_state_of(**training: Any) -> TrainState:
    recipe = ReinforcementRecipe(
        model=CONFIG,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", clip_norm=1e9),
        training=TrainingConfig(batch_size=4, init_seed=1, steps=10, **training),
    )
    made = build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))
    with torch.no_grad():
        made.model.head_weight.mul_(4)
    return made


def settings_of(environment: Any = None, **config: Any) -> ReinforcementSettings:
    chosen = {"group_size": 3, "max_answer": 8, "temperature": 0.7, "seed": 5, **config}
    return ReinforcementSettings(ReinforcementConfig(**chosen), environment or Turns(), Letters(), 64)


def taken(train_state: TrainState, settings: ReinforcementSettings, **how: Any) -> tuple[ReinforcementOutcome, float]:
    norms: list[float] = []

    def is_fit(loss: torch.Tensor, norm: torch.Tensor) -> bool:
        norms.append(float(norm))
        return True

    outcome = train_on_rollouts(train_state, 0, PROMPTS, settings, is_fit=is_fit, **how)
    return outcome, norms[0]


def plain_norm(model: Transformer, outcome: ReinforcementOutcome, cut_penalty: float = 0.0) -> float:
    """GRPO's gradient, one answer at a time: the ratio is 1, and the reference is the model itself."""
    model.zero_grad()
    n = len(outcome.rollout.episodes)
    for group in outcome.rollout.groups:
        rewards = np.array([episode.reward - cut_penalty * episode.truncated for episode in group])
        for episode, reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            tokens = torch.from_numpy(episode.sequence.tokens)
            logprobs = (model(tokens[None, :-1])[0] / 0.7).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            terms = -float(advantage) * logprobs[torch.from_numpy(episode.sequence.loss_mask[1:])]
            (terms.mean() / n).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def test_the_gradient_is_that_of_single_answers() -> None:
    train_state = train_state_of()
    before = {name: tensor.clone() for name, tensor in train_state.model.state_dict().items()}
    outcome, norm = taken(train_state, settings_of())
    train_state.model.load_state_dict(before)
    assert norm == pytest.approx(plain_norm(train_state.model, outcome), rel=1e-3)
    metrics = outcome.metrics
    assert metrics["reward"] == np.mean([episode.reward for episode in outcome.rollout.episodes])
    assert metrics["part letters"] == metrics["reward"]
    assert metrics["cut_share"] == np.mean([episode.truncated for episode in outcome.rollout.episodes])
    assert metrics["ratio_mean"] == pytest.approx(1)
    assert 0 < (metrics["sampler_gap"] or 0) <= (metrics["sampler_gap_max"] or 0) < 1e-4
    assert abs(metrics["sampler_kl"] or 0) < 1e-6
    assert outcome.tokens == sum(episode.sequence.n_trained for episode in outcome.rollout.episodes)


def test_answers_that_the_context_cuts_get_the_whole_penalty_for_length() -> None:
    class LongPrompts(Turns):
        def start(self, seed: int) -> Task:
            return ask("abcde" * 10 + "abcde"[: seed % 5], 0)

    train_state = train_state_of()
    before = {name: tensor.clone() for name, tensor in train_state.model.state_dict().items()}
    # None of the answers reaches the penalty's window by its length: the prompt leaves no room for that.
    settings = settings_of(LongPrompts(), max_answer=CONFIG.context_length, overlong="penalty", overlong_window=1)
    outcome, norm = taken(train_state, settings)
    truncated = [episode.truncated for episode in outcome.rollout.episodes]
    assert 0 < sum(truncated) < len(truncated)
    assert max(episode.sequence.n_trained for episode in outcome.rollout.episodes) < CONFIG.context_length - 1
    train_state.model.load_state_dict(before)
    assert norm == pytest.approx(plain_norm(train_state.model, outcome, cut_penalty=1.0), rel=1e-3)
    assert norm > 1e-3


def test_a_model_without_its_adapters_is_their_reference() -> None:
    """The divergence from it is that from a copy of the start."""
    found = []
    for reference in (train_state_of().model, None):
        train_state = train_state_of()
        add_adapters(train_state.model, rank=2, alpha=4.0, modules=("attention",), seed=0)
        with torch.no_grad():
            for name, parameter in train_state.model.named_parameters():
                if ".adapter." in name:
                    parameter.add_(0.1)
        outcome, _ = taken(train_state, settings_of(kl_weight=0.5), reference=reference)
        found.append(outcome.metrics["kl"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert (found[0] or 0) > 1e-3


def test_the_first_of_several_updates_is_that_of_one() -> None:
    """Old log-probabilities that are computed apart are those of the update itself; later ratios are not 1."""
    one, of_one = taken(train_state_of(), settings_of())
    train_state = train_state_of()
    several, of_first = taken(train_state, settings_of(epochs=3))
    assert of_first == pytest.approx(of_one, rel=1e-4)
    assert (several.updates, one.updates) == (3, 1)
    assert train_state.optimizer.param_groups[0]["step"] == 3
    assert (several.metrics["ratio_max"] or 0) > 1.001
    assert several.metrics["sampler_gap"] == pytest.approx(one.metrics["sampler_gap"], rel=0.5)
    assert several.computed["log-probabilities"] > 0
    assert "log-probabilities" not in one.computed


def test_parts_of_the_groups_are_all_learned() -> None:
    train_state = train_state_of()
    outcome, _ = taken(train_state, settings_of(updates_per_rollout=4))
    assert outcome.updates == 4
    assert outcome.tokens == sum(episode.sequence.n_trained for episode in outcome.rollout.episodes)


def test_a_step_is_a_function_of_weights_and_number() -> None:
    states = [train_state_of() for _ in range(2)]
    outcomes = [taken(state, settings_of(epochs=2))[0] for state in states]
    assert outcomes[0].metrics == outcomes[1].metrics
    for one, other in zip(*(state.model.parameters() for state in states), strict=True):
        assert torch.equal(one, other)


def test_answers_that_teach_nothing_change_nothing() -> None:
    train_state = train_state_of()
    before = [parameter.clone() for parameter in train_state.model.parameters()]
    outcome, norm = taken(train_state, settings_of(Turns(reward=1.0), algorithm="dapo", overlong="keep"))
    assert (norm, outcome.updates, outcome.tokens) == (0, 0, 0)
    assert outcome.metrics["equal_groups"] == 1
    assert all(torch.equal(one, other) for one, other in zip(before, train_state.model.parameters(), strict=True))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "cispo", "rloo"])
def test_algorithms_raise_the_reward(algorithm: str) -> None:
    train_state = train_state_of()
    if algorithm == "ppo":
        assert train_state.model.scalar_head is None
        recipe = train_state.recipe
        assert isinstance(recipe, ReinforcementRecipe)
        recipe = dataclasses.replace(recipe, rl=ReinforcementConfig(algorithm="ppo"))
        train_state = build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))
    settings = settings_of(algorithm=algorithm, group_size=8, max_answer=6, temperature=1.0)
    rewards = []
    for number in range(8):
        outcome = train_on_rollouts(train_state, number, PROMPTS, settings)
        rewards.append(outcome.metrics["reward"] or 0.0)
    # Longer answers have larger rewards: 6 letters at most.
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.3


def test_a_divergence_is_measured_from_the_reference() -> None:
    train_state = train_state_of()
    reference = Transformer(CONFIG, seed=2)
    outcome, _ = taken(train_state, settings_of(kl_weight=0.1), reference=reference)
    terms = []
    for episode in outcome.rollout.episodes:
        tokens = torch.from_numpy(episode.sequence.tokens)
        with torch.no_grad():
            logprobs = (reference(tokens[None, :-1])[0].double() / 0.7).log_softmax(-1)
        behind = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()[episode.sequence.loss_mask[1:]]
        behind = behind - episode.sequence.values[SAMPLER]
        terms.append(np.exp(behind) - behind - 1)
    assert outcome.metrics["kl"] == pytest.approx(np.concatenate(terms).mean(), rel=1e-3)
