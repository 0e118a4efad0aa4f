"""Tokens/s and peak memory of a step of DPO: napkin beside TRL's DPOTrainer.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 8,192; one batch of 8 pairs of
sequences of 150 tokens in the middle, of which the last half is the answer. The reference's log-probabilities are
computed before the steps by all: by napkin always, by TRL where it is asked to; TRL's own default holds the reference's
model, and computes it in each step. Each contender is a process of its own; they take their steps in turns. Peak bytes
are those of tensors in a step, as `napkin.accounting.recording` watches them, the same for all; RSS is the most that
the process has had, with all that it imports. Tokens are those of the sequences, padding left out. The first losses say
that all compute the same: log 2, since the model is its reference.

    .venv-peers/bin/python benchmarks/alignment_dpo.py        # some three minutes on two quiet cores
    .venv-peers/bin/python benchmarks/alignment_dpo.py --formats fp32 --rounds 3

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
from napkin.recipe.precision import Precision
from napkin.recipe.tuning_recipe import PreferenceConfig
from napkin.tuning.preferences import preference_objective
from napkin.tuning.sequence_step import REFERENCE, score_examples, train_on_examples
from peer_processes import Step
from tuning_beside_trl import Trl, compare, in_micro_batches, napkin_state, trainer_of

MODEL = ModelConfig(vocab_size=8192, context_length=512, d_model=256, n_layers=4, n_heads=4)
N_PAIRS = 8
LEARNING_RATE = 1e-6


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    trl: dict[str, Trl] = {
        "TRL fp32, reference computed before": partial(trl_trainer, precompute_ref_log_probs=True),
        "TRL fp32": partial(trl_trainer),
        "TRL bf16, reference computed before": partial(trl_trainer, bf16=True, precompute_ref_log_probs=True),
        "TRL bf16, checkpointed (its default)": partial(trl_trainer, bf16=True, gradient_checkpointing=True),
    }
    n_tokens = sum(len(sequence.tokens) for pair in batch() for sequence in pair)
    compare(__doc__, "DPO beside TRL", MODEL, (in_micro_batches(napkin_step), trl), n_tokens)


def batch() -> list[Example]:
    """The pairs that all train on."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(150), 0.5, N_PAIRS)), 8, MODEL.context_length // 2).astype(int)

    def tokens(n: int) -> list[int]:
        return draw.integers(3, MODEL.vocab_size, n).tolist()

    examples: list[Example] = []
    for length in lengths:
        prompt = tokens(length // 2)
        examples.append(tuple(sequence_of(prompt, tokens(int(length * factor) // 2)) for factor in (1.0, 0.8)))
    return examples


def napkin_step(precision: Any, max_tokens: int, folder: Path) -> tuple[torch.nn.Module, Step]:
    """napkin's model and its step, in micro-batches of at most so many tokens."""
    state = napkin_state(folder, precision, batch_size=N_PAIRS, learning_rate=LEARNING_RATE)
    pairs, autocast = batch(), Precision(precision, "cpu").autocast
    scores = score_examples(state.parallel_model, pairs, max_tokens=max_tokens, autocast=autocast)
    examples: list[Example] = [
        tuple(
            sequence.with_values(**{REFERENCE: found.log_probabilities})
            for sequence, found in zip(pair, each, strict=True)
        )
        for pair, each in zip(pairs, scores, strict=True)
    ]
    objective, numbers = preference_objective(PreferenceConfig("dpo")), iter(range(10**9))
    return state.model, lambda: train_on_examples(state, next(numbers), examples, objective, max_tokens=max_tokens).loss


def trl_trainer(
    folder: Path, *, bf16: bool = False, gradient_checkpointing: bool = False, precompute_ref_log_probs: bool = False
) -> tuple[Any, torch.nn.Module]:
    """TRL's trainer of the same pairs, and its model."""

    def text(tokens: np.ndarray) -> str:
        return "".join(f"w{each} " for each in tokens)

    # TRL ends answers itself, with w2: the last token of each is left to it.
    rows = [
        {
            "prompt": text(chosen.tokens[~chosen.loss_mask]),
            "chosen": text(chosen.tokens[chosen.loss_mask][:-1]),
            "rejected": text(rejected.tokens[rejected.loss_mask][:-1]),
        }
        for chosen, rejected in batch()
    ]
    settings = {
        "per_device_train_batch_size": N_PAIRS,
        "learning_rate": LEARNING_RATE,
        "beta": 0.1,
        "max_length": None,
        "bf16": bf16,
        "gradient_checkpointing": gradient_checkpointing,
        "precompute_ref_log_probs": precompute_ref_log_probs,
    }
    return trainer_of("DPO", folder, rows, MODEL.vocab_size, settings)


if __name__ == "__main__":
    main()
