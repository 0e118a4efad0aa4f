"""A vocabulary of letters, and an environment of answers in it, for tests of reinforcement learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from napkin.chats.chat_format import Message
from napkin.chats.token_sequence import TokenSequence
from napkin.environments.environment import Outcome, Task, ask
from napkin.model.config import ModelConfig

STOP = 15
CONFIG = ModelConfig(vocab_size=16, context_length=64, d_model=32, n_layers=2, n_heads=2, tie_embeddings=False)


class Letters:
    """The letters a to o are tokens 0 to 14; every message ends with 15."""

    stop_ids = (STOP,)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return [token for each in messages for token in [*(ord(letter) - 97 for letter in each.content), STOP]]

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        tokens, loss_mask = [], []
        for each in messages:
            part = self.prompt([each])
            tokens += part
            loss_mask += [each.role == "assistant"] * len(part)
        return TokenSequence(np.array(tokens), np.array(loss_mask))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in ids)


@dataclass(frozen=True)
class Turns:
    """Counts letters of an answer, for so many turns."""

    turns: int = 1
    reward: float | None = None

    def start(self, seed: int) -> Task:
        return ask("abcde"[: 1 + seed % 5], 0)

    def step(self, state: Any, answer: str) -> Outcome:
        reward = float(len(answer)) if self.reward is None else self.reward
        return Outcome(reward, state + 1 == self.turns, "cab", state + 1, {"letters": len(answer)})
