"""What keys and values in int8 cost and gain on this CPU: `python benchmarks/kv_cache.py`.

Cost: a model is trained for a while on bytes of the standard library, and the engine scores text that it has not seen
with keys and values in bf16 and in int8, in bits per byte.

Gain: bytes per token, and seconds of a decoding step of a GPT-2-small shape in bf16, by sequences and by tokens that
each holds. Contestants take turns.
"""

import argparse
import math
import random
import time
from functools import partial

import torch

from napkin.data.corpus import standard_library
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import KVFormat, PagedCache, bytes_per_token
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.units import format_bytes
from result_files import heading
from turns import BRACKETS, in_turns, ratio_spread, spread

FORMATS: tuple[KVFormat, ...] = ("auto", "int8")
SHAPES = ((1, 256), (1, 4000), (16, 256), (16, 1000))
"""Sequences, and the tokens that each holds."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--texts", type=int, default=100, help="texts of 512 bytes that are scored")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="of decoding steps, the smallest first")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heading("What keys and values in int8 cost and gain", BRACKETS)
    cost(options.seconds, options.texts)
    gain(options.rounds, options.shapes)


def cost(seconds: float, n_texts: int) -> None:
    """Bits per byte of text that the model has not seen."""
    text = b"\n".join(document.text.encode() for document in standard_library())
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    config = ModelConfig(vocab_size=256, context_length=512, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2)
    model = Transformer(config)
    train(model, seen, seconds)
    model = model.to(torch.bfloat16).eval()
    draw = random.Random(2)
    starts = [draw.randrange(len(unseen) - 512) for _ in range(n_texts)]
    bits: dict[KVFormat, list[float]] = {}
    for kv in FORMATS:
        engine = Engine(model, kv=kv)
        scored = [
            engine.submit(Request(list(unseen[at : at + 512]), 0, Sampling(logprobs=0), prompt_logprobs=True))
            for at in starts
        ]
        engine.run()
        bits[kv] = [
            -sum(each.logprob or 0.0 for each in one.prompt_draws if each) / 511 / math.log(2) for one in scored
        ]
    differences = [one - other for one, other in zip(bits["int8"], bits["auto"], strict=True)]
    mean = sum(differences) / len(differences)
    error = math.sqrt(sum((each - mean) ** 2 for each in differences)) / len(differences)
    print(
        f"\nbits per byte of {511 * len(starts):,} unseen bytes: bf16 {sum(bits['auto']) / len(starts):.4f}, ", end=""
    )
    print(f"int8 {sum(bits['int8']) / len(starts):.4f}; difference {mean:+.5f} ± {error:.5f}")


def train(model: Transformer, text: bytes, seconds: float) -> None:
    """Some AdamW on the text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw, started = random.Random(1), time.perf_counter()
    while time.perf_counter() - started < seconds:
        batch = torch.stack(
            [tokens[at : at + 257].long() for at in (draw.randrange(len(text) - 257) for _ in range(8))]
        )
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.inference_mode()
def gain(rounds: int, n_shapes: int) -> None:
    """Bytes and seconds at GPT-2-small's shape."""
    config = ModelConfig(vocab_size=50_257, context_length=4096, d_model=768, n_layers=12, n_heads=12)
    model = Transformer(config).to(torch.bfloat16).eval()
    of = {kv: bytes_per_token(config, torch.bfloat16, kv) for kv in FORMATS}
    print(f"\nbytes per token: bf16 {format_bytes(of['auto'])}, int8 {format_bytes(of['int8'])}", end="")
    print(
        f" ({of['int8'] / of['auto']:.3f})\n\n"
        "| sequences | tokens held | bf16 ms | int8 ms | bf16 / int8 |\n|---|---|---|---|---|"
    )
    for rows, context in SHAPES[:n_shapes]:
        each = -(-(context + 1) // 16)
        caches = {kv: PagedCache(config, rows * each, 16, dtype=torch.bfloat16, kv=kv) for kv in FORMATS}
        contestants = {kv: partial(step_seconds, model, caches[kv], rows, context) for kv in FORMATS}
        in_turns(contestants, 1)
        found = in_turns(contestants, rounds)
        cells = [spread([1e3 * each for each in found[kv]], "{:.1f}".format) for kv in FORMATS]
        print(
            f"| {rows} | {context} | {' | '.join(cells)} | {ratio_spread(found['auto'], found['int8'])} |", flush=True
        )


def step_seconds(model: Transformer, cache: PagedCache, rows: int, context: int) -> float:
    """One token of each sequence."""
    each = -(-(context + 1) // 16)
    tables = [list(range(row * each, (row + 1) * each)) for row in range(rows)]
    started = time.perf_counter()
    extending = cache.extend(tables, [context] * rows, [1] * rows, 1)
    hidden = model.hidden(torch.zeros(rows, 1, dtype=torch.int64), cache=extending)
    model.logits_of(hidden[:, -1])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
