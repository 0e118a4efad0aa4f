"""Rollouts in which the model calls a calculator: tokens, masks and log-probabilities beside a computation by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.chat_format import Message
from napkin.chats.token_sequence import TokenSequence
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import Passes
from napkin.distributed.ranks import ALONE
from napkin.environments import Outcome, ToolEnvironment, ask, tools_named
from napkin.environments.environment import Task
from napkin.grading.sandbox.confinement import can_confine
from napkin.grading.sandbox.tool_program import ToolLimits
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.layout import Layout
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.policy_gradient import SAMPLER, FreshObjective, policy_objective
from napkin.tuning.rollout import BLOCK_SIZE, Rollout, RolloutSettings, roll_out
from napkin.tuning.sequence_step import totals_of

pytestmark = pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls")

BEGIN, END = "<calculator>", "</calculator>"
ROLES = {"user": "U", "assistant": "A", "tool": "T"}
PIECES = [BEGIN, END, *(chr(number) for number in range(32, 127)), "\n", "stop"]
IDS = {piece: number for number, piece in enumerate(PIECES)}
STOP = IDS["stop"]
CONFIG = ModelConfig(
    vocab_size=len(PIECES), context_length=160, d_model=128, n_layers=2, n_heads=4, tie_embeddings=False
)


def pieces(text: str) -> list[int]:
    found = []
    while text:
        piece = next(each for each in (BEGIN, END, text[0]) if text.startswith(each))
        found.append(IDS[piece])
        text = text[len(piece) :]
    return found


class Pieces:
    """A message is the letter of its role, its characters, and a token that ends it; a tag is one token."""

    stop_ids = (STOP,)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        said = [token for each in messages for token in [IDS[ROLES[each.role]], *pieces(each.content), STOP]]
        return [*said, IDS["A"]]

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        tokens: list[int] = []
        loss_mask: list[bool] = []
        for each in messages:
            said = [*pieces(each.content), STOP]
            tokens += [IDS[ROLES[each.role]], *said]
            loss_mask += [False] + [each.role == "assistant"] * len(said)
        return TokenSequence(np.array(tokens), np.array(loss_mask))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(PIECES[each] for each in ids if each != STOP)


class Seven:
    """Asks for a 7."""

    def start(self, seed: int) -> Task:
        return ask(f"{seed % 10}?", None)

    def step(self, state: Any, answer: str) -> Outcome:
        return Outcome(float(answer == "7"))


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Its next token follows from the last one, but for a little that follows from all before: it calls the calculator
    in about half of its turns, often with several numbers."""
    made = Transformer(CONFIG, seed=3)
    follows = torch.full((len(PIECES), len(PIECES)), -30.0)
    digits = "123456789"
    for before, after in (
        ("A", [BEGIN, BEGIN, BEGIN, "7", "4"]),
        (BEGIN, digits),
        *((digit, ["+", "*", "/", END, END, END, "stop"]) for digit in digits),
        *((operator, digits) for operator in "+*/"),
        (END, ["stop", "stop", "stop", BEGIN]),
    ):
        for piece in after:
            follows[IDS[piece], IDS[before]] = after.count(piece) if isinstance(after, list) else 1
            follows[IDS[piece], IDS[before]] = follows[IDS[piece], IDS[before]].log()
    with torch.no_grad():
        made.embedding.weight.copy_(4 * torch.eye(len(PIECES), CONFIG.d_model))
        # A vector of one entry has the length of the root of d_model behind the last norm.
        made.head_weight.zero_()
        made.head_weight[:, : len(PIECES)] = follows / CONFIG.d_model**0.5
    return made.train()


@pytest.fixture(scope="module")
def rollout(model: Transformer) -> Rollout:
    # Long outputs are cut, which makes messages of two lines.
    environment = ToolEnvironment(Seven(), tools_named("calculator", ToolLimits(20, output_bytes=2)), calls=3)
    settings = RolloutSettings(group_size=8, max_completion_tokens=16, temperature=0.9, seed=1)
    return roll_out(model, environment, Pieces(), settings, step=2, prompts=range(4))


def test_the_loss_mask_has_the_models_own_tokens_and_none_of_the_tools(rollout: Rollout) -> None:
    assert {episode.turns for episode in rollout.episodes} >= {1, 2, 3}
    said = [message for episode in rollout.episodes for message in episode.messages if message.role == "tool"]
    assert any("[cut after 2 bytes]" in message.content for message in said)
    for episode in rollout.episodes:
        tokens: list[int] = []
        loss_mask: list[bool] = []
        for number, message in enumerate(episode.messages):
            ends = not (episode.truncated and number == len(episode.messages) - 1)
            content = [*pieces(message.content), *([STOP] if ends else [])]
            tokens += [IDS[ROLES[message.role]], *content]
            loss_mask += [False] + [message.role == "assistant"] * len(content)
        assert episode.sequence.tokens.tolist() == tokens
        assert episode.sequence.loss_mask.tolist() == loss_mask


