"""Steps of tuning beside those of a trainer of TRL: what the scripts share that differ in the trainer.

One model in one folder. Each contender is a process of its own, which loads it and says its first loss and the peak
bytes of the tensors of a step; then they take their steps in turns (`peer_processes`).
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

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
from napkin.train_step.step import TrainState, build_train_state
from napkin.units import format_bytes
from peer_processes import Step, Worker, seconds_in_turns, serve, serve_trainer
from result_files import heading, write_result
from turns import BRACKETS, Samples, fastest, ratio_spread, spread

NEEDED = ("trl", "transformers", "accelerate", "datasets")
FORMATS = ("fp32", "bf16")
Napkin = Callable[[Path], tuple[torch.nn.Module, Step]]
"""Makes napkin's model and step, of the model in a folder."""
Trl = Callable[[Path], tuple[Any, torch.nn.Module]]
"""Makes TRL's trainer and its model."""


def compare(
    about: str | None,
    title: str,
    model: ModelConfig,
    contenders: tuple[Mapping[str, Napkin], Mapping[str, Trl]],
    n_tokens: int,
) -> None:
    """Take the options, run napkin's contenders and TRL's in turns, print the table and keep it; `n_tokens` of a step
    are counted. The names of contenders have the format in them in which they compute."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="steps that each contender takes")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    ours, trl = contenders
    torch.set_num_threads(options.threads)
    if options.worker:
        name, folder = options.worker[0], Path(options.worker[1])
        if name in ours:
            serve(*ours[name](folder))
        else:
            _be_quiet()
            serve_trainer(*trl[name](folder))
        return
    missing = [name for name in NEEDED if find_spec(name) is None]
    names = [name for name in [*ours, *([] if missing else trl)] if any(each in name for each in options.formats)]
    head = heading(title, BRACKETS, packages=NEEDED)
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(Transformer(model), Path(folder) / "model")
        workers = {name: Worker(name, folder, threads=options.threads) for name in names}
        seconds = seconds_in_turns(workers, options.rounds)
    lines = _table(workers, seconds, [*trl], n_tokens)
    if missing:
        lines += ["", f"{', '.join(missing)} not installed: TRL is left out"]
    print("\n".join(lines))
    write_result(Path(sys.argv[0]).stem.replace("_", "-"), [*head, *lines])


def in_micro_batches(step: Callable[[str, int, Path], tuple[torch.nn.Module, Step]]) -> dict[str, Napkin]:
    """napkin's contenders in each format, with the whole batch at once and in micro-batches. `step` takes a format, the
    most tokens of a micro-batch and the model's folder."""
    sizes = {"": 4096, ", micro-batches of 1,024 tokens": 1024}
    return {f"napkin {each}{size}": partial(step, each, n) for each in FORMATS for size, n in sizes.items()}


def _table(workers: dict[str, Worker], seconds: Samples, trl: list[str], n_tokens: int) -> list[str]:
    """The figures, each beside the best of TRL in the same format."""
    lines = [
        "| who | first loss | seconds per step | tokens/s | × TRL, fastest in its format | peak bytes of tensors | "
        "/ TRL, leanest in it | most RSS |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, worker in workers.items():
        rivals = [each for each in trl if each in seconds and ("bf16" in each) == ("bf16" in name)]
        faster = ratio_spread(seconds[fastest(seconds, rivals)], seconds[name]) if rivals else ""
        leaner = f"{worker.peak_bytes / min(workers[each].peak_bytes for each in rivals):.2f}" if rivals else ""
        tokens = spread([n_tokens / each for each in seconds[name]], "{:,.0f}".format)
        loss = round(worker.loss, 4) + 0.0  # never minus zero: the first loss of GRPO is zero
        lines.append(
            f"| {name} | {loss:.4f} | {spread(seconds[name], '{:.3f}'.format)} | {tokens} | {faster} | "
            f"{format_bytes(worker.peak_bytes)} | {leaner} | {format_bytes(worker.most_rss)} |"
        )
    return lines


def napkin_state(folder: Path, precision: Any, *, batch_size: int, learning_rate: float) -> TrainState:
    """napkin's state of the model in a folder, with the forms that a run would choose."""
    keep_freed_memory()
    chosen = Precision(precision, "cpu")
    recipe = Recipe(
        model=read_huggingface_config(folder / "model"),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=0, weight_decay=0.0).resolved,
        training=TrainingConfig(batch_size=batch_size, precision=precision, device="cpu"),
    )
    state = build_train_state(ResolvedRecipe(choose_kernels(recipe, chosen, ThisMachine()), chosen))
    load_huggingface_into(state.model, folder / "model")
    return state


def trainer_of(
    name: str, folder: Path, rows: list[dict[str, Any]], vocab_size: int, settings: dict[str, Any], **more: Any
) -> tuple[Any, torch.nn.Module]:
    """TRL's trainer NAMETrainer, with NAMEConfig of the settings, of the model in a folder; token i is the word w
    followed by i, w1 is padding and w2 ends a text."""
    import datasets  # pyright: ignore[reportMissingImports]
    import tokenizers  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(vocab_size)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = getattr(trl, f"{name}Config")(
        str(folder / "trl"), max_steps=1000, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    data = datasets.Dataset.from_list(rows)
    make = partial(getattr(trl, f"{name}Trainer"), model, args=arguments, train_dataset=data)
    return make(processing_class=tokenizer, **more), model


def _be_quiet() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
