"""A step of GRPO: answers, rewards and an update, by napkin beside TRL's GRPOTrainer, in fp32 and in bf16.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 2,048. A step has 8 prompts of
16 tokens and 8 answers to each, of 32 tokens, none of them ended early; the reward is the share of even tokens. All
take one update of all answers; bf16 is autocast over weights in fp32, for answers and for updates. Each contender is a
process of its own; they take their steps in turns. Peak bytes are those of
tensors in one step, as `napkin.accounting.recording` watches them, the same for all; RSS is the most that the process
has had, with all that it imports.

    python benchmarks/alignment_grpo.py --formats fp32           # a minute on two quiet cores; without it both formats
    PYTHONPATH=FOLDER python benchmarks/alignment_grpo.py        # FOLDER has trl, transformers, accelerate, datasets

The table is also written to benchmarks/results/.
"""

import argparse
import itertools
import logging
import os
import platform
import tempfile
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from napkin.chats.chat_format import Message
from napkin.chats.token_sequence import TokenSequence, sequence_of
from napkin.environments.environment import Outcome, Task, ask
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
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.train_step.step import build_train_state
from napkin.tuning.reinforcement_step import ReinforcementSettings, train_on_rollouts
from napkin.units import format_bytes
from peer_processes import Step, Worker, seconds_in_turns, serve, serve_trainer
from result_files import write_result
from turns import BRACKETS, Samples, ratio_spread, spread

MODEL = ModelConfig(vocab_size=2048, context_length=128, d_model=256, n_layers=4, n_heads=4)
N_PROMPTS, GROUP, PROMPT, ANSWER = 8, 8, 16, 32
LEARNING_RATE = 1e-5
FORMATS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
NEEDED = ("trl", "transformers", "accelerate", "datasets")


def main() -> None:
    """Run the contenders in turns; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        (who, products), folder = options.worker[0].split(), Path(options.worker[1])
        if who == "TRL":
            train_with_trl(folder, bf16=products == "bf16")
        else:
            serve(*napkin_step(folder, "bf16" if products == "bf16" else "fp32"))
        return
    missing = [name for name in NEEDED if find_spec(name) is None]
    names = [f"{who} {products}" for products in options.formats for who in ("napkin", *([] if missing else ["TRL"]))]
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(Transformer(MODEL), Path(folder) / "model")
        workers = {name: Worker(name, folder, options.threads) for name in names}
        seconds = seconds_in_turns(workers, options.rounds)
    lines = table(workers, seconds, options.threads)
    if missing:
        lines.append(f"\n{', '.join(missing)} not installed: TRL is left out")
    print("\n".join(lines))
    write_result("alignment-grpo", lines)


def table(workers: dict[str, Worker], seconds: Samples, threads: int) -> list[str]:
    """The figures, each beside TRL's in the same format."""
    n_tokens = N_PROMPTS * GROUP * ANSWER
    lines = [
        f"# GRPO beside TRL: {detect_host().cpu_name}, {threads} threads, {datetime.now(UTC):%Y-%m-%d %H:%M}, "
        f"torch {torch.__version__}, Python {platform.python_version()}",
        "",
        BRACKETS,
        "",
        "| who | seconds per step | generated tokens/s | × TRL | peak bytes of tensors | / TRL | most RSS |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, worker in workers.items():
        rival = f"TRL {name.split()[1]}"
        faster = ratio_spread(seconds[rival], seconds[name]) if rival in seconds else ""
        leaner = f"{worker.peak_bytes / workers[rival].peak_bytes:.2f}" if rival in seconds else ""
        tokens = spread([n_tokens / each for each in seconds[name]], "{:,.0f}".format)
        lines.append(
            f"| {name} | {spread(seconds[name], '{:.3f}'.format)} | {tokens} | {faster} | "
            f"{format_bytes(worker.peak_bytes)} | {leaner} | {format_bytes(worker.most_rss)} |"
        )
    return lines


def prompts() -> list[list[int]]:
    """Those of every step."""
    return np.random.default_rng(0).integers(3, MODEL.vocab_size, (N_PROMPTS, PROMPT)).tolist()


class Words:
    """Token i is the word w followed by i; nothing ends an answer."""

    stop_ids: tuple[int, ...] = ()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the words."""
        return [int(word[1:]) for word in messages[-1].content.split()]

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        """A prompt and its answer."""
        return sequence_of(self.prompt(messages[:1]), self.prompt(messages[1:]))

    def decode(self, ids: Sequence[int]) -> str:
        """The words."""
        return " ".join(f"w{each}" for each in ids)


class EvenTokens:
    """Rewards the share of even tokens."""

    def __init__(self) -> None:
        self.prompts, self.started = prompts(), 0

    def start(self, seed: int) -> Task:
        """One prompt after the other."""
        self.started += 1
        return ask(Words().decode(self.prompts[self.started % N_PROMPTS]))

    def step(self, state: Any, answer: str) -> Outcome:
        """Of the answer."""
        return Outcome(reward_of(answer))


def reward_of(answer: str) -> float:
    """The share of even tokens."""
    return sum(int(word[1:]) % 2 == 0 for word in answer.split()) / ANSWER


def napkin_step(folder: Path, products: Literal["fp32", "bf16"]) -> tuple[torch.nn.Module, Step]:
    """napkin's model and its step, with the forms that a run would choose."""
    keep_freed_memory()
    recipe = Recipe(
        model=read_huggingface_config(folder / "model"),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0, weight_decay=0.0).resolved,
        training=TrainingConfig(batch_size=N_PROMPTS, precision=products, device="cpu"),
    )
    precision = Precision(products, "cpu")
    state = build_train_state(ResolvedRecipe(choose_kernels(recipe, precision, ThisMachine()), precision))
    load_huggingface_into(state.model, folder / "model")
    config = ReinforcementConfig(group_size=GROUP, max_answer=ANSWER)
    settings, numbers = ReinforcementSettings(config, EvenTokens(), Words(), 4096), itertools.count()
    return state.model, lambda: train_on_rollouts(state, next(numbers), range(N_PROMPTS), settings).loss


def train_with_trl(folder: Path, *, bf16: bool) -> None:
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
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = trl.GRPOConfig(
        str(folder / "trl"), per_device_train_batch_size=N_PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=ANSWER, max_steps=1000, learning_rate=LEARNING_RATE, beta=0.0,
        use_cpu=True, bf16=bf16, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, loss_type="grpo",
        generation_kwargs={"min_new_tokens": ANSWER},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [reward_of(each) for each in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": Words().decode(each)} for each in prompts()]),
        processing_class=tokenizer,
    )
    serve_trainer(trainer, model)


if __name__ == "__main__":
    main()
