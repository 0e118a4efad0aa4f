"""On a bandit all outcomes can be listed: the expected update of each algorithm is that of its closed form."""

from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.token_sequence import sequence_of
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.policy_gradient import PRESETS, advantages_of, divergence_terms, policy_objective, trained_examples
from napkin.tuning.sequence_step import totals_of

LOGITS = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64)
PROBABILITIES = LOGITS.softmax(0).numpy()
GROUP = 4


def expected_update(config: ReinforcementConfig, rewards: np.ndarray) -> np.ndarray:
    """The expectation of minus the gradient over all groups of answers, each of one token, by their probabilities."""
    objective, total = policy_objective(config), np.zeros(3)
    for arms in product(range(3), repeat=GROUP):
        logits = LOGITS.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        answers = []
        for arm in arms:
            old = np.array([logprobs[arm].item()], np.float32)
            values = {"old_log_probabilities": old, "old_values": np.array([0.7], np.float32)}
            answers.append(sequence_of([0], [arm]).with_values(**values))
        credit = advantages_of(config, [rewards[list(arms)]], np.ones((1, GROUP)), np.zeros((1, GROUP), bool))
        examples = [example for group in trained_examples(config, [answers], credit) for example in group]
        if not examples:
            continue
        (part,) = micro_batches_of(examples, max_tokens=100, row_length=9)
        chosen = logprobs[part.rows.targets]
        loss, _ = objective.loss(part, TokenScores(chosen, 0 * chosen, 0 * chosen.detach()), totals_of([part]))
        (gradient,) = torch.autograd.grad(loss, logits)
        total -= PROBABILITIES[list(arms)].prod() * gradient.numpy()
    return total


def gradient_of_mean(rewards: np.ndarray) -> np.ndarray:
    """Of the expected reward: p_k · (r_k - mean)."""
    return PROBABILITIES * (rewards - PROBABILITIES @ rewards)


def config_of(algorithm: PolicyAlgorithm, **settings: Any) -> ReinforcementConfig:
    return ReinforcementConfig(algorithm=algorithm, max_answer=1, group_size=GROUP, overlong="keep", **settings)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [("rloo", 1.0), ("ppo", 1.0), ("reinforce", 1 - 1 / GROUP), ("dr-grpo", 1 - 1 / GROUP)],
)
def test_unbiased_algorithms_follow_the_gradient_of_the_expected_reward(
    algorithm: PolicyAlgorithm, factor: float
) -> None:
    rewards = np.array([0.3, -1.0, 2.0])
    np.testing.assert_allclose(
        expected_update(config_of(algorithm), rewards), factor * gradient_of_mean(rewards), atol=1e-7
    )


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "cispo", "gspo"])
def test_a_groups_normalised_rewards_weigh_the_gradient_by_the_probability_of_success(
    algorithm: PolicyAlgorithm,
) -> None:
    """With rewards of 0 and 1 a group with k successes has advantages (1 - k/n) / s and -k/n / s, where s is the
    sample's standard deviation, and given k the mean of A · grad log p over answers is
    k/n · (1 - k/n) / s · grad p / (p (1 - p)), p the probability of success."""
    rewards = np.array([1.0, 0.0, 1.0])
    p, n = float(PROBABILITIES @ rewards), GROUP
    factor = 0.0
    for k in range(1, n):
        share = k / n
        spread = np.sqrt(n / (n - 1) * share * (1 - share)) + 1e-4
        factor += comb(n, k) * p**k * (1 - p) ** (n - k) * share * (1 - share) / spread / (p * (1 - p))
    np.testing.assert_allclose(
        expected_update(config_of(algorithm), rewards), factor * gradient_of_mean(rewards), atol=1e-7
    )


def test_expert_iteration_follows_the_log_probability_of_success() -> None:
    rewards = np.array([1.0, 0.0, 1.0])
    p = float(PROBABILITIES @ rewards)
    expected = (1 - (1 - p) ** GROUP) * gradient_of_mean(rewards) / p
    np.testing.assert_allclose(expected_update(config_of("expert-iteration"), rewards), expected, atol=1e-7)


def test_maxrl_follows_the_logarithm_of_success_up_to_the_size_of_the_group() -> None:
    """The sum over k < n of the gradient of pass@k / k, where pass@k is 1 - (1 - p)^k."""
    rewards = np.array([1.0, 0.0, 1.0])
    p = float(PROBABILITIES @ rewards)
    factor = sum((1 - p) ** (k - 1) for k in range(1, GROUP))
    np.testing.assert_allclose(
        expected_update(config_of("maxrl"), rewards), factor * gradient_of_mean(rewards), atol=1e-7
    )


def test_maxrl_refuses_rewards_that_are_no_successes() -> None:
    with pytest.raises(NapkinError, match="a reward is -1"):
        advantages_of(config_of("maxrl"), [[1.0, -1.0, 0.0, 0.0]], np.ones((1, GROUP)))


def test_every_algorithm_has_a_closed_form_here() -> None:
    tested = {"rloo", "ppo", "reinforce", "dr-grpo", "grpo", "dapo", "cispo", "gspo", "maxrl", "expert-iteration"}
    assert PRESETS.keys() == tested


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_divergence_has_the_expected_value_and_gradient_that_its_table_says(estimator: Any) -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs, reference = logits.log_softmax(0), torch.tensor([0.9, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    terms = divergence_terms(logprobs, reference, estimator)
    (found,) = torch.autograd.grad((logprobs.exp().detach() * terms).sum(), logits, retain_graph=True)
    forward = (logprobs.exp() * (logprobs - reference)).sum()
    backward = (reference.exp() * (reference - logprobs)).sum()
    (expected,) = torch.autograd.grad(backward if estimator == "k3" else forward, logits)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    if estimator != "k2":
        np.testing.assert_allclose((logprobs.exp() @ terms).item(), forward.item(), atol=1e-12)
