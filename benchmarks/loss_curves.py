"""Whether a precision learns as well as fp32: one model, one seed, the same batches, in each precision.

A GPT of 4 layers on Python's own library, trained by the very step of `napkin train`. Training losses are means of the
last 20 steps, validation losses of 65,536 held-out tokens, nats per token. What a difference to fp32 is to be held
against: how far fp32 itself scatters when only the seed of the initial weights is another.

    python benchmarks/loss_curves.py                                   # some half an hour on two cores
    python benchmarks/loss_curves.py --width 128 --steps 200 --vocab-size 4096
    python benchmarks/loss_curves.py --precisions fp32 bf16 fp16       # fp16 on a GPU: a CPU multiplies it 100 × slower

The table is also written to benchmarks/results/.
"""

import argparse
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from library_text import library_text
from napkin.data.batches import Batches
from napkin.data.token_file import TokenFile
from napkin.evaluation.bits_per_byte import mean_loss
from napkin.hardware.host import detect_host
from napkin.model.config import ModelConfig
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from result_files import heading, write_result

PRECISIONS = ("fp32", "bf16", "bf16-pure", "fp8")
LAST, EVALUATION_TOKENS = 20, 65_536


class Curve(NamedTuple):
    """What a run came to."""

    losses: list[float]
    validation: float

    @property
    def training(self) -> float:
        """The mean of the last steps."""
        return statistics.mean(self.losses[-LAST:])


def main() -> None:
    """Train in each precision; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, default=3, help="of fp32")
    parser.add_argument("--at-once", type=int, default=detect_host().cores, help="runs side by side, a thread each")
    options = parser.parse_args()
    head = heading(
        "Loss by precision",
        f"4 layers, d {options.width}, context {options.context}, batch {options.batch_size}, vocabulary "
        f"{options.vocab_size:,}; {options.steps} steps on Python's own library, the same initial weights and batches "
        f"for all. Training: mean of the last {LAST} steps; validation: {EVALUATION_TOKENS:,} tokens; nats per token.",
    )
    library_text(options.vocab_size)
    jobs = [*((name, 0) for name in options.precisions), *(("fp32", seed) for seed in range(1, options.seeds))]
    with ProcessPoolExecutor(options.at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(jobs, pool.map(partial(train, options), jobs), strict=True))
    curves = {name: found[name, 0] for name in options.precisions}
    reference = [curve for (name, _), curve in found.items() if name == "fp32"]
    lines = [
        "| precision | training | − fp32 | validation | − fp32 | farthest from fp32, 20 steps' mean |",
        "|---|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        lines.append(
            f"| {name} | {curve.training:.4f} | {curve.training - reference[0].training:+.4f} | "
            f"{curve.validation:.4f} | {curve.validation - reference[0].validation:+.4f} | "
            f"{_farthest(curve, reference[0]):+.4f} |"
        )
    if len(reference) > 1:
        lines += ["", _scatter(reference)]
    print("\n".join(lines))
    write_result("loss-curves", [*head, *lines])


def train(options: argparse.Namespace, job: tuple[Any, int]) -> Curve:
    """Train in a precision from the weights of a seed, on the same batches whatever they are."""
    precision, seed = job
    heads = max(1, options.width // 64)
    data = library_text(options.vocab_size)
    recipe = Recipe(
        data=data,
        model=ModelConfig(options.vocab_size, options.context, d_model=options.width, n_layers=4, n_heads=heads),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        training=TrainingConfig(
            steps=options.steps, batch_size=options.batch_size, precision=precision, threads=1, init_seed=seed
        ),
    )
    resolved = resolve(recipe, ThisMachine())
    torch.set_num_threads(1)
    batches = Batches(
        TokenFile.open(f"{data.train}"), context_length=options.context, batch_size=options.batch_size, seed=0
    )
    train_state, losses = build_train_state(resolved), []
    for number in range(options.steps):
        batch = [tensor.to(resolved.precision.device_type) for tensor in batches[number]]
        losses.append(train_state.step(number, *batch)[0].item())
        if number % 20 == 19:
            print(f"{precision}, seed {seed}: step {number + 1}, loss {losses[-1]:.4f}", flush=True)
    held_out = TokenFile.open(f"{data.validation}")
    validation = mean_loss(train_state.model, held_out, resolved.precision, max_tokens=EVALUATION_TOKENS)
    return Curve(losses, validation)


def _farthest(curve: Curve, reference: Curve) -> float:
    """Of the means of 20 neighbouring steps, the difference that is largest in size."""
    apart = [here - there for here, there in zip(curve.losses, reference.losses, strict=True)]
    means = [statistics.mean(apart[first : first + LAST]) for first in range(len(apart) - LAST + 1)]
    return max(means, key=abs)


def _scatter(reference: list[Curve]) -> str:
    training, validation = [curve.training for curve in reference], [curve.validation for curve in reference]
    return (
        f"fp32 over {len(reference)} seeds of the initial weights: training {min(training):.4f} to {max(training):.4f} "
        f"(a spread of {max(training) - min(training):.4f}), validation {min(validation):.4f} to {max(validation):.4f} "
        f"(a spread of {max(validation) - min(validation):.4f})."
    )


if __name__ == "__main__":
    main()
