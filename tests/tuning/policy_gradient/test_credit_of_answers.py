"""Rewards become advantages as the papers' equations say, and what cannot be learned from is counted or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.token_sequence import TokenSequence
from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.tuning.policy_gradient import (
    PRESETS,
    advantages_of,
    generalised_advantages,
    group_normalised,
    less_mean_of_others,
    overlong_penalty,
    parts_of,
    trained_examples,
)

REWARDS = np.array([[1.0, 0.0, 0.25, 1.0], [0.5, 0.5, 0.5, 0.5], [-2.0, 3.0, 0.1, 0.1]])
LENGTHS = np.full((3, 4), 5)


def test_advantages_are_those_of_numpy() -> None:
    mean, std = REWARDS.mean(1, keepdims=True), REWARDS.std(1, ddof=1, keepdims=True)
    others = np.array([[np.delete(row, i).mean() for i in range(4)] for row in REWARDS])
    expected = {
        "group": (REWARDS - mean) / (std + 1e-4),
        "group mean": REWARDS - mean,
        "leave one out": REWARDS - others,
        "batch": REWARDS - REWARDS.mean(),
        "none": REWARDS,
    }
    for name, advantages in expected.items():
        algorithm: Any = "rloo"
        credit = advantages_of(ReinforcementConfig(algorithm=algorithm, advantage=name), REWARDS, LENGTHS)  # pyright: ignore[reportArgumentType]
        np.testing.assert_allclose(credit.advantages, advantages, atol=1e-12)
        assert credit.trained_on.all()
        assert credit.equal_groups == 1


def test_generalised_advantages_are_the_sums_of_their_definition() -> None:
    generator = np.random.default_rng(0)
    rewards, values, discount, decay = generator.normal(size=9), generator.normal(size=9), 0.97, 0.8
    after = np.append(values[1:], 0.0)
    errors = rewards + discount * after - values
    expected = [sum((discount * decay) ** k * errors[t + k] for k in range(9 - t)) for t in range(9)]
    found = generalised_advantages(torch.tensor(rewards), torch.tensor(values), discount=discount, decay=decay)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_value_head_learns_returns_and_with_decay_1_they_are_the_reward() -> None:
    config = ReinforcementConfig(algorithm="ppo", gae_lambda=1.0, group_size=1)
    answer = TokenSequence(np.arange(5), np.arange(5) >= 2, {"old_values": np.array([0.5, -1, 2], np.float32)})
    credit = advantages_of(config, [[0.75]], [[3]])
    (((learned,),),) = trained_examples(config, [[answer]], credit)
    np.testing.assert_allclose(learned.values["returns"], 0.75)
    np.testing.assert_allclose(learned.values["advantages"], [0.25, 1.75, -1.25])
    with pytest.raises(NapkinError, match="no 'old_values'"):
        trained_examples(config, [[TokenSequence(answer.tokens, answer.loss_mask)]], credit)


def test_all_tokens_of_an_answer_have_its_advantage() -> None:
    config = ReinforcementConfig(algorithm="dr-grpo", group_size=2)
    answers = [TokenSequence(np.arange(n), np.arange(n) >= 1) for n in (3, 6)]
    examples = trained_examples(config, [answers], advantages_of(config, [[1.0, 0.0]], [[2, 5]]))
    assert [sequence.values["advantages"].tolist() for group in examples for (sequence,) in group] == [
        [0.5] * 2,
        [-0.5] * 5,
    ]


def test_expert_iteration_learns_answers_with_rewards_all_alike() -> None:
    credit = advantages_of(ReinforcementConfig(algorithm="expert-iteration"), REWARDS, LENGTHS)
    assert credit.trained_on.tolist() == (REWARDS > 0).tolist()
    assert (credit.advantages == 1).all()


def test_dapo_drops_groups_with_equal_rewards_and_counts_them() -> None:
    # The penalty for length does not make a group of right answers worth learning from.
    lengths = np.array([[5] * 4, [5, 90, 100, 5], [5] * 4])
    credit = advantages_of(ReinforcementConfig(algorithm="dapo", max_answer=100), REWARDS, lengths)
    assert credit.trained_on.tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert credit.equal_groups == 1
    np.testing.assert_allclose(credit.rewards.numpy() - REWARDS, [[0] * 4, [0, -0.5, -1, 0], [0] * 4])


def test_the_penalty_for_length_is_dapos() -> None:
    lengths = torch.tensor([[1, 80, 81, 90, 99, 100]])
    expected = [0, 0, -0.05, -0.5, -0.95, -1]
    np.testing.assert_allclose(overlong_penalty(lengths, max_length=100, window=20)[0], expected)


def test_all_answers_cut_leaves_nothing_to_learn_with_mask() -> None:
    config = ReinforcementConfig(overlong="mask", max_answer=5)
    credit = advantages_of(config, REWARDS, LENGTHS)
    assert not credit.trained_on.any()
    answers = [[TokenSequence(np.arange(6), np.arange(6) >= 1)] * 4] * 3
    assert trained_examples(config, answers, credit) == [[], [], []]
    # An answer that ended with its last possible token was not truncated.
    assert advantages_of(config, REWARDS, LENGTHS, truncated=np.zeros((3, 4), bool)).trained_on.all()


@pytest.mark.parametrize("reward", [0.1, 1e-30, 1e30, 0.0])
def test_constant_rewards_teach_nothing(reward: float) -> None:
    for algorithm in ("grpo", "dr-grpo", "rloo", "reinforce"):
        rewards = np.full((2, 7), reward)
        credit = advantages_of(ReinforcementConfig(algorithm=algorithm), rewards, np.ones((2, 7)))
        np.testing.assert_allclose(credit.advantages, 0.0, atol=1e-15 * reward)
        assert credit.equal_groups == 2
    assert not group_normalised(torch.full((2, 7), reward)).any()


@pytest.mark.parametrize("difference", [1e-5, 1e-7, 1e-12])
def test_rewards_that_are_nearly_equal_teach_nearly_nothing(difference: float) -> None:
    rewards = np.array([[0.5, 0.5 + difference] * 2])
    deviation = difference / np.sqrt(3)
    credit = advantages_of(ReinforcementConfig(algorithm="grpo"), rewards, np.ones((1, 4)))
    assert credit.advantages.abs().max() < 0.1
    np.testing.assert_allclose(
        credit.advantages, [[-difference / 2, difference / 2] * 2] / (deviation + 1e-4), rtol=1e-3
    )


def test_an_answer_that_was_cut_before_the_longest_length_is_punished_as_the_longest() -> None:
    # The context may end before max_answer.
    config = ReinforcementConfig(algorithm="dapo", max_answer=100)
    lengths, truncated = np.array([[5, 50, 90, 5]]), np.array([[False, True, True, False]])
    credit = advantages_of(config, REWARDS[:1], lengths, truncated)
    np.testing.assert_allclose(credit.rewards.numpy() - REWARDS[:1], [[0, -1, -1, 0]])


def test_a_group_of_one_is_refused_where_answers_of_a_group_are_compared() -> None:
    for algorithm in PRESETS:
        config = ReinforcementConfig(algorithm=algorithm, group_size=1)
        compared = ("group", "group mean", "group success", "leave one out")
        if parts_of(ReinforcementConfig(algorithm=algorithm)).advantage in compared:
            with pytest.raises(NapkinError, match="group_size is 1"):
                parts_of(config)
        else:
            parts_of(config)
    assert not group_normalised(torch.ones(3, 1)).any()
    with pytest.raises(NapkinError, match="group of 1"):
        less_mean_of_others(torch.ones(3, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_no_finite_number_names_its_prompt(bad: float) -> None:
    rewards = REWARDS.copy()
    rewards[2, 1] = bad
    with pytest.raises(NapkinError, match=rf"completion 2.*prompt 3 'c'.*{bad}") as error:
        advantages_of(ReinforcementConfig(), rewards, LENGTHS, prompts=["a", "b", "c"])
    assert "\n" not in str(error.value)


def test_a_recipes_parts_replace_the_presets() -> None:
    config = ReinforcementConfig(algorithm="grpo", advantage="group mean", clip_high=0.28, drop_equal_groups=True)
    parts = parts_of(config)
    assert (parts.advantage, parts.clip_low, parts.clip_high, parts.normalisation) == (
        "group mean",
        0.2,
        0.28,
        "sequence",
    )
    assert parts.drop_equal_groups
    assert parts_of(ReinforcementConfig(algorithm="grpo", ratio="none")).clip == "none"
    assert not parts_of(ReinforcementConfig(algorithm="dapo", drop_equal_groups=False)).drop_equal_groups


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "reinforce", "clip": "ppo"}, "nothing to clip"),
        ({"algorithm": "grpo", "advantage": "gae"}, "value head"),
        ({"algorithm": "ppo", "advantage": "group"}, "value head"),
        ({"algorithm": "expert-iteration", "advantage": "batch"}, "expert-iteration"),
        ({"algorithm": "grpo", "clip_low": 1.0}, "no ratio is below 0"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(NapkinError, match=message):
        parts_of(ReinforcementConfig(**settings))


def number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").ljust(3, "0")


def test_the_documented_table_is_that_of_the_presets() -> None:
    page = (Path(__file__).parents[3] / "docs" / "policy_gradients.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    documented = {row[0]: row[1:6] for row in rows if len(row) == 8 and row[0] in PRESETS}
    assert documented == {
        name: [
            parts.advantage,
            parts.ratio,
            parts.clip,
            "" if parts.clip == "none" else f"{number(parts.clip_low)}, {number(parts.clip_high)}",
            parts.normalisation,
        ]
        for name, parts in PRESETS.items()
    }
