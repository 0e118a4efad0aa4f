"""Tokens/s and peak memory of a step of DPO: napkin beside TRL's DPOTrainer.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 8,192; one batch of 8 pairs of
sequences of 150 tokens in the middle, of which the last half is the answer. The reference's log-probabilities are
computed before the steps by all: by napkin always, by TRL where it is asked to; TRL's own default holds the reference's
model, and computes it in each step. Each contender is a process of its own; they take their steps in turns.
Peak bytes are those of tensors in a step, as `napkin.accounting.recording` watches them, the
same for all; RSS is the most that the process has had, with all that it imports. Tokens are those of the sequences,
padding left out. The first losses say that all compute the same: log 2, since the model is its reference.

    python benchmarks/alignment_dpo.py                          # some three minutes on two quiet cores
    PYTHONPATH=FOLDER python benchmarks/alignment_dpo.py        # with trl, transformers, accelerate, datasets in FOLDER

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
from napkin.recipe.tuning_recipe import PreferenceConfig
from napkin.train_step.step import build_train_state
from napkin.tuning.preferences import preference_objective
from napkin.tuning.sequence_step import REFERENCE, score_examples, train_on_examples
from napkin.units import format_bytes
from peer_processes import Step, Worker, seconds_in_turns, serve, serve_trainer
from result_files import write_result
from turns import BRACKETS, Samples, fastest, ratio_spread, spread

MODEL = ModelConfig(vocab_size=8192, context_length=512, d_model=256, n_layers=4, n_heads=4)
N_PAIRS = 8
LEARNING_RATE = 1e-6

OURS: dict[str, tuple[Any, int]] = {
    "napkin fp32": ("fp32", 4096),
    "napkin fp32, micro-batches of 1,024 tokens": ("fp32", 1024),
    "napkin bf16": ("bf16", 4096),
    "napkin bf16, micro-batches of 1,024 tokens": ("bf16", 1024),
}
TRL: dict[str, tuple[bool, bool, bool]] = {
    "TRL fp32, reference computed before": (False, False, True),
    "TRL fp32": (False, False, False),
    "TRL bf16, reference computed before": (True, False, True),
    "TRL bf16, checkpointed (its default)": (True, True, False),
}
"""Whether it is in bf16, whether blocks are computed again in the backward pass, and whether the reference is computed
before the steps."""
NEEDED = ("trl", "transformers", "accelerate", "datasets")


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--formats", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
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
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(Transformer(MODEL), Path(folder) / "model")
        chosen = [name for name in [*OURS, *([] if missing else TRL)] if any(each in name for each in options.formats)]
        workers = {name: Worker(name, folder, options.threads) for name in chosen}
        seconds = seconds_in_turns(workers, options.rounds)
    lines = table(workers, seconds, options.threads)
    if missing:
        lines.append(f"\n{', '.join(missing)} not installed: TRL is left out")
    print("\n".join(lines))
    write_result("alignment-dpo", lines)


def table(workers: dict[str, Worker], seconds: Samples, threads: int) -> list[str]:
    """The figures, each beside the best of TRL in the same format."""
    n_tokens = sum(len(sequence.tokens) for pair in batch() for sequence in pair)
    lines = [
        f"# DPO beside TRL: {detect_host().cpu_name}, {threads} threads, {datetime.now(UTC):%Y-%m-%d %H:%M}, "
        f"torch {torch.__version__}, Python {platform.python_version()}",
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
    """The pairs that all train on."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(np.log(150), 0.5, N_PAIRS)), 8, MODEL.context_length // 2).astype(int)

    def tokens(n: int) -> list[int]:
        return draw.integers(3, MODEL.vocab_size, n).tolist()

    examples: list[Example] = []
    for length in lengths:
        prompt = tokens(length // 2)
        examples.append(tuple(sequence_of(prompt, tokens(int(length * factor) // 2)) for factor in (1.0, 0.8)))
    return examples


def napkin_step(precision: Any, max_tokens: int, folder: Path) -> tuple[torch.nn.Module, Step]:
    """napkin's model and its step, with the forms that a run would choose."""
    keep_freed_memory()
    chosen = Precision(precision, "cpu")
    recipe = Recipe(
        model=read_huggingface_config(folder / "model"),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0, weight_decay=0.0).resolved,
        training=TrainingConfig(batch_size=N_PAIRS, precision=precision, device="cpu"),
    )
    state = build_train_state(ResolvedRecipe(choose_kernels(recipe, chosen, ThisMachine()), chosen))
    load_huggingface_into(state.model, folder / "model")
    pairs = batch()
    scores = score_examples(state.parallel_model, pairs, max_tokens=max_tokens, autocast=chosen.autocast)
    examples: list[Example] = [
        tuple(
            sequence.with_values(**{REFERENCE: found.log_probabilities})
            for sequence, found in zip(pair, each, strict=True)
        )
        for pair, each in zip(pairs, scores, strict=True)
    ]
    objective, numbers = preference_objective(PreferenceConfig("dpo")), iter(range(10**9))
    return state.model, lambda: train_on_examples(state, next(numbers), examples, objective, max_tokens=max_tokens).loss


def train_with_trl(bf16: bool, checkpointed: bool, before: bool, folder: Path) -> None:
    """A run of TRL's trainer, which waits before each step to be told."""
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import datasets  # pyright: ignore[reportMissingImports]
    import tokenizers  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(MODEL.vocab_size)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")

    def text(tokens: np.ndarray) -> str:
        return "".join(f"w{each} " for each in tokens)

    # TRL ends answers itself, with w2: the last token of each is left to it.
    rows = [
        {
            "prompt": text(chosen.tokens[~chosen.loss_mask]),
            "chosen": text(chosen.tokens[chosen.loss_mask][:-1]),
            "rejected": text(rejected.tokens[rejected.loss_mask][:-1]),
        }
        for chosen, rejected in batch()
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = trl.DPOConfig(
        str(folder / "trl"), per_device_train_batch_size=N_PAIRS, max_steps=1000, bf16=bf16, use_cpu=True,
        gradient_checkpointing=checkpointed, learning_rate=LEARNING_RATE, beta=0.1, report_to=[], max_length=None,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        precompute_ref_log_probs=before,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    serve_trainer(trainer, model)


if __name__ == "__main__":
    main()
