"""Seconds of attention's forward and backward pass on a CPU: compiled, plain and torch's fused, for several lengths.

    python benchmarks/attention.py
    python benchmarks/attention.py --n-heads 12 --head-dim 64 --lengths 1024 4096

All lengths have equally many tokens. Inputs are laid out as a model's linear layers write them, and the result is
brought into the layout that they read. Each figure is the median of several passes, the forms taking turns in one
process; the ratio is the better of the other two's over compiled attention's, so that more than 1 is faster. The table
is also written to benchmarks/results/.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from napkin.kernels.attention.by_rows import compiled_attention
from napkin.kernels.attention.reference import causal_mask, fused_attention, plain_attention
from result_files import heading, write_result
from turns import BRACKETS, fastest, ratio_spread, spread

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Print a row a format and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--n-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--passes", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        *heading(
            "Attention on a CPU",
            f"ms of the forward and the backward pass, {options.tokens} tokens, {options.n_heads} heads of "
            f"{options.head_dim}, causal. {BRACKETS}",
        ),
        "| format | length | plain | sdpa | compiled | better of both / compiled |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    for name in options.formats:
        for length in options.lengths:
            seconds = _seconds(FORMATS[name], length, options)
            whole = {form: [sum(each) for each in passes] for form, passes in seconds.items()}
            ratio = ratio_spread(whole[fastest(whole, ("plain", "sdpa"))], whole["compiled"])
            cells = [
                " + ".join(spread([1e3 * each for each in part], "{:.1f}".format) for part in zip(*passes, strict=True))
                for passes in seconds.values()
            ]
            lines.append(f"| {name} | {length} | {' | '.join(cells)} | {ratio} |")
            print(lines[-1], flush=True)
    write_result("attention-cpu", lines)


def _seconds(dtype: torch.dtype, length: int, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds of forward and backward passes, by form."""
    shape = max(options.tokens // length, 1), length, options.n_heads, options.head_dim
    inputs = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape).to(dtype).flatten(2)
    # A model makes the mask once for all its layers.
    mask = causal_mask(inputs[0], inputs[1])
    forms: dict[str, Attend] = {
        "plain": lambda q, k, v: plain_attention(q, k, v, mask),
        "sdpa": fused_attention,
        "compiled": compiled_attention,
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for turn in range(options.passes + 1):
        for name, attend in forms.items():
            begin = time.perf_counter()
            mixed = attend(*inputs).transpose(1, 2).flatten(2)
            between = time.perf_counter()
            torch.autograd.grad(mixed, inputs, upstream)
            # The first pass makes what later ones use again.
            if turn:
                samples[name].append((between - begin, time.perf_counter() - between))
    return samples


if __name__ == "__main__":
    main()
