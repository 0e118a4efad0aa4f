"""Tokens/s and peak memory of a training step: napkin beside a plain loop, fp32 and bf16, and transformers' Trainer.

One model for all, GPT-2's shape: 4 layers, context 256, batch 16, vocabulary 8,192, widths 256 and 512. Each contender
is a separate process, so that the allocator settings of one do not affect another; they take their steps in turns, so
that a busy minute hits all of them. The bf16 peak is the best of 2048³ products in the same rounds. Peak bytes are
those of tensors in an eager step, as `napkin.accounting.recording` watches them.

    python benchmarks/training.py                         # some ten minutes on two quiet cores
    python benchmarks/training.py --no-compiled --widths 256 --rounds 5
    python benchmarks/training.py --trainer-python OTHER/bin/python   # a venv with transformers and accelerate

The table is also written to benchmarks/results/.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from napkin.accounting.recording import record
from napkin.hardware.host import detect_host, keep_freed_memory
from napkin.model.config import ModelConfig
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes
from plain_models import PlainGPT2
from result_files import write_result
from turns import BRACKETS, fastest, in_turns, ratio_spread, spread

VOCAB_SIZE, LENGTH, BATCH_SIZE, N_LAYERS = 8192, 256, 16, 4
Step = Callable[[], object]

OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "napkin bf16": ("bf16", {}),
    "napkin bf16, compiled": ("bf16", {}),
    "napkin bf16, micro-batch 8": ("bf16", {"micro_batch_size": 8}),
    "napkin bf16, micro-batch 8, compiled": ("bf16", {"micro_batch_size": 8}),
    "napkin bf16, micro-batch 4": ("bf16", {"micro_batch_size": 4}),
    "napkin bf16-pure, micro-batch 4": ("bf16-pure", {"micro_batch_size": 4}),
}
LOOPS = ("plain fp32 loop", "plain bf16 loop")
COMPILED = ", compiled"
TRAINER = "transformers' Trainer, bf16"
PEAK = "bf16 2048³"


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--no-compiled", action="store_true", help="leave torch.compile out, which takes minutes")
    parser.add_argument("--trainer-python", help="Python of a venv that has transformers and accelerate")
    parser.add_argument("--worker", nargs=3, metavar=("NAME", "WIDTH", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, width, steps = options.worker
        work(name, int(width), int(steps), options.threads)
        return
    host, now = detect_host(), datetime.now(UTC)
    load = os.getloadavg()[0]
    lines = [
        f"# Training beside its peers: {host.cpu_name}, {options.threads} threads, {now:%Y-%m-%d %H:%M}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, load before: {load:.1f}",
    ]
    lines += ["", BRACKETS]
    print("\n".join(lines), flush=True)
    for width in options.widths:
        lines += (found := compare(width, options))
        print("\n".join(found), flush=True)
    lines.append(f"\nload after: {os.getloadavg()[0]:.1f}")
    write_result("training-cpu", lines)


def compare(width: int, options: argparse.Namespace) -> list[str]:
    """A table for one width."""
    names = [*OURS, *LOOPS, PEAK]
    if options.no_compiled:
        names = [name for name in names if COMPILED not in name]
    else:
        names.insert(-1, LOOPS[1] + COMPILED)
    if options.trainer_python or _has_transformers():
        names.insert(-1, TRAINER)
    workers = {name: Worker(name, width, options) for name in names}
    for worker in workers.values():
        worker.warm_up()
    seconds = in_turns({name: worker.turn for name, worker in workers.items()}, options.rounds)
    peaks = {name: worker.finish() for name, worker in workers.items()}
    flops = count_step(ResolvedRecipe(recipe_of("fp32", width), Precision("fp32", "cpu"))).flops
    best_rate = 2 * 2048**3 / min(seconds.pop(PEAK))
    loops = [name for name in seconds if name not in OURS]
    rivals = [name for name in loops if name != LOOPS[0]]
    against, leanest = seconds[fastest(seconds, rivals)], min(peaks[name] for name in loops)
    lines = [
        f"\n## d {width}: {flops / 1e9:.1f} GFLOP per step; bf16 products at most {best_rate / 1e9:.0f} GFLOP/s\n",
        "| who | tokens/s | × plain fp32 loop | × best of the others in bf16 | of the bf16 peak | peak bytes | "
        "/ leanest of the others |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, taken in seconds.items():
        rate = spread([BATCH_SIZE * LENGTH / each for each in taken], "{:,.0f}".format)
        lines.append(
            f"| {name} | {rate} | {ratio_spread(seconds[LOOPS[0]], taken)} | {ratio_spread(against, taken)} | "
            f"{flops / statistics.median(taken) / best_rate:.0%} | "
            f"{format_bytes(peaks[name])} | {peaks[name] / leanest:.2f} |"
        )
    return lines


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None and find_spec("accelerate") is not None


class Worker:
    """A contender's process: it takes a step whenever it is told to."""

    def __init__(self, name: str, width: int, options: argparse.Namespace) -> None:
        python = options.trainer_python if name == TRAINER and options.trainer_python else sys.executable
        command = [python, __file__, "--threads", str(options.threads)]
        # One step more, to warm up.
        command += ["--worker", name, str(width), str(options.rounds + 1)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.peak_bytes = 0

    def warm_up(self) -> None:
        """Wait until it has begun, and let it take a step."""
        self.peak_bytes = int(self._answer())
        self.turn()

    def turn(self) -> float:
        """Seconds of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._answer())

    def finish(self) -> int:
        """Peak bytes; the process ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        return self.peak_bytes

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return line.split()[1]
        raise SystemExit(f"{self.name} has ended before it was done: its own message is above")


def work(name: str, width: int, steps: int, threads: int) -> None:
    """The other side: say the peak bytes, then take a step for each line that comes."""
    torch.set_num_threads(threads)
    if name == TRAINER:
        train_with_transformers(width, steps)
        return
    module, step = contender(name, width)
    # Operators can be watched where there are any: without a compiler.
    watched, its_step = contender(name.removesuffix(COMPILED), width) if COMPILED in name else (module, step)
    _say(0 if watched is None else record(watched, its_step, warm_up=1).peak_bytes)
    del watched, its_step
    for _ in sys.stdin:
        begin = time.perf_counter()
        step()
        _say(time.perf_counter() - begin)


def _say(value: float) -> None:
    print(f"answer {value}", flush=True)


def contender(name: str, width: int) -> tuple[nn.Module | None, Step]:
    """A model and its step."""
    if name == PEAK:
        a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
        return None, lambda: a @ b
    tokens, targets = batch()
    if name in OURS:
        keep_freed_memory()
        train_state = learner_of(*OURS[name], width, compiled=COMPILED in name)
        numbers = iter(range(10**9))
        return train_state.model, lambda: float(train_state.step(next(numbers), tokens, targets)[0])
    model = PlainGPT2(VOCAB_SIZE, LENGTH, N_LAYERS, width, width // 64)
    fp32 = "fp32" in name
    # As people copy it, and then with what is known to be faster.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=None if fp32 else True)
    forward = torch.compile(model) if COMPILED in name else model

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=not fp32):
            loss = forward(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return model, step


def batch() -> tuple[Tensor, Tensor]:
    """Random tokens and the next ones."""
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def recipe_of(precision: Any, width: int, **training: Any) -> Recipe:
    """The model that all train, as a recipe."""
    model = ModelConfig(
        VOCAB_SIZE, LENGTH, d_model=width, n_layers=N_LAYERS, n_heads=width // 64, positions="learned", norm="layer",
        feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
    )  # fmt: skip
    settings = TrainingConfig(batch_size=BATCH_SIZE, precision=precision, **training)
    return Recipe(model=model, optimizer=OptimizerConfig(learning_rate=1e-3), training=settings)


def learner_of(name: Any, training: dict[str, Any], width: int, *, compiled: bool = False) -> TrainState:
    """napkin's side, with the forms that a run would choose."""
    precision = Precision(name, "cpu")
    recipe = choose_kernels(recipe_of(name, width, **training), precision, ThisMachine())
    return build_train_state(ResolvedRecipe(recipe, precision), compiled=compiled)


def train_with_transformers(width: int, steps: int) -> None:
    """GPT-2 by transformers, trained by its Trainer in bf16 with the fused optimizer; a step a turn."""
    import tempfile

    import transformers  # pyright: ignore[reportMissingImports]

    tokens, _ = batch()
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=LENGTH, n_embd=width, n_layer=N_LAYERS, n_head=width // 64,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in tokens] * steps

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _say(time.perf_counter() - self.begin)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def alone() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _say(record(model, alone, warm_up=1).peak_bytes)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=BATCH_SIZE, max_steps=steps, bf16=True, use_cpu=True,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Turns()]).train()  # pyright: ignore


if __name__ == "__main__":
    main()