def test_each_call_is_answered_by_what_python_says(rollout: Rollout) -> None:
    for episode in rollout.episodes:
        for before, message in zip(episode.messages, episode.messages[1:], strict=False):
            if message.role != "tool" or before.role != "assistant" or "cut" in message.content:
                continue
            expression = before.content.partition(BEGIN)[2].partition(END)[0]
            try:
                assert message.content == repr(eval(expression))
            except SyntaxError:
                assert "SyntaxError" in message.content or "error" in message.content
        if not episode.truncated:
            called = sum(message.role == "tool" for message in episode.messages)
            assert called == episode.parts.get("tool calls", 0) <= 3
        assert episode.reward == float(episode.ending == "done" and episode.messages[-1].content == "7")


def test_log_probabilities_are_those_of_the_models_tokens_alone(model: Transformer, rollout: Rollout) -> None:
    for episode in rollout.episodes:
        sequence = episode.sequence
        with torch.no_grad():
            logits = model.double()(torch.from_numpy(sequence.tokens)[None])[0] / 0.9
        model.float()
        everything = logits.log_softmax(-1)[
            torch.arange(len(sequence.tokens) - 1), torch.from_numpy(sequence.tokens[1:])
        ]
        assert np.allclose(sequence.values[SAMPLER], everything.numpy()[sequence.loss_mask[1:]], atol=1e-4)


def test_a_turn_goes_on_with_the_keys_and_values_of_those_before(rollout: Rollout) -> None:
    """What is computed of prompts is what no block of the cache holds: at most the last block of what was there, once
    per turn."""
    new = 0
    for episode in rollout.episodes:
        sequence = episode.sequence
        starts = np.flatnonzero(np.diff(sequence.loss_mask.astype(int)) == 1) + 1
        # The last token that was drawn has no keys and values yet.
        known = [0, *(int(np.flatnonzero(sequence.loss_mask[:start])[-1]) for start in starts[1:])]
        for start, held in zip(starts, known, strict=True):
            new += int(start) - held // BLOCK_SIZE * BLOCK_SIZE
    first = sum(int(episode.sequence.loss_mask.argmax()) for episode in rollout.episodes)
    shared = sum(int(group[0].sequence.loss_mask.argmax()) for group in rollout.groups)
    assert rollout.preempted == 0
    # The prompt of a group is computed once.
    assert shared <= rollout.computed_prompt_tokens <= new - first + shared + len(rollout.episodes)
    assert rollout.computed_prompt_tokens < rollout.prompt_tokens


def gradient(model: Transformer, rollout: Rollout, advantages: Sequence[float]) -> torch.Tensor:
    """The gradient of a step on these episodes."""
    examples = [
        (each.sequence.with_values(advantages=np.full(each.sequence.n_trained, advantage, np.float32)),)
        for each, advantage in zip(rollout.episodes, advantages, strict=True)
    ]
    config = ReinforcementConfig(algorithm="dapo", drop_equal_groups=False)
    objective = FreshObjective(policy_objective(config))
    parts = micro_batches_of(examples, max_tokens=400, row_length=160, packing="packed", temperature=0.9)
    totals = totals_of(parts)
    model.zero_grad()
    ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
        [part.rows for part in parts], lambda number, scores: objective.loss(parts[number], scores, totals)[0], Passes()
    )
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def test_the_gradient_of_a_tools_tokens_is_exactly_zero(model: Transformer, rollout: Rollout) -> None:
    episodes = rollout.episodes
    advantages = [float(n % 5 - 2) for n in range(len(episodes))]
    model.double()
    found = gradient(model, rollout, advantages)
    # By hand: the log-probability of each token of the model, times its advantage; nothing of a tool.
    model.zero_grad()
    n_tokens = sum(each.sequence.n_trained for each in episodes)
    leaves = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        tokens, trained = torch.from_numpy(episode.sequence.tokens), torch.from_numpy(episode.sequence.loss_mask[1:])
        logits = model(tokens[None, :-1])[0]
        logits.retain_grad()
        leaves.append((logits, trained))
        logprobs = (logits / 0.9).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        (-advantage * logprobs[trained].sum() / n_tokens).backward()
    by_hand = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    nothing = gradient(model, rollout, [0.0] * len(episodes))
    model.float()
    # Advantages and temperature are those of fp32.
    assert torch.allclose(found, by_hand, rtol=1e-5, atol=1e-7 * float(by_hand.abs().max()))
    assert all(logits.grad is not None and not logits.grad[~trained].any() for logits, trained in leaves)
    # Where the model's own tokens weigh nothing, nothing is left.
    assert torch.count_nonzero(by_hand)
    assert not nothing.any()
