"""Loss curves with compiled kernels beside those with torch's operators: four architectures in bf16, the same batches.

Between the forms only the order of sums differs, and rounding follows from it: how far apart two runs of 200 steps are
then, relative to the loss. What that is to be held against: torch's operators with the batch in two micro-batches,
which differ from the same run in nothing but the order of sums either.

    python benchmarks/kernel_curves.py                   # minutes on two cores
    python benchmarks/kernel_curves.py --only llama      # one of the architectures

The table is also written to benchmarks/results/.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from curves_in_turns import LAST, Curve, state_of, train_in_turns
from library_text import library_text
from napkin.data.batches import Batches
from napkin.data.token_file import TokenFile
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.train_step.step import TrainState
from result_files import heading, write_result

LLAMA = ModelConfig(2048, 128, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2)
ARCHITECTURES = {
    "gpt2": replace(
        LLAMA, n_kv_heads=None, positions="learned", norm="layer", feed_forward="gelu_tanh", biases="all",
        embedding_scale=1.0,
    ),
    "llama": LLAMA,
    "experts": replace(LLAMA, n_experts=4, d_ff=192),
    "window": replace(LLAMA, attention_window=32),
}  # fmt: skip
FORMS = ("plain", "compiled", "plain, two micro-batches")


def main() -> None:
    """Train each architecture in both forms; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--only", choices=ARCHITECTURES, default=None)
    options = parser.parse_args()
    head = heading(
        f"Compiled kernels over {options.steps} steps",
        f"2 layers, d 128, context 128, batch {options.batch_size}, vocabulary 2,048, bf16, attention compiled too; "
        f"loss in nats per token, means of {LAST} steps; differences relative to the plain form's loss.",
    )
    lines = [
        "| architecture | plain, last steps | compiled, last steps | largest difference of a step | of a mean of "
        f"{LAST} | of a mean, plain in two micro-batches |",
        "|---|---|---|---|---|---|",
    ]
    for name in [options.only] if options.only else ARCHITECTURES:
        print(name, flush=True)
        curves = train_in_turns(states_of(ARCHITECTURES[name], options), batches_of(options))
        plain, compiled, divided = (curves[form] for form in FORMS)
        lines.append(
            f"| {name} | {plain.mean_loss(options.steps):.4f} | {compiled.mean_loss(options.steps):.4f} | "
            f"{farthest(plain.losses, compiled.losses):.2%} | {farthest(means(plain), means(compiled)):.2%} | "
            f"{farthest(means(plain), means(divided)):.2%} |"
        )
    print("\n".join(lines))
    write_result("kernel-curves", [*head, *lines])


def states_of(model: ModelConfig, options: argparse.Namespace) -> dict[str, TrainState]:
    """The same weights in both forms, and in the plain one with two micro-batches."""
    states = {}
    for form in FORMS:
        compiled = form == "compiled"
        chosen = replace(model, attention="compiled" if compiled else "plain")
        training = {
            "kernels": "compiled" if compiled else "plain",
            "micro_batch_size": options.batch_size // 2 if form == FORMS[-1] else None,
        }
        states[form] = state_of(chosen, Precision("bf16", "cpu"), options.steps, options.batch_size, **training)
    return states


def batches_of(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of Python's own library."""
    data = library_text(LLAMA.vocab_size)
    batches = Batches(
        TokenFile.open(f"{data.train}"), context_length=LLAMA.context_length, batch_size=options.batch_size, seed=0
    )
    for i in range(options.steps):
        tokens, targets, *_ = batches[i]
        yield tokens, targets


def means(curve: Curve) -> list[float]:
    """Of each 20 neighbouring steps; of all where there are fewer."""
    n_steps = len(curve.losses)
    return [curve.mean_loss(end) for end in range(min(LAST, n_steps), n_steps + 1)]


def farthest(reference: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(here - there) / here for here, there in zip(reference, other, strict=True))


if __name__ == "__main__":
    main()
