"""Generation and scoring beside what they could be: GPT-2-small's shape in bf16 on this machine's CPU.

Decoding one sequence after prompts of 16, 512 and 1,000 tokens, beside transformers (with its cache, if it can be
imported) and beside streaming: the fastest simple read of as many bytes in bf16 as the model has, by torch's sum of
integers, by torch's product with a vector or by napkin's, which is what a token that reads every weight once would
take. Several tokens at a time, as proposals are tested. The same model in int8 and int4. Then four continuations of
one long context scored together, beside each alone. Contenders take turns.

    pip install transformers
    python benchmarks/inference.py                     # two minutes
    python benchmarks/inference.py --threads 1 --rounds 100 --clock cpu   # on a machine that is busy

The table is also written to benchmarks/results/.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from napkin.hardware.host import detect_host
from napkin.inference.decoding_forms import choose_decoding_forms
from napkin.inference.generation import cache_for, last_logits, prefill
from napkin.inference.scoring import score
from napkin.kernels.products.linear import linear
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.quantized import Format, quantize_model
from napkin.model.transformer import Transformer
from napkin.tensors import on_huge_pages
from result_files import heading, write_result
from turns import BRACKETS, Samples, fastest, in_turns, ratio_spread, seconds_of, spread

GPT2 = ModelConfig(
    vocab_size=50257, context_length=1024, d_model=768, n_layers=12, n_heads=12, positions="learned", norm="layer",
    feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
)  # fmt: skip
PROMPTS = (16, 512, 1000)
TOGETHER = (4, 8, 16)
CONTINUATION = 16
Work = Callable[[], object]


def decoding(model: Transformer, length: int, n_new: int = 1) -> Work:
    """So many tokens at a time after a prompt of that length, again and again."""
    cache = cache_for(model, 1, GPT2.context_length)
    prefill(model, [[5] * length], cache)

    def work() -> None:
        cache.truncate(length)
        last_logits(model, [7] * n_new, cache, n_new).argmax(-1)

    return work


def quantized(to: Format) -> Transformer:
    """The model in integers."""
    model = Transformer(GPT2).eval()
    quantize_model(model, to)
    return prepared(model)


def prepared(model: Transformer) -> Transformer:
    """The model as `napkin.load` and generation have it."""
    use_decoding_kernels(on_huge_pages(model))
    choose_decoding_forms(model)
    return model


def transformers_decoding(lengths: tuple[int, ...]) -> dict[str, Work]:
    """The same by transformers; empty where it is not installed."""
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    sizes: dict[str, Any] = {"vocab_size": GPT2.vocab_size, "n_positions": GPT2.context_length}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).eval()

    def decode(length: int) -> Work:
        past = model(torch.full((1, length), 5), use_cache=True).past_key_values
        token = torch.full((1, 1), 7)

        def work() -> None:
            model(token, past_key_values=past, use_cache=True).logits[0, -1].argmax()
            past.crop(-1)

        return work

    return {f"transformers, prompt {length}": decode(length) for length in lengths}


def streaming(model: Transformer) -> dict[str, Work]:
    """Reads of a matrix of the model's bytes."""
    rows = sum(parameter.numel() for parameter in model.parameters()) // GPT2.d_model
    matrix = torch.randn(rows, GPT2.d_model, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = on_huge_pages(torch.nn.ParameterList([torch.nn.Parameter(matrix, requires_grad=False)]))[0]
    vector = torch.ones(1, GPT2.d_model, dtype=torch.bfloat16)
    return {
        "streaming, torch's sum": lambda: matrix.view(torch.int64).sum(),
        "streaming, torch's product": lambda: F.linear(vector, matrix),
        "streaming, napkin's product": lambda: linear(vector, matrix),
    }


def scoring(model: Transformer) -> dict[str, Work]:
    """Four continuations of a context of 900 tokens."""
    draws = torch.Generator().manual_seed(1)
    context = torch.randint(GPT2.vocab_size, (900,), generator=draws).tolist()
    pairs = [(context, row) for row in torch.randint(GPT2.vocab_size, (4, CONTINUATION), generator=draws).tolist()]
    return {
        "score of 4 continuations": lambda: score(model, pairs),
        "each alone": lambda: [score(model, [pair]) for pair in pairs],
    }


def sampled(works: dict[str, Work], rounds: int, clock: Callable[[], float]) -> Samples:
    """Seconds of each one, taken in turns after a call that warms up."""
    turns = {name: partial(seconds_of, work, clock) for name, work in works.items()}
    in_turns(turns, 1)
    return in_turns(turns, rounds)


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only-decoding", action="store_true", help="score nothing")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of all threads together")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    model = prepared(Transformer(GPT2, dtype=torch.bfloat16).eval())
    head = heading("Inference", f"Seconds by the {options.clock} clock. {BRACKETS}", packages=["transformers"])
    lines = [
        "| what | ms | per second | best streaming / it | it / one token of bf16 |",
        "|---|---|---|---|---|",
    ]
    with torch.inference_mode():
        works = {**streaming(model), **{f"napkin, prompt {n}": decoding(model, n) for n in PROMPTS}}
        works |= {f"{n} tokens at a time": decoding(model, PROMPTS[0], n) for n in TOGETHER}
        for to in ("int8", "int4"):
            works[to] = decoding(quantized(to), PROMPTS[0])
        seconds = sampled({**works, **transformers_decoding(PROMPTS)}, options.rounds, clock)
        limit = seconds[fastest(seconds, [name for name in seconds if name.startswith("streaming")])]
        token = seconds[f"napkin, prompt {PROMPTS[0]}"]
        for name, taken in seconds.items():
            rate = spread([1 / each for each in taken], "{:.1f}".format)
            lines.append(
                f"| {name} | {spread([1e3 * each for each in taken])} | {rate} | {ratio_spread(limit, taken)} | "
                f"{ratio_spread(taken, token)} |"
            )
        scores = {} if options.only_decoding else sampled(scoring(model), max(1, options.rounds // 6), clock)
    if scores:
        together, alone = scores.values()
        found = f"{spread(together)} s, each alone {spread(alone)} s: {ratio_spread(alone, together)} ×"
        lines += ["", f"4 continuations of 900 tokens: {found}"]
    print("\n".join(lines), flush=True)
    write_result("inference", [*head, *lines])


if __name__ == "__main__":
    main()
