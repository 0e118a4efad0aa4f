"""A training step of napkin's model beside transformers (with SDPA) and a plain torch.nn version of the same shape.

GPT-2's and Llama's shape, 4 layers, widths 256 and 512, context 256, batch 16, in fp32 and bf16 (autocast); every
contender eager and compiled, all with torch's fused AdamW, in turns. Peak bytes are those
of tensors over an eager step, as `napkin.accounting.recording` watches them. Then head and loss alone at 50,304 words,
and an evaluation of a run's batch with 32,000, in plain and in compiled kernels.

    pip install transformers
    python benchmarks/model.py                      # everything: half an hour on two cores, most of it compiling
    python benchmarks/model.py --widths 256 --quick # width 256, eager
    python benchmarks/model.py --precisions fp32    # where the processor has no bf16, which would take hours
    python benchmarks/model.py --clock cpu --threads 1   # CPU seconds of one thread, on a machine that is busy
    python benchmarks/model.py --widths --keep-memory  # heads and evaluations alone, memory kept as in runs

The table is also written to benchmarks/results/.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin.accounting.recording import record
from napkin.hardware.host import detect_host, keep_freed_memory
from napkin.kernels.loss.cross_entropy import linear_cross_entropy
from napkin.kernels.operator_forms import pinned_forms
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import compiled_passes
from napkin.model.transformer import Transformer, evaluation_mode
from napkin.units import format_bytes
from plain_models import PlainGPT2, PlainLlama
from result_files import heading, write_result
from turns import BRACKETS, Samples, fastest, in_turns, ratio_spread, seconds_of, spread

VOCAB_SIZE, LENGTH, BATCH_SIZE, N_LAYERS = 8192, 256, 16, 4
Step = Callable[[], object]


class LossOf(nn.Module):
    """napkin's model as a module that returns its loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


class TheirLoss(nn.Module):
    """transformers' model likewise; it shifts the targets itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def contenders(shape: str, d_model: int) -> dict[str, Callable[[], nn.Module]]:
    """Functions that build each model."""
    n_heads = d_model // 64
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "context_length": LENGTH, "d_model": d_model, "n_layers": N_LAYERS, "n_heads": n_heads
    }  # fmt: skip
    if shape == "GPT-2":
        ours = ModelConfig(
            **sizes, positions="learned", norm="layer", feed_forward="gelu_tanh", biases="all", embedding_scale=1.0
        )
        plain = lambda: PlainGPT2(VOCAB_SIZE, LENGTH, N_LAYERS, d_model, n_heads)  # noqa: E731
    else:
        ours = ModelConfig(**sizes, n_kv_heads=max(1, n_heads // 2), tie_embeddings=False)
        d_ff = ours.resolved_d_ff
        plain = lambda: PlainLlama(VOCAB_SIZE, LENGTH, N_LAYERS, d_model, n_heads, max(1, n_heads // 2), d_ff)  # noqa: E731
    with_form = {
        f"napkin, {form}": lambda form=form: LossOf(Transformer(ModelConfig(**{**vars(ours), "attention": form})))
        for form in ("plain", "sdpa")
    }
    peer = {"transformers": lambda: TheirLoss(_of_transformers(shape, ours))}
    return {**with_form, "torch.nn": plain, **(peer if find_spec("transformers") else {})}


def _of_transformers(shape: str, config: ModelConfig) -> nn.Module:
    import transformers  # pyright: ignore[reportMissingImports]

    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa"}
    if shape == "GPT-2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB_SIZE, n_positions=LENGTH, n_embd=config.d_model, n_layer=N_LAYERS,
                n_head=config.n_heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **tokens,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, hidden_size=config.d_model,
            num_hidden_layers=N_LAYERS, num_attention_heads=config.n_heads, intermediate_size=config.resolved_d_ff,
            num_key_value_heads=config.resolved_n_kv_heads, tie_word_embeddings=False, **tokens,
        )
    )  # fmt: skip


def training_step(module: nn.Module, precision: str, *, compiled: bool) -> Step:
    """A step on a batch of its own."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(VOCAB_SIZE, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    forward = torch.compile(module) if compiled else module

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def sampled(steps: dict[str, Step], clock: Callable[[], float], rounds: int) -> Samples:
    """Seconds of each step, taken in turns so that a busy minute hits all of them, after one that warms up."""
    turns = {name: partial(seconds_of, step, clock) for name, step in steps.items()}
    in_turns(turns, 1)
    return in_turns(turns, rounds)


