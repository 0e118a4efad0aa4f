"""[tuning] of a recipe: from which model tuning starts, on what, and how sequences are arranged."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError

TuningMethod = Literal["sft", "preference", "reward-model", "rl"]


@dataclass(frozen=True)
class TuningConfig:
    """From which model tuning starts, and how sequences are arranged."""

    method: TuningMethod = "sft"
    """What is trained on: answers, pairs of answers, rewards of answers; set by the command."""

    start: str = ""
    """The model that tuning starts from: a run, or a Hugging Face folder."""

    learned: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a conversation count in the loss: what the assistant says, only the last time it does, or all."""

    chat_template: str = ""
    """A file with the chat template, in jinja's language; "" is the start's own, or for a model without one the
    built-in: a line per message that begins with its role."""

    max_length: int = 0
    """Longest sequence in tokens; 0 is the model's context length. Longer conversations are left out, and counted."""

    normalisation: Literal["token", "sequence", "constant"] = "token"
    """What the loss is a mean of: all tokens that count in the batch; sequences, each by its own mean; or sequences,
    each by its sum over the constant max_length."""

    arrangement: Literal["auto", "packed", "padded"] = "auto"
    """Several sequences in a row, masked from each other, or one and padding. The gradient is the same. auto is packed,
    in rows of the longest sequence: of sequences of one length each then has its row."""

    micro_batch_tokens: int = 0
    """Tokens of a forward and backward pass, padding included; 0 is 4,096, or a sequence if that is longer. The
    gradient is the same."""

    def __post_init__(self) -> None:
        for name in ("max_length", "micro_batch_tokens"):
            if not 0 <= getattr(self, name) <= 2**34:
                raise NapkinError(f"tuning.{name} is {getattr(self, name)}: use 1 to {2**34}, or 0 for the default")
