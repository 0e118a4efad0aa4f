"""Seconds of a supervised step with sequences padded or packed, beside the padding of each, by attention.

python benchmarks/alignment_arrangements.py [--sequences 32] [--repeats 6]
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from napkin.chats.token_sequence import Example, sequence_of
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.sequence_step import loss_of_parts, totals_of, with_known_coefficients
from result_files import heading, write_result
from turns import BRACKETS, in_turns, ratio_spread, seconds_of, spread

MODEL = ModelConfig(vocab_size=2048, context_length=1024, d_model=256, n_layers=4, n_heads=4)
DEVIATIONS = {"alike": 0.05, "spread": 0.5, "very spread": 1.0}
"""Standard deviation of the logarithm of the lengths."""


def units_of(n: int, deviation: float) -> list[Example]:
    """Sequences of 150 tokens in the middle, of which the last half counts."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(150), deviation, n)), 8, 1000).astype(int)
    tokens = [draw.integers(0, MODEL.vocab_size, length).tolist() for length in lengths]
    return [(sequence_of(each[: len(each) // 2], each[len(each) // 2 :]),) for each in tokens]


def train_state_of(attention: str) -> TrainState:
    """A small model in fp32 with that attention."""
    kernels: Any = "compiled" if attention == "compiled" else "plain"
    training = TrainingConfig(kernels=kernels, precision="fp32", device="cpu")
    model = dataclasses.replace(MODEL, attention=attention)
    recipe = Recipe(model=model, optimizer=OptimizerConfig(warmup_steps=0).resolved, training=training)
    return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))


def step_on(
    train_state: TrainState, examples: list[Example], how: dict[str, Any]
) -> tuple[Callable[[], object], float]:
    """A step on examples that are arranged so, and the part of its tokens that is padding."""
    objective = SupervisedObjective()
    parts = micro_batches_of(examples, max_tokens=4096, **how)
    totals = totals_of(parts)
    parts = with_known_coefficients(parts, objective, totals)
    numbers = itertools.count()

    def step() -> None:
        loss_of = loss_of_parts(parts, objective, totals, {})
        train_state.step_on_sequences(next(numbers), [part.rows for part in parts], loss_of)

    computed = sum(part.rows.inputs.numel() for part in parts)
    return step, 1 - sum(len(each.tokens) - 1 for (each,) in examples) / computed


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    lines = [
        *heading(
            "A supervised step with sequences padded or packed",
            f"{options.sequences} sequences of 150 tokens in the middle. {BRACKETS}",
        ),
        "| lengths | attention | padded | packed | packed / padded |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    for attention in ("sdpa", "plain", "compiled"):
        train_state = train_state_of(attention)
        for name, deviation in DEVIATIONS.items():
            examples = units_of(options.sequences, deviation)
            steps = {
                packing: step_on(train_state, examples, {"row_length": MODEL.context_length, "packing": packing})
                for packing in ("padded", "packed")
            }
            turns = {packing: partial(seconds_of, step) for packing, (step, _) in steps.items()}
            in_turns(turns, 1)
            samples = in_turns(turns, options.repeats)
            cells = [f"{spread(samples[each], '{:.3f}'.format)} s, {steps[each][1]:.0%} padding" for each in steps]
            cells.append(ratio_spread(samples["packed"], samples["padded"]))
            lines.append(f"| {name} | {attention} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    write_result("alignment-arrangements", lines)


if __name__ == "__main__":
    main()
