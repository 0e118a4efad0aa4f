"""Seconds of a step (forward and backward) of the layers with a state: by chunks beside the recurrence token by token.

    python benchmarks/recurrences.py                                      # minutes on two cores
    python benchmarks/recurrences.py --rules scan --contexts 1024 --states 128x64

Mamba-2's scan and the gated delta rule, in fp32. The two forms take turns on the same inputs; the ratio is the median
of the pairs' ratios, more than 1 where chunks are faster, with the smallest and the largest pair. The difference is
that of outputs and all gradients, the largest of their norms of the difference over the norms of the recurrence's. The
table is also written to benchmarks/results/.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from napkin.kernels.recurrences.delta_rule import chunked_delta_rule, plain_delta_rule
from napkin.kernels.recurrences.state_space import chunked_scan, plain_scan
from result_files import heading, write_result
from turns import BRACKETS, ratio_spread, spread

Recurrence = Callable[..., tuple[Tensor, Tensor]]
RULES: dict[str, tuple[Recurrence, Recurrence]] = {
    "scan": (plain_scan, chunked_scan),
    "delta": (plain_delta_rule, chunked_delta_rule),
}


def main() -> None:
    """Print a row a rule, context and size of the states."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--states", nargs="*", default=["16x64", "64x64", "128x64"], help="state size x head size")
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch; a context is at least one sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        *heading(
            "Recurrences by chunks",
            f"Forward and backward, fp32, {options.tokens:,} tokens, {options.heads} heads that share keys and "
            f"queries, {options.pairs} pairs. {BRACKETS}",
        ),
        "| rule | context | state x head | token by token | by chunks | ratio | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    for rule in options.rules:
        for context in options.contexts:
            for sizes in options.states:
                lines.append(_row(rule, context, sizes, options))
                print(lines[-1], flush=True)
    write_result("recurrences-cpu", lines)


def _row(rule: str, context: int, sizes: str, options: argparse.Namespace) -> str:
    state_size, head_dim = map(int, sizes.split("x"))
    shape = max(options.tokens // context, 1), context
    given = _inputs(rule, shape, options.heads, state_size, head_dim)
    pairs: list[tuple[float, float]] = []
    difference = 0.0
    for turn in range(options.pairs + 1):
        (plain_seconds, wanted), (seconds, found) = (_step(each, given) for each in RULES[rule])
        if turn == 0:
            # The first turn makes what later ones use again.
            errors = [(a - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]
            difference = max(map(float, errors))
        else:
            pairs.append((plain_seconds, seconds))
    plain, chunked = zip(*pairs, strict=True)
    shown = [spread([1e3 * each for each in side], "{:.0f} ms".format) for side in (plain, chunked)]
    ratio = ratio_spread(plain, chunked, "{:.1f}".format)
    return f"| {rule} | {context:,} | {sizes} | {' | '.join(shown)} | {ratio} | {difference:.0e} |"


def _inputs(rule: str, shape: tuple[int, int], heads: int, state_size: int, head_dim: int) -> list[Tensor]:
    """Queries, keys, values, log decays and, for the delta rule, rates, of sizes that they have in a model."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*last: int) -> Tensor:
        return torch.randn(*shape, *last, generator=generator)

    queries, keys = (torch.nn.functional.normalize(drawn(1, state_size), dim=-1) for _ in range(2))
    given = [queries, keys, drawn(heads, head_dim), -0.1 * torch.rand(*shape, heads, generator=generator)]
    if rule == "delta":
        given.append(torch.rand(*shape, heads, generator=generator))
    return [each.requires_grad_() for each in given]


def _step(recurrence: Recurrence, given: list[Tensor]) -> tuple[float, list[Any]]:
    begin = time.perf_counter()
    outputs, _ = recurrence(*given)
    gradients = torch.autograd.grad(outputs, given, torch.ones_like(outputs))
    return time.perf_counter() - begin, [outputs.detach(), *gradients]


if __name__ == "__main__":
    main()
