"""What `napkin.watch` costs a step: a loop with it and without it, in pairs of steps.

    python benchmarks/hooks.py [--width 1024] [--steps 60]

Prints the median step of each and the median ratio of pairs, with the range in which nine in ten of them lie. Nothing
else may run beside it.
"""

import argparse
import contextlib
import statistics
import time

import torch

import napkin
from result_files import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(given.width, 8, 4 * given.width, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 64, given.width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {"alone": [], "watched": []}
    with napkin.watch(model, optimizer, run=None) as watched:
        for number in range(given.steps):
            # The first of a pair takes turns: what comes second has a warmer cache.
            for kind in ("alone", "watched") if number % 2 else ("watched", "alone"):
                around = watched.step(tokens=256) if kind == "watched" else contextlib.nullcontext()
                begin = time.perf_counter()
                with around:
                    step()
                seconds[kind].append(time.perf_counter() - begin)
    # The first steps are recorded operator by operator, once.
    pairs = list(zip(seconds["alone"], seconds["watched"], strict=True))[8:]
    ratios = sorted(after / before for before, after in pairs)
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    alone, with_it = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(f"{machine()}; {torch.get_num_threads()} threads, {len(pairs)} pairs")
    print(f"alone {alone * 1e3:.1f} ms, watched {with_it * 1e3:.1f} ms a step")
    print(f"watched / alone {statistics.median(ratios):.4f}, nine in ten from {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
