"""Tokens/s and peak memory of a step of supervised fine-tuning: napkin beside TRL's SFTTrainer.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 8,192; one batch of 16
sequences of 150 tokens in the middle, of which the last half counts. Each contender is a process of its own; they take
their steps in turns. Peak bytes are those of tensors in a step, as `napkin.accounting.recording` watches them, the
same for all; RSS is the most that the process has had, with all that it imports. Tokens are those of the sequences,
padding left out. The first losses say that all compute the same.

    .venv-peers/bin/python benchmarks/alignment_sft.py        # some three minutes on two quiet cores
    .venv-peers/bin/python benchmarks/alignment_sft.py --formats fp32 --rounds 3

Without trl, transformers, accelerate and datasets, napkin's rows stand alone. The table is also written to
benchmarks/results/.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napkin.chats.token_sequence import Example, sequence_of
from napkin.model.config import ModelConfig
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.sequence_step import train_on_examples
from peer_processes import Step
from tuning_beside_trl import Trl, compare, in_micro_batches, napkin_state, trainer_of

MODEL = ModelConfig(vocab_size=8192, context_length=512, d_model=256, n_layers=4, n_heads=4)
N_SEQUENCES = 16
LEARNING_RATE = 2e-5


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    trl: dict[str, Trl] = {
        "TRL fp32": partial(trl_trainer, bf16=False, gradient_checkpointing=False),
        "TRL bf16": partial(trl_trainer, bf16=True, gradient_checkpointing=False),
        "TRL bf16, checkpointed (its default)": partial(trl_trainer, bf16=True, gradient_checkpointing=True),
    }
    n_tokens = sum(len(sequence.tokens) for (sequence,) in batch())
    compare(__doc__, "Supervised fine-tuning beside TRL", MODEL, (in_micro_batches(napkin_step), trl), n_tokens)


def batch() -> list[Example]:
    """The sequences that all train on."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(150), 0.5, N_SEQUENCES)), 8, MODEL.context_length).astype(int)
    tokens = [draw.integers(3, MODEL.vocab_size, length).tolist() for length in lengths]
    return [(sequence_of(each[: len(each) // 2], each[len(each) // 2 :]),) for each in tokens]


def napkin_step(precision: Any, max_tokens: int, folder: Path) -> tuple[torch.nn.Module, Step]:
    """napkin's model and its step, in micro-batches of at most so many tokens."""
    state = napkin_state(folder, precision, batch_size=N_SEQUENCES, learning_rate=LEARNING_RATE)
    examples, objective, numbers = batch(), SupervisedObjective(), iter(range(10**9))
    return state.model, lambda: train_on_examples(state, next(numbers), examples, objective, max_tokens=max_tokens).loss


def trl_trainer(folder: Path, **settings: Any) -> tuple[Any, torch.nn.Module]:
    """TRL's trainer of the same batch, and its model."""
    rows = [
        {"input_ids": sequence.tokens.tolist(), "completion_mask": sequence.loss_mask.astype(int).tolist()}
        for (sequence,) in batch()
    ]
    settings |= {
        "per_device_train_batch_size": N_SEQUENCES,
        "learning_rate": LEARNING_RATE,
        "completion_only_loss": True,
        "max_length": None,
    }
    return trainer_of("SFT", folder, rows, MODEL.vocab_size, settings)


if __name__ == "__main__":
    main()
