"""What quantized weights and proposals gain in decoding on this CPU: `python benchmarks/decoding_options.py`.

Quantized: a Transformer of d_model 2048 (4 blocks, vocabulary 32,000) with a prompt of 16 tokens decodes in int8 and
int4, beside the same model in bf16, as `napkin generate` computes it and with torch's own products and attention.

Lookup: a small model is trained for 25 seconds on a program that repeats itself, and continues it at temperature 0 with
and without n-gram proposals.

Contestants take turns, round by round, so that other programs' work falls on all.
"""

import argparse
import copy
import random
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from napkin.inference.decoding_forms import choose_decoding_forms
from napkin.inference.generation import cache_for, continue_prompt, prefill
from napkin.inference.settings import Sampling
from napkin.inference.speculation import PromptLookup, SpeculationMeter, speculate
from napkin.kernels.attention import decode
from napkin.kernels.products import linear
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.quantized import quantize_model
from napkin.model.transformer import Transformer
from result_files import heading
from turns import BRACKETS, in_turns, ratio_spread, spread


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("quantized", "lookup"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--train-seconds", type=float, default=25.0, help="of the small model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heading("What quantized weights and proposals gain in decoding", BRACKETS)
    if options.only != "lookup":
        quantized(options.rounds)
    if options.only != "quantized":
        lookup(options.rounds, options.train_seconds)


def quantized(rounds: int) -> None:
    """Seconds per token at d_model 2048."""
    config = ModelConfig(vocab_size=32_000, context_length=256, d_model=2048, n_layers=4, n_heads=16, n_kv_heads=16)
    model = Transformer(config).eval()
    models = {"int8": copy.deepcopy(model), "int4": copy.deepcopy(model)}
    quantize_model(models["int8"], "int8")
    quantize_model(models["int4"], "int4")
    plain = model.to(torch.bfloat16)
    models = {"bf16": copy.deepcopy(plain), **models}
    for each in models.values():
        # As generation has it.
        use_decoding_kernels(each)
        choose_decoding_forms(each)
    contestants: dict[str, Callable[[], float]] = {
        "torch's bf16": lambda: without_compiled(lambda: seconds_per_token(plain)),
        **{name: partial(seconds_per_token, each) for name, each in models.items()},
    }
    samples = in_turns(contestants, rounds)
    baseline = next(iter(samples.values()))
    print("\nd_model 2048, batch 1       tokens/s                   of torch's bf16")
    for name, seconds in samples.items():
        rate = spread([1 / each for each in seconds])
        print(f"{name:<26} {rate:<26} {ratio_spread(baseline, seconds)}")


def without_compiled(measure: Callable[[], float]) -> float:
    """The same with torch's own operators alone."""
    with (
        mock.patch.object(decode, "may_be_compiled", return_value=False),
        mock.patch.object(linear, "may_be_compiled", return_value=False),
    ):
        return measure()


def seconds_per_token(model: Transformer, n_tokens: int = 12) -> float:
    """The fastest of a few tokens after a prompt."""
    cache = cache_for(model, 1, 64)
    prefill(model, [list(range(16))], cache)
    seconds = []
    for token in range(n_tokens):
        started = time.perf_counter()
        prefill(model, [[token]], cache)
        seconds.append(time.perf_counter() - started)
    return min(seconds[2:])


def lookup(rounds: int, train_seconds: float) -> None:
    """Tokens per second of code with repetition."""
    text = program(random.Random(0))
    config = ModelConfig(vocab_size=256, context_length=1024, d_model=512, n_layers=6, n_heads=8)
    model = Transformer(config)
    train(model, text, train_seconds)
    model = model.to(torch.bfloat16).eval()
    prompt, greedy, n_tokens = list(text[:700]), Sampling(temperature=0), 300
    made: dict[str, list[int]] = {}
    meters: list[SpeculationMeter] = []

    def without() -> float:
        started = time.perf_counter()
        made["without"] = [drawn.token for drawn in continue_prompt(model, prompt, n_tokens, greedy)]
        return time.perf_counter() - started

    def with_lookup() -> float:
        meters.append(SpeculationMeter())
        started = time.perf_counter()
        draws = speculate(model, prompt, n_tokens, greedy, PromptLookup(64), meter=meters[-1])
        made["with"] = [drawn.token for drawn in draws]
        return time.perf_counter() - started

    samples = in_turns({"without": without, "lookup of 64 tokens": with_lookup}, rounds)
    print(f"\nn-gram proposals, {n_tokens} tokens of code   tokens/s")
    for name, seconds in samples.items():
        rate = spread([n_tokens / each for each in seconds], "{:.1f}".format)
        print(f"{name:<34} {rate:<26} {ratio_spread(samples['without'], seconds)}")
    print(f"same tokens: {made['with'] == made['without']}; {meters[-1]}")


def program(draw: random.Random) -> bytes:
    """Methods that differ in one of five names, as generated or tabular code does; the prompt shows each once."""
    names = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(5)]
    method = "    def set_{0}(self, value: int) -> None:\n        self._{0} = value\n        self.changed('{0}')\n\n"
    return "".join(method.format(name) for _ in range(48) for name in names).encode()


def train(model: Transformer, text: bytes, seconds: float) -> None:
    """Some AdamW on the text."""
    tokens = torch.tensor(list(text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw, started = random.Random(1), time.perf_counter()
    while time.perf_counter() - started < seconds:
        starts = [draw.randrange(len(tokens) - 129) for _ in range(4)]
        batch = torch.stack([tokens[start : start + 129] for start in starts])
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
