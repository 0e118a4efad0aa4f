"""Products in 8 bits beside bf16: loss curves on the same batches, and seconds per step, step by step in turns.

A GPT of 4 layers on Python's own library, trained by the very step of `napkin train`, in bf16, int8 and fp8.

    python benchmarks/narrow_products.py                                # minutes on two cores
    python benchmarks/narrow_products.py --width 512 --steps 12 --precisions bf16 int8     # seconds alone

The table is also written to benchmarks/results/.
"""

import argparse

import torch

from curves_in_turns import LAST, Curve, state_of, train_in_turns
from library_text import library_text
from napkin.data.batches import Batches
from napkin.data.token_file import TokenFile
from napkin.hardware.host import detect_host, keep_freed_memory
from napkin.model.config import ModelConfig
from napkin.recipe.precision import choose_device, choose_precision, usage_of
from result_files import heading, write_result
from turns import BRACKETS, ratio_spread, spread


def main() -> None:
    """Train in each precision; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precisions", nargs="*", default=["bf16", "int8", "fp8"])
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    host, device = detect_host(), choose_device("auto")
    head = heading(
        f"Products in 8 bits on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}",
        f"4 layers, d {options.width}, context {options.context}, batch {options.batch_size}, vocabulary "
        f"{options.vocab_size:,}, the same initial weights and batches for all; loss in nats per token, mean of the "
        f"{LAST} steps before. {BRACKETS}",
    )
    precisions = {name: choose_precision(name, device, host) for name in options.precisions}
    model = ModelConfig(
        options.vocab_size, options.context, d_model=options.width, n_layers=4, n_heads=max(1, options.width // 64)
    )
    states = {name: state_of(model, each, options.steps, options.batch_size) for name, each in precisions.items()}
    for state in states.values():
        state.model.to(device)
    data = library_text(options.vocab_size)
    batches = Batches(
        TokenFile.open(f"{data.train}"), context_length=options.context, batch_size=options.batch_size, seed=0
    )
    drawn = (batches[i] for i in range(options.steps))
    curves = train_in_turns(states, ((tokens.to(device), targets.to(device)) for tokens, targets, *_ in drawn))
    lines = [
        *table(curves, options.steps),
        "",
        *(f"{each}: matrix products {products(each, states[each].precision.narrow_form)}." for each in curves),
    ]
    print("\n".join(lines))
    write_result("narrow-products", [*head, *lines])


def table(curves: dict[str, Curve], steps: int) -> list[str]:
    """Losses side by side, each narrow one with its difference to the first; seconds per step in the last row."""
    first = next(iter(curves.values()))
    rows = [f"| step | {' | '.join(curves)} |", f"|---{'|---' * len(curves)}|"]
    for end in range(LAST, steps + 1, LAST):
        losses = [first.mean_loss(end), *(curve.mean_loss(end) for curve in list(curves.values())[1:])]
        cells = [f"{losses[0]:.4f}", *(f"{loss:.4f} ({loss - losses[0]:+.4f})" for loss in losses[1:])]
        rows.append(f"| {end} | {' | '.join(cells)} |")
    cells = [
        f"{spread([1e3 * each for each in curve.warm_seconds], '{:.0f}'.format)} ms, "
        f"{ratio_spread(first.warm_seconds, curve.warm_seconds)} ×"
        for curve in curves.values()
    ]
    return [*rows, f"| per step | {' | '.join(cells)} |"]


def products(name: str, narrow_form: str) -> str:
    """The formats of matrix products, in words."""
    return next(usage.format for usage in usage_of(name, narrow_form) if usage.what == "matrix products")  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
