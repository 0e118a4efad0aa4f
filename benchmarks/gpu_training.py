"""Models of 124M, 350M and 1.3B parameters in bf16 on one GPU: MFU, and peak memory against plan, beside peers.

One command on a machine with a GPU; the table is also written to benchmarks/results/:

    python benchmarks/gpu_training.py
    python benchmarks/gpu_training.py --tiny --device cpu      # the same code on toy models, to see that it runs

Context 1024, vocabulary 50,304, GPT-2's shape for all. napkin takes the largest micro-batch that fits by count, with
torch's operators, compiled blocks, and its Triton kernels; the peers take the same one, or half of it until they fit: a
plain loop (autocast, SDPA, fused AdamW) eager and compiled, and transformers' GPT-2 where it is installed. MFU counts
attention over all pairs and no recomputation, for everybody by napkin's count of napkin's model, over the datasheet's
peak where napkin knows the device, and is the median of the timed steps. Peak is torch.cuda.max_memory_allocated.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes, format_count
from plain_models import PlainGPT2
from result_files import heading, write_result

WARM_UP, TIMED = 5, 20
SIZES = {"124M": (12, 768, 12), "350M": (24, 1024, 16), "1.3B": (24, 2048, 16)}
TINY = {"tiny": (2, 64, 2), "less tiny": (2, 128, 2)}
Step = Callable[[Tensor, Tensor], object]


def main() -> None:
    """Measure and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences an update")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--no-compiled", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use: --tiny --device cpu shows that the code runs")
    lines = [
        *heading(
            f"Training on {ThisMachine(device=options.device).device_name}",
            f"CUDA {torch.version.cuda}.",
            packages=["transformers"],
        ),
        "| model | who | micro-batch | tokens/s | MFU | peak bytes | peak by plan | meter/plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    for size, shape in (TINY if options.tiny else SIZES).items():
        for line in compare(size, shape, options):
            lines.append(line)
            print(line, flush=True)
    if not options.tiny:
        write_result("training-gpu", lines)


def compare(size: str, shape: tuple[int, int, int], options: argparse.Namespace) -> list[str]:
    """A line a contender."""
    layers, width, heads = shape
    length, vocab_size = (64, 512) if options.tiny else (1024, 50304)
    batch_size = 4 if options.tiny else options.batch_size
    recipe = Recipe(
        model=ModelConfig(
            vocab_size, length, d_model=width, n_layers=layers, n_heads=heads, positions="learned", norm="layer",
            feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
        ),
        optimizer=OptimizerConfig(warmup_steps=0, learning_rate=3e-4),
        training=TrainingConfig(
            steps=WARM_UP + TIMED, batch_size=batch_size, micro_batch_size="auto", precision=options.precision,
            device=options.device, kernels="plain",
        ),
    )  # fmt: skip
    planned = plan(recipe)
    precision = planned.resolved.precision
    peak_rate = _datasheet_peak(planned.site.device_name, precision) or planned.site.matmul_peak
    tokens = torch.randint(vocab_size, (batch_size, length + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(options.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    lines = []

    def line(who: str, micro_batch_size: int, seconds: float, peak: int | None, by_plan: int | None = None) -> None:
        over = f"{peak / by_plan:.3f}" if peak and by_plan else "–"
        lines.append(
            f"| {size} | {who} | {micro_batch_size} | {format_count(inputs.numel() / seconds)} | "
            f"{planned.ledger.flops / seconds / peak_rate:.1%} | {format_bytes(peak) if peak else '–'} | "
            f"{format_bytes(by_plan) if by_plan else '–'} | {over} |"
        )

    micro = planned.recipe.training.resolved_micro_batch_size
    for form in ("plain", "triton") if options.no_compiled else ("plain", "compiled", "triton"):
        resolved = planned.resolved.with_training(kernels="triton" if form == "triton" else "plain")
        train_state = build_train_state(resolved, compiled=form == "compiled")
        numbers = iter(range(10**9))
        seconds, peak = measure(partial(ours, train_state, numbers), inputs, targets, options.device)
        who = f"napkin {precision.name}{'' if form == 'plain' else f', {form}'}"
        line(who, micro, seconds, peak, count_step(resolved).peak_bytes)
        del train_state
        _clear(options.device)
    for who, build in peers(shape, length, vocab_size, compiled=not options.no_compiled).items():
        fitting = micro
        while fitting:
            _clear(options.device)
            try:
                step = plain_step(build().to(options.device), fitting, options.device)
                line(who, fitting, *measure(step, inputs, targets, options.device))
                break
            except torch.OutOfMemoryError:
                step = None
                fitting //= 2
    _clear(options.device)
    return lines


def ours(train_state: TrainState, numbers: Iterator[int], inputs: Tensor, targets: Tensor) -> object:
    """napkin's step."""
    return train_state.step(next(numbers), inputs, targets)


def _datasheet_peak(name: str, precision: Precision) -> float | None:
    try:
        return find_device(name).peak(precision.products)
    except NapkinError:
        return None


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure(step: Step, inputs: Tensor, targets: Tensor, device: str) -> tuple[float, int | None]:
    """Median seconds of a step, and the most bytes that were allocated; None on a CPU."""
    taken = []
    for number in range(WARM_UP + TIMED):
        if device == "cuda" and number == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step(inputs, targets)
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken), torch.cuda.max_memory_allocated() if device == "cuda" else None


def peers(
    shape: tuple[int, int, int], length: int, vocab_size: int, *, compiled: bool
) -> dict[str, Callable[[], nn.Module]]:
    """What a user would take instead."""
    layers, width, heads = shape

    def plain() -> nn.Module:
        return PlainGPT2(vocab_size, length, layers, width, heads)

    found: dict[str, Callable[[], nn.Module]] = {"plain loop": plain}
    if compiled:
        found["plain loop, compiled"] = lambda: torch.compile(plain())  # pyright: ignore
    if find_spec("transformers"):
        found["transformers"] = lambda: _Theirs(shape, length, vocab_size)
    return found


class _Theirs(nn.Module):
    def __init__(self, shape: tuple[int, int, int], length: int, vocab_size: int) -> None:
        super().__init__()
        import transformers  # pyright: ignore[reportMissingImports]

        layers, width, heads = shape
        self.model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocab_size, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, resid_pdrop=0,
                embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def plain_step(
    model: nn.Module, micro_batch_size: int, device: str, optimizers: Sequence[torch.optim.Optimizer] | None = None
) -> Step:
    """The loop that people copy, in its best settings; `optimizers` take the place of a fused AdamW."""
    optimizers = optimizers or [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)]

    def step(inputs: Tensor, targets: Tensor) -> None:
        parts = len(inputs) // micro_batch_size
        for a, b in zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True):
            with torch.autocast(device, torch.bfloat16):
                loss = model(a, b)
            (loss / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
