"""A step of GRPO: answers, rewards and an update, by napkin beside TRL's GRPOTrainer, in fp32 and in bf16.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 2,048. A step has 8 prompts of
16 tokens and 8 answers to each, of 32 tokens, none of them ended early; the reward is the share of even tokens. All
take one update of all answers; bf16 is autocast over weights in fp32, for answers and for updates. Tokens are those of
the answers; the first loss is zero, since the model has just given them. Each contender is a process of its own; they
take their steps in turns. Peak bytes are those of tensors in one step, as `napkin.accounting.recording` watches them,
the same for all; RSS is the most that the process has had, with all that it imports.

    .venv-peers/bin/python benchmarks/alignment_grpo.py --formats fp32     # a minute on two quiet cores

Without trl, transformers, accelerate and datasets, napkin's rows stand alone. The table is also written to
benchmarks/results/.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napkin.chats.chat_format import Message
from napkin.chats.token_sequence import TokenSequence, sequence_of
from napkin.environments.environment import Outcome, Task, ask
from napkin.model.config import ModelConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.tuning.reinforcement_step import ReinforcementSettings, train_on_rollouts
from peer_processes import Step
from tuning_beside_trl import FORMATS, Napkin, Trl, compare, napkin_state, trainer_of

MODEL = ModelConfig(vocab_size=2048, context_length=128, d_model=256, n_layers=4, n_heads=4)
N_PROMPTS, GROUP, PROMPT, ANSWER = 8, 8, 16, 32
LEARNING_RATE = 1e-5


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    ours: dict[str, Napkin] = {f"napkin {precision}": partial(napkin_step, precision) for precision in FORMATS}
    trl: dict[str, Trl] = {f"TRL {precision}": partial(trl_trainer, precision) for precision in FORMATS}
    compare(__doc__, "GRPO beside TRL", MODEL, (ours, trl), N_PROMPTS * GROUP * ANSWER)


def prompts() -> list[list[int]]:
    """The prompts that every step answers."""
    return np.random.default_rng(0).integers(3, MODEL.vocab_size, (N_PROMPTS, PROMPT)).tolist()


class Words:
    """Token i is the word w followed by i; nothing ends an answer."""

    stop_ids: tuple[int, ...] = ()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the words."""
        return [int(word[1:]) for word in messages[-1].content.split()]

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        """A prompt and its answer."""
        return sequence_of(self.prompt(messages[:1]), self.prompt(messages[1:]))

    def decode(self, ids: Sequence[int]) -> str:
        """The words of tokens."""
        return " ".join(f"w{each}" for each in ids)


class EvenTokens:
    """Rewards the share of even tokens."""

    def __init__(self) -> None:
        self.prompts, self.started = prompts(), 0

    def start(self, seed: int) -> Task:
        """One prompt after the other."""
        self.started += 1
        return ask(Words().decode(self.prompts[self.started % N_PROMPTS]))

    def step(self, state: Any, answer: str) -> Outcome:
        """Reward an answer, which ends its task."""
        return Outcome(reward_of(answer))


def reward_of(answer: str) -> float:
    """The share of even tokens."""
    return sum(int(word[1:]) % 2 == 0 for word in answer.split()) / ANSWER


def napkin_step(precision: Any, folder: Path) -> tuple[torch.nn.Module, Step]:
    """napkin's model and its step."""
    state = napkin_state(folder, precision, batch_size=N_PROMPTS, learning_rate=LEARNING_RATE)
    config = ReinforcementConfig(group_size=GROUP, max_answer=ANSWER)
    settings, numbers = ReinforcementSettings(config, EvenTokens(), Words(), 4096), itertools.count()
    return state.model, lambda: train_on_rollouts(state, next(numbers), range(N_PROMPTS), settings).loss


def trl_trainer(precision: str, folder: Path) -> tuple[Any, torch.nn.Module]:
    """TRL's trainer on the same prompts, and its model."""
    settings = {
        "per_device_train_batch_size": N_PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": ANSWER,
        "generation_kwargs": {"min_new_tokens": ANSWER},
        "learning_rate": LEARNING_RATE,
        "beta": 0.0,
        "loss_type": "grpo",
        "bf16": precision == "bf16",
        "gradient_checkpointing": False,
    }
    rows = [{"prompt": Words().decode(each)} for each in prompts()]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [reward_of(each) for each in completions]

    return trainer_of("GRPO", folder, rows, MODEL.vocab_size, settings, reward_funcs=reward)


if __name__ == "__main__":
    main()
