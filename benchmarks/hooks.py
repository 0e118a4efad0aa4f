"""What `napkin.watch` costs a step: a loop with it and without it, in pairs of steps.

    python benchmarks/hooks.py [--width 1024] [--steps 60]

Prints the median step of each and the median ratio of pairs, with their intervals. Nothing else may run beside it.
"""

import argparse
import contextlib
import time

import torch

import napkin
from result_files import heading
from turns import BRACKETS, ratio_spread, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    heading("What napkin.watch costs a step", BRACKETS)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(options.width, 8, 4 * options.width, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 64, options.width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {"alone": [], "watched": []}
    with napkin.watch(model, optimizer, run=None) as watched:
        for number in range(options.steps):
            # The first of a pair takes turns: what comes second has a warmer cache.
            for kind in ("alone", "watched") if number % 2 else ("watched", "alone"):
                around = watched.step(tokens=256) if kind == "watched" else contextlib.nullcontext()
                begin = time.perf_counter()
                with around:
                    step()
                seconds[kind].append(time.perf_counter() - begin)
    # The first steps are recorded operator by operator, once.
    pairs = list(zip(seconds["alone"], seconds["watched"], strict=True))[8:]
    alone, with_it = zip(*pairs, strict=True)
    ms = [spread([1e3 * each for each in side], "{:.1f}".format) for side in (alone, with_it)]
    print(f"{len(pairs)} pairs of steps: alone {ms[0]} ms per step, watched {ms[1]} ms per step")
    print(f"watched / alone {ratio_spread(with_it, alone, '{:.4f}'.format)}")


if __name__ == "__main__":
    main()