def compare_models(
    shape: str, d_model: int, precision: str, modes: tuple[bool, ...], clock: Callable[[], float], rounds: int
) -> list[str]:
    """A line a contender: tokens/s by mode, ratio to the best peer, peak bytes and their ratio."""
    built = {name: build() for name, build in contenders(shape, d_model).items()}
    steps, peaks = {}, {}
    for name, module in built.items():
        eager = training_step(module, precision, compiled=False)
        peaks[name] = record(module, eager, warm_up=1).peak_bytes
        for compiled in modes:
            step = eager if not compiled else training_step(module, precision, compiled=True)
            steps[f"{name}|{compiled}"] = step
    seconds = sampled(steps, clock, rounds)
    best = {name: seconds[fastest(seconds, [f"{name}|{mode}" for mode in modes])] for name in built}
    peers = [name for name in built if not name.startswith("napkin")]
    best_peer, smallest = best[fastest(best, peers)], min(peaks[name] for name in peers)
    lines = []
    for name in built:
        rates = [
            tokens_per_second(BATCH_SIZE * LENGTH, seconds[f"{name}|{mode}"]) if mode in modes else "–"
            for mode in (False, True)
        ]
        lines.append(
            f"| {shape} d {d_model} {precision} | {name} | {' | '.join(rates)} | "
            f"{ratio_spread(best_peer, best[name])} | {format_bytes(peaks[name])} | {peaks[name] / smallest:.2f} |"
        )
    return lines


def tokens_per_second(tokens: int, seconds: Sequence[float]) -> str:
    """With its interval."""
    return spread([tokens / each for each in seconds], "{:,.0f}".format)


def compare_losses(precision: str, clock: Callable[[], float], rounds: int) -> list[str]:
    """Head and loss alone at 50,304 words, d 256, 4,096 tokens, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 256, generator=generator).requires_grad_()
    head = nn.Linear(256, 50304, bias=False)
    targets = torch.randint(50304, (4096,), generator=generator)

    def step(loss_of: Callable[[], Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = loss_of()
        loss.backward()
        hidden.grad = head.weight.grad = None

    steps: dict[str, Step] = {
        "napkin": lambda: step(lambda: linear_cross_entropy(hidden, head.weight, targets)),
        "napkin, compiled": lambda: step(lambda: linear_cross_entropy(hidden, head.weight, targets, compiled=True)),
        "full logits": lambda: step(lambda: F.cross_entropy(F.linear(hidden, head.weight).float(), targets)),
    }
    return _beside("full logits", f"head and loss, V 50,304 {precision}", head, steps, 4096, clock, rounds)


def compare_evaluations(clock: Callable[[], float], rounds: int) -> list[str]:
    """The loss of a batch without a gradient, of a model of width 256 with 32,000 words in bf16."""
    model = Transformer(ModelConfig(vocab_size=32000, context_length=LENGTH, d_model=256, n_layers=N_LAYERS, n_heads=4))
    batch = torch.randint(32000, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate() -> None:
        with evaluation_mode(model), torch.autocast("cpu", torch.bfloat16):
            model.loss(tokens, targets)

    def evaluate_compiled(**forms: str) -> None:
        with compiled_passes(model), pinned_forms(forms):
            evaluate()

    steps: dict[str, Step] = {
        "plain kernels": evaluate,
        "compiled, logits by chunks": lambda: evaluate_compiled(head_without_gradient="chunks"),
        "compiled": evaluate_compiled,
    }
    return _beside("plain kernels", "evaluation, d 256, V 32,000 bf16", model, steps, targets.numel(), clock, rounds)


def _beside(
    peer: str,
    what: str,
    module: nn.Module,
    steps: dict[str, Step],
    n_tokens: int,
    clock: Callable[[], float],
    rounds: int,
) -> list[str]:
    """Rows of tokens per second and of the bytes that steps add to what a module holds, each beside one of them."""
    seconds = sampled(steps, clock, rounds)
    ledgers = {name: record(module, one) for name, one in steps.items()}
    growth = {name: ledger.peak_bytes - ledger.resident_bytes for name, ledger in ledgers.items()}
    return [
        f"| {what} | {name} | {tokens_per_second(n_tokens, seconds[name])} | – | "
        f"{ratio_spread(seconds[peer], seconds[name])} | {format_bytes(growth[name])} | "
        f"{growth[name] / growth[peer]:.2f} |"
        for name in steps
    ]


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eager alone")
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--precisions", nargs="*", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of all threads together")
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep-memory", action="store_true", help="glibc keeps what is freed, as in a run of napkin")
    options = parser.parse_args()
    kept = "kept by the process" if options.keep_memory and keep_freed_memory() else "returned to the system"
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    modes = (False,) if options.quick else (False, True)
    widths: list[int] = options.widths
    precisions: list[str] = options.precisions

    lines = [
        *heading(
            "Model beside its peers",
            f"Seconds by the {options.clock} clock; large freed tensors are {kept}. {BRACKETS}",
        ),
        "| what | who | tokens/s eager | tokens/s compiled | best / best peer | peak bytes | / smallest peer |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    for shape, d_model, precision in itertools.product(("GPT-2", "Llama"), widths, precisions):
        lines += (found := compare_models(shape, d_model, precision, modes, clock, options.rounds))
        print("\n".join(found), flush=True)
    for precision in precisions:
        lines += (found := compare_losses(precision, clock, options.rounds))
        print("\n".join(found), flush=True)
    if "bf16" in precisions:
        lines += (found := compare_evaluations(clock, options.rounds))
        print("\n".join(found), flush=True)
    write_result("model", lines)


if __name__ == "__main__":
    main()
