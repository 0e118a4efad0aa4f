"""Tokens/s and peak memory of a training step: napkin beside a plain loop, fp32 and bf16, and transformers' Trainer.

One model for all, GPT-2's shape: 4 layers, context 256, batch 16, vocabulary 8,192, widths 256 and 512. Each contender
is a separate process, so that the allocator settings of one do not affect another; they take their steps in turns, so
that a busy minute hits all of them. The bf16 peak is the best of 2048³ products in the same rounds. Peak bytes are
those of tensors in an eager step, as `napkin.accounting.recording` watches them.

    .venv-peers/bin/python benchmarks/training.py             # some ten minutes on two quiet cores
    python benchmarks/training.py --no-compiled --widths 256 --rounds 5
    python benchmarks/training.py --widths 512 --rounds 5 --only "napkin bf16" "plain bf16 loop, compiled"
    python benchmarks/training.py --trainer-python .venv-peers/bin/python   # the Trainer alone in another environment

The table is also written to benchmarks/results/.
"""

import argparse
import statistics
import sys
import tempfile
from importlib.util import find_spec
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
from peer_processes import Step, Worker, seconds_in_turns, serve, serve_trainer
from plain_models import PlainGPT2
from result_files import heading, write_result
from turns import BRACKETS, fastest, ratio_spread, spread

VOCAB_SIZE, LENGTH, BATCH_SIZE, N_LAYERS = 8192, 256, 16, 4

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
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these contenders alone, with the plain loops")
    parser.add_argument("--trainer-python", help="Python of a venv that has transformers and accelerate")
    parser.add_argument("--worker", nargs=3, metavar=("NAME", "WIDTH", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, width, folder = options.worker
        work(name, int(width), folder, options.threads)
        return
    torch.set_num_threads(options.threads)
    lines = heading("Training beside its peers", BRACKETS, packages=["transformers", "accelerate"])
    for width in options.widths:
        lines += (table := compare(width, options))
        print("\n".join(table), flush=True)
    write_result("training-cpu", lines)


def compare(width: int, options: argparse.Namespace) -> list[str]:
    """A table for one width."""
    names = [*OURS, *LOOPS, PEAK]
    if options.no_compiled:
        names = [name for name in names if COMPILED not in name]
    else:
        names.insert(-1, LOOPS[1] + COMPILED)
    if options.trainer_python or (find_spec("transformers") and find_spec("accelerate")):
        names.insert(-1, TRAINER)
    if options.only is not None:
        names = [name for name in names if name in (*LOOPS, PEAK, *options.only)]
    pythons = {TRAINER: options.trainer_python or sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            name: Worker(name, str(width), folder, threads=options.threads, python=pythons.get(name, sys.executable))
            for name in names
        }
        seconds = seconds_in_turns(workers, options.rounds)
    peaks = {name: worker.peak_bytes for name, worker in workers.items()}
    flops = count_step(ResolvedRecipe(recipe_of("fp32", width), Precision("fp32", "cpu"))).flops
    best_rate = 2 * 2048**3 / min(seconds.pop(PEAK))
    loops = [name for name in seconds if name not in OURS]
    rivals = [name for name in loops if name != LOOPS[0]]
    against, leanest = seconds[fastest(seconds, rivals)], min(peaks[name] for name in loops)
    lines = [
        f"## d {width}: {flops / 1e9:.1f} GFLOP per step; bf16 products at most {best_rate / 1e9:.0f} GFLOP/s\n",
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


def work(name: str, width: int, folder: str, threads: int) -> None:
    """The other side of a `Worker`."""
    torch.set_num_threads(threads)
    if name == TRAINER:
        serve_trainer(*trainer_of(width, folder))
    elif COMPILED in name:
        # Operators can be watched where there are any: without a compiler.
        peak_bytes = record(*contender(name.removesuffix(COMPILED), width), warm_up=1).peak_bytes
        serve(*contender(name, width), peak_bytes)
    else:
        serve(*contender(name, width))


def contender(name: str, width: int) -> tuple[nn.Module, Step]:
    """A model and its step."""
    if name == PEAK:
        product = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        inputs = torch.randn(2048, 2048).bfloat16()
        return product, lambda: float(product(inputs)[0, 0])
    tokens, targets = batch()
    if name in OURS:
        keep_freed_memory()
        train_state = learner_of(*OURS[name], width, compiled=COMPILED in name)
        numbers = iter(range(10**9))
        return train_state.model, lambda: train_state.step(next(numbers), tokens, targets)[0].item()
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


def trainer_of(width: int, folder: str) -> tuple[Any, nn.Module]:
    """transformers' Trainer of its GPT-2, in bf16 with the fused optimizer."""
    import transformers  # pyright: ignore[reportMissingImports]

    tokens, _ = batch()
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=LENGTH, n_embd=width, n_layer=N_LAYERS, n_head=width // 64,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=BATCH_SIZE, max_steps=1000, bf16=True, use_cpu=True,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens] * 1000
    return transformers.Trainer(model, arguments, train_dataset=rows), model  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
