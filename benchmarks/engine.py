"""64 requests of mixed lengths, 16 at a time: tokens per second and time to first token, beside transformers.

    python benchmarks/engine.py [--requests 64] [--layers 12]

A model of GPT-2-small's shape with random weights, in bf16, greedy. transformers, where it is installed, runs static
batches of 16 in the order of arrival, padded on the left, each until its longest request is done; all requests are
there from the start. A third column runs the engine one request at a time: what continuous batching is worth.
"""

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from napkin.inference import Engine, Request, Sampling
from napkin.model import preset
from napkin.model.transformer import Transformer
from result_files import heading, write_result
from turns import BRACKETS, ratio_spread, spread

VOCABULARY = 50257
RUNNING = 16
GREEDY = Sampling(temperature=0)


def requests(number: int) -> list[Request]:
    """Prompts of 16 to 256 tokens; 8 to 128 more."""
    draw = random.Random(0)
    return [
        Request([draw.randrange(VOCABULARY) for _ in range(draw.randint(16, 256))], draw.randint(8, 128), GREEDY)
        for _ in range(number)
    ]


def engine_seconds(model: Transformer, asked: Sequence[Request], running: int) -> tuple[float, list[float]]:
    """Of all requests, and until the first token of each."""
    engine = Engine(model, max_running=running, cache_bytes=2**30)
    begin = time.perf_counter()
    completions = [engine.submit(request) for request in asked]
    engine.run()
    seconds = time.perf_counter() - begin
    return seconds, [(completion.first_token_at or 0.0) - begin for completion in completions]


def transformers_seconds(layers: int, asked: Sequence[Request]) -> tuple[float, list[float]]:
    """The same of transformers' static batches."""
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).to(torch.bfloat16).eval()
    begin = time.perf_counter()
    first: list[float] = []
    for start in range(0, len(asked), RUNNING):
        batch = asked[start : start + RUNNING]
        longest = max(len(request.prompt) for request in batch)
        padded = [[0] * (longest - len(request.prompt)) + list(request.prompt) for request in batch]
        seen = [[0] * (longest - len(request.prompt)) + [1] * len(request.prompt) for request in batch]
        with torch.inference_mode():
            ids, mask = torch.tensor(padded), torch.tensor(seen)
            # transformers streams single sequences only: the first token comes after a pass over the prompts, which is
            # timed apart and not counted twice.
            called = time.perf_counter()
            model(ids, attention_mask=mask, logits_to_keep=1)
            prefill = time.perf_counter() - called
            begin += prefill
            called = time.perf_counter()
            more = max(request.max_new_tokens for request in batch)
            settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            model.generate(ids, attention_mask=mask, max_new_tokens=more, **settings)
        first += [called + prefill - begin] * len(batch)
    return time.perf_counter() - begin, first


def line(name: str, rounds: list[tuple[float, list[float]]], baseline: list[float], tokens: int) -> str:
    """A row of the table."""
    seconds = [each for each, _ in rounds]
    cells = [
        spread([tokens / each for each in seconds], "{:.1f}".format),
        ratio_spread(baseline, seconds),
        spread([statistics.median(first) for _, first in rounds]),
        spread([statistics.quantiles(first, n=20)[-1] for _, first in rounds]),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main(number: int, layers: int, rounds: int) -> None:
    """Run all, and print the table."""
    asked = requests(number)
    tokens = sum(request.max_new_tokens for request in asked)
    config = dataclasses.replace(preset("gpt2"), n_layers=layers)
    model = Transformer(config, dtype=torch.bfloat16)
    theirs = find_spec("transformers") is not None
    lines = [
        *heading(
            "Many requests, 16 at a time, beside transformers",
            f"{number} requests, {tokens:,} tokens, {layers} layers of GPT-2's width. {BRACKETS}",
            packages=["transformers"],
        ),
        "| who | tokens/s | × the first row | first token, s | its 95th percentile, s |",
        "|---|---|---|---|---|",
    ]
    ways: dict[str, Callable[[], tuple[float, list[float]]]] = {
        **({"transformers, static batches": lambda: transformers_seconds(layers, asked)} if theirs else {}),
        "napkin, 16 at a time": lambda: engine_seconds(model, asked, RUNNING),
        "napkin, one at a time": lambda: engine_seconds(model, asked, 1),
    }
    engine_seconds(model, asked[:2], 2)  # kernels are compiled once
    found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in ways if turn % 2 == 0 else reversed(ways):
            found[name].append(ways[name]())
            print(f"round {turn + 1}: {name}, {found[name][-1][0]:.1f} s", flush=True)
    baseline = [seconds for seconds, _ in next(iter(found.values()))]
    lines += [line(name, each, baseline, tokens) for name, each in found.items()]
    print("\n".join(["", *lines[-len(found) - 2 :]]))
    write_result("engine", lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="of all requests")
    arguments = parser.parse_args()
    main(arguments.requests, arguments.layers, arguments.rounds)
