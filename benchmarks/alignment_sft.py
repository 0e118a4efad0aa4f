"""Tokens/s and peak memory of a step of supervised fine-tuning: napkin beside TRL's SFTTrainer.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 8,192; one batch of 16
sequences of 150 tokens in the middle, of which the last half counts. Each contender is a process of its own; they take
their steps in turns. Peak bytes are those of tensors in a step, as
`napkin.accounting.recording` watches them, the same for all; RSS is the most that the process has had, with all that
it imports. Tokens are those of the sequences, padding left out. The first losses say that all compute the same.

    python benchmarks/alignment_sft.py                          # some three minutes on two quiet cores
    PYTHONPATH=FOLDER python benchmarks/alignment_sft.py        # with trl, transformers, accelerate, datasets in FOLDER

The table is also written to benchmarks/results/.
"""

import argparse
import logging
import os
import platform
import tempfile
import warnings
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napkin.chats.token_sequence import Example, sequence_of
from napkin.hardware.host import detect_host, keep_freed_memory
from napkin.model.config import ModelConfig
from napkin.model.huggingface.convert import load_huggingface_into, read_huggingface_config, save_huggingface
from napkin.model.transformer import Transformer
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.sequence_step import train_on_examples
from napkin.units import format_bytes
from peer_processes import Step, Worker, seconds_in_turns, serve, serve_trainer
from result_files import write_result
from turns import BRACKETS, Samples, fastest, ratio_spread, spread

MODEL = ModelConfig(vocab_size=8192, context_length=512, d_model=256, n_layers=4, n_heads=4)
N_SEQUENCES = 16
LEARNING_RATE = 2e-5

OURS: dict[str, tuple[Any, int]] = {
    "napkin fp32": ("fp32", 4096),
    "napkin fp32, micro-batches of 1,024 tokens": ("fp32", 1024),
    "napkin bf16": ("bf16", 4096),
    "napkin bf16, micro-batches of 1,024 tokens": ("bf16", 1024),
}
TRL: dict[str, tuple[bool, bool]] = {
    "TRL fp32": (False, False),
    "TRL bf16": (True, False),
    "TRL bf16, checkpointed (its default)": (True, True),
}
"""Whether it is in bf16, and whether blocks are computed again in the backward pass."""
NEEDED = ("trl", "transformers", "accelerate", "datasets")


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        name, folder = options.worker
        if name in TRL:
            train_with_trl(*TRL[name], Path(folder))
        else:
            serve(*napkin_step(*OURS[name], Path(folder)))
        return
    missing = [name for name in NEEDED if find_spec(name) is None]
    names = [*OURS, *([] if missing else TRL)]
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(Transformer(MODEL), Path(folder) / "model")
        workers = {name: Worker(name, folder, options.threads) for name in names}
        seconds = seconds_in_turns(workers, options.rounds)
    lines = table(workers, seconds, options.threads)
    if missing:
        lines.append(f"\n{', '.join(missing)} not installed: TRL is left out")
    print("\n".join(lines))
    write_result("alignment-sft", lines)


def table(workers: dict[str, Worker], seconds: Samples, threads: int) -> list[str]:
    """The figures, each beside the best of TRL in the same format."""
    n_tokens = sum(len(sequence.tokens) for (sequence,) in batch())
    lines = [
        f"# Supervised fine-tuning beside TRL: {detect_host().cpu_name}, {threads} threads, "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M}, torch {torch.__version__}, Python {platform.python_version()}",
        "",
        BRACKETS,
        "",
        "| who | first loss | tokens/s | × TRL, fastest in its format | peak bytes of tensors | / TRL, leanest in it | "
        "most RSS |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, worker in workers.items():
        rivals = [each for each in TRL if each in seconds and ("bf16" in each) == ("bf16" in name)]
        faster = ratio_spread(seconds[fastest(seconds, rivals)], seconds[name]) if rivals else ""
        leaner = f"{worker.peak_bytes / min(workers[each].peak_bytes for each in rivals):.2f}" if rivals else ""
        tokens = spread([n_tokens / each for each in seconds[name]], "{:,.0f}".format)
        lines.append(
            f"| {name} | {worker.loss:.4f} | {tokens} | {faster} | "
            f"{format_bytes(worker.peak_bytes)} | {leaner} | {format_bytes(worker.most_rss)} |"
        )
    return lines


def batch() -> list[Example]:
    """The sequences that all train on."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(150), 0.5, N_SEQUENCES)), 8, MODEL.context_length).astype(int)
    tokens = [draw.integers(3, MODEL.vocab_size, length).tolist() for length in lengths]
    return [(sequence_of(each[: len(each) // 2], each[len(each) // 2 :]),) for each in tokens]


def napkin_step(precision: Any, max_tokens: int, folder: Path) -> tuple[torch.nn.Module, Step]:
    """napkin's model and its step, with the forms that a run would choose."""
    keep_freed_memory()
    chosen = Precision(precision, "cpu")
    recipe = Recipe(
        model=read_huggingface_config(folder / "model"),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0, weight_decay=0.0).resolved,
        training=TrainingConfig(batch_size=N_SEQUENCES, precision=precision, device="cpu"),
    )
    train_state = build_train_state(ResolvedRecipe(choose_kernels(recipe, chosen, ThisMachine()), chosen))
    load_huggingface_into(train_state.model, folder / "model")
    examples, objective, numbers = batch(), SupervisedObjective(), iter(range(10**9))
    return (
        train_state.model,
        lambda: train_on_examples(train_state, next(numbers), examples, objective, max_tokens=max_tokens).loss,
    )


def train_with_trl(bf16: bool, checkpointed: bool, folder: Path) -> None:
    """A run of TRL's trainer, which waits before each step to be told."""
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import datasets  # pyright: ignore[reportMissingImports]
    import tokenizers  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(MODEL.vocab_size)}, "w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    rows = [
        {"input_ids": sequence.tokens.tolist(), "completion_mask": sequence.loss_mask.astype(int).tolist()}
        for (sequence,) in batch()
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = trl.SFTConfig(
        str(folder / "trl"), per_device_train_batch_size=N_SEQUENCES, max_steps=1000, bf16=bf16, use_cpu=True,
        gradient_checkpointing=checkpointed, learning_rate=LEARNING_RATE, completion_only_loss=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, max_length=None,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    serve_trainer(trainer, model)


if __name__ == "__main__":
    main()
