"""Answers drawn by the engine: their log-probabilities, their seeds, and turns of an environment."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.chat_format import Message
from napkin.environments import Environment, Outcome, environment_named
from napkin.environments.environment import Task
from napkin.errors import NapkinError
from napkin.grading.sandbox.confinement import can_confine
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.tuning.policy_gradient import SAMPLER
from napkin.tuning.rollout import Rollout, RolloutSettings, roll_out, roll_out_unequal, seed_of_draw
from oracles.letter_games import CONFIG, STOP, Letters, Turns

SETTINGS = RolloutSettings(group_size=3, max_completion_tokens=12, temperature=0.7, seed=5)


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    made = Transformer(CONFIG, seed=1)
    with torch.no_grad():
        # Far from uniform, and the stop id likely enough.
        made.head_weight.mul_(4)
    return made.train()


def test_log_probabilities_are_those_of_the_model_at_the_temperature(model: Transformer) -> None:
    rollout = roll_out(model, Turns(), Letters(), SETTINGS, step=3, prompts=range(4))
    assert [len(group) for group in rollout.groups] == [3] * 4
    endings = {episode.ending for episode in rollout.episodes}
    assert endings == {"done", "cut"}
    for episode in rollout.episodes:
        sequence = episode.sequence
        logits = model.double()(torch.from_numpy(sequence.tokens)[None])[0] / SETTINGS.temperature
        model.float()
        expected = logits.log_softmax(-1)[torch.arange(len(sequence.tokens) - 1), torch.from_numpy(sequence.tokens[1:])]
        found = sequence.values[SAMPLER]
        assert np.allclose(found, expected.detach().numpy()[sequence.loss_mask[1:]], atol=1e-5)
        assert (sequence.tokens[-1] == STOP) != episode.truncated
        assert episode.reward == episode.parts["letters"] == sequence.n_trained - (not episode.truncated)


def test_draws_depend_on_seed_step_prompt_and_answer_alone(model: Transformer) -> None:
    def drawn(settings: RolloutSettings = SETTINGS, step: int = 3, prompts: Sequence[int] = range(4)) -> dict:
        rollout = roll_out(model, Turns(2), Letters(), settings, step=step, prompts=prompts)
        return {(each.prompt, each.completion): each.sequence.tokens.tolist() for each in rollout.episodes}

    whole = drawn()
    assert drawn(prompts=[3, 1]) == {place: tokens for place, tokens in whole.items() if place[0] in (1, 3)}
    assert drawn(RolloutSettings(2, 12, 0.7, 5, max_running=3)) == {
        place: tokens for place, tokens in whole.items() if place[1] < 2
    }
    assert drawn(step=4) != whole
    assert len({tuple(tokens) for tokens in whole.values()}) > 6


def test_each_turn_of_each_answer_is_drawn_with_a_seed_of_its_own() -> None:
    # Without weights in the head every token is as likely as any other, whatever was said before: the draws of a turn
    # are a function of its seed alone, and equal seeds give equal answers.
    uniform = Transformer(CONFIG)
    with torch.no_grad():
        uniform.head_weight.zero_()
    answers: dict[tuple[int, int, int, int, int], str] = {}
    for seed, step in [(5, 0), (5, 1), (6, 0)]:
        settings = RolloutSettings(group_size=4, max_completion_tokens=24, temperature=1.0, seed=seed)
        for episode in roll_out(uniform, Turns(3), Letters(), settings, step=step, prompts=range(4)).episodes:
            said = [each.content for each in episode.messages if each.role == "assistant"]
            answers |= {(seed, step, episode.prompt, episode.completion, turn): text for turn, text in enumerate(said)}
    # Five letters in a row are alike in one of half a million pairs.
    long = [text[:5] for text in answers.values() if len(text) >= 5]
    assert len({place[-1] for place in answers}) == 3
    assert len(long) > 40
    assert len(set(long)) == len(long)


def test_a_second_turn_follows_the_tokens_that_were_drawn(model: Transformer) -> None:
    rollout = roll_out(model, Turns(3), Letters(), SETTINGS, step=0, prompts=range(4))
    assert {episode.turns for episode in rollout.episodes} >= {1, 3}
    for episode in rollout.episodes:
        expected = Letters().sequence(episode.messages)
        length = len(episode.sequence.tokens)
        # A truncated answer lacks the end of its turn.
        assert np.array_equal(episode.sequence.tokens, expected.tokens[:length])
        assert np.array_equal(episode.sequence.loss_mask, expected.loss_mask[:length])
        assert length == len(expected.tokens) - episode.truncated
        assert len(episode.messages) == 2 * episode.turns


def test_the_model_is_shared_and_left_as_it_was(model: Transformer) -> None:
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    roll_out(model, Turns(), Letters(), SETTINGS, step=0, prompts=[0], autocast=lambda: torch.autocast("cpu"))
    assert model.training
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is None and not parameter.is_inference() for parameter in model.parameters())


def test_autocast_draws_as_the_trainer_computes(model: Transformer) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    rollout = roll_out(model, Turns(), Letters(), SETTINGS, step=1, prompts=range(3), autocast=autocast)
    gaps = []
    for episode in rollout.episodes:
        tokens = torch.from_numpy(episode.sequence.tokens)
        places = torch.from_numpy(np.flatnonzero(episode.sequence.loss_mask) - 1)
        with autocast(), torch.no_grad():
            scores = model.token_scores(tokens[None, :-1], places, tokens[places + 1], temperature=0.7)
        gaps.append((scores.log_probabilities - torch.from_numpy(episode.sequence.values[SAMPLER])).abs().max())
    # Of the order of a bf16's rounding: 2^-8 of logits of about 10.
    assert 0 < max(gaps) < 0.3


def test_a_reward_that_is_not_a_number_is_0_and_told(model: Transformer) -> None:
    (episode,) = roll_out(
        model, Turns(reward=float("nan")), Letters(), RolloutSettings(1, 4, 1.0, 0), step=0, prompts=[0]
    ).episodes
    assert episode.reward == 0
    assert episode.failure == "the reward is nan"


class OftenEqual(Turns):
    """Rewards the length of answers to one prompt in five, and gives all others the same."""

    def start(self, seed: int) -> Task:
        task = super().start(seed)
        return replace(task, state=len(task.messages[0].content))

    def step(self, state: Any, answer: str) -> Outcome:
        return Outcome(float(len(answer)) if state == 1 else 1.0, True)


def test_prompts_whose_answers_have_one_reward_are_drawn_again(model: Transformer) -> None:
    def roll(draw: int, prompts: Sequence[int]) -> Rollout:
        settings = replace(SETTINGS, seed=seed_of_draw(SETTINGS.seed, draw))
        return roll_out(model, OftenEqual(), Letters(), settings, step=3, prompts=prompts)

    draws = [roll(draw, range(6)).groups for draw in range(4)]
    expected, redrawn = [], 0
    for place in range(6):
        unequal = [len({episode.reward for episode in draw[place]}) > 1 for draw in draws]
        chosen = unequal.index(True) if any(unequal) else 3
        redrawn += chosen
        expected.append([episode.sequence.tokens.tolist() for episode in draws[chosen][place]])
    found = roll_out_unequal(roll, range(6), 3)
    assert [[episode.sequence.tokens.tolist() for episode in group] for group in found.groups] == expected
    assert found.redrawn == redrawn
    # Some of the six are useful at once, some later, some never: all three are tested.
    assert 0 < redrawn < 18
    assert roll_out_unequal(roll, range(6), 0).redrawn == 0


class InThreads(Turns):
    """Judged in three threads, of which the first to begin are often the last to end."""

    n_parallel = 3
    one_turn = False

    def step(self, state: Any, answer: str) -> Outcome:
        time.sleep(0.004 / (1 + len(answer)))
        outcome = super().step(state, answer)
        return replace(outcome, failure=f"{len(answer)} letters")


class InThreadsToTheEnd(InThreads):
    one_turn = True


@pytest.mark.parametrize("turns", [1, 3])
def test_answers_that_are_judged_in_threads_give_the_same_rollout(model: Transformer, turns: int) -> None:
    def drawn(environment: Environment) -> Rollout:
        return roll_out(model, environment, Letters(), RolloutSettings(2, 8, 0.7, 5), step=2, prompts=range(4))

    def told(rollout: Rollout) -> list:
        return [
            (each.sequence.tokens.tolist(), each.reward, each.ending, each.turns, each.messages, each.parts)
            for each in rollout.episodes
        ]

    expected = drawn(Turns(turns))
    for environment in (InThreads(turns), InThreadsToTheEnd(turns)):
        found = drawn(environment)
        assert told(found) == told(expected)
        assert [each.failure for each in found.episodes] == [
            f"{len(each.messages[1].content)} letters" for each in expected.episodes
        ]
        if turns == 1 or not environment.one_turn:
            assert found.passes == expected.passes


def test_answers_of_one_turn_are_judged_while_others_are_drawn(model: Transformer) -> None:
    drawn = threading.Semaphore(0)

    class Counting(Letters):
        def decode(self, ids: Sequence[int]) -> str:
            drawn.release()
            return super().decode(ids)

    class Waiting(InThreadsToTheEnd):
        n_parallel = 1

        def step(self, state: Any, answer: str) -> Outcome:
            # The first answer is judged when all twelve have been drawn, which nobody waits with.
            assert all(drawn.acquire(timeout=60) for _ in range(12 if self.is_first() else 0))
            return super().step(state, answer)

        def is_first(self) -> bool:
            return not calls.append(None) and len(calls) == 1

    calls = []
    rollout = roll_out(model, Waiting(), Counting(), SETTINGS, step=2, prompts=range(4))
    assert [each.ending in ("done", "cut") for each in rollout.episodes] == [True] * 12


@pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls for a process")
def test_programs_of_a_rollout_are_judged_as_each_is_by_itself(model: Transformer, tmp_path: Path) -> None:
    class Programs(Letters):
        def prompt(self, messages: Sequence[Message]) -> list[int]:
            return [0, STOP]

        def decode(self, ids: Sequence[int]) -> str:
            return f"def length(): return {len(ids)}"

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "an even length", "answer": "assert length() % 2 == 0"}\n' * 2)
    environment = environment_named(str(path), reward="code")
    episodes = roll_out(model, environment, Programs(), SETTINGS, step=2, prompts=range(4)).episodes
    lengths = [each.sequence.n_trained - (not each.truncated) for each in episodes]
    assert [each.reward for each in episodes] == [length % 2 == 0 for length in lengths]
    assert len({each.reward for each in episodes}) == 2


def test_what_judging_raises_ends_the_rollout(model: Transformer) -> None:
    class Raising(InThreadsToTheEnd):
        def step(self, state: Any, answer: str) -> Outcome:
            raise KeyError(answer)

    with pytest.raises(KeyError):
        roll_out(model, Raising(), Letters(), SETTINGS, step=2, prompts=range(4))


def test_a_prompt_without_room_is_refused() -> None:
    small = Transformer(ModelConfig(vocab_size=16, context_length=2, d_model=8, n_layers=1, n_heads=1))
    with pytest.raises(NapkinError, match=r"prompt 1.*\d tokens.*model's context 2"):
        roll_out(small, Turns(), Letters(), SETTINGS, step=0, prompts=[1])
