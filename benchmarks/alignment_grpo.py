"""A step of GRPO: answers, rewards and an update, by napkin beside TRL's GRPOTrainer.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 2,048. A step has 8 prompts of
16 tokens and 8 answers to each, of 32 tokens, none of them ended early; the reward is the share of even tokens. Both
take one update of all answers, in fp32. Each contender is a process of its own. Seconds are the median of the steps
after the first three; peak bytes are those of tensors in one step, as `napkin.accounting.recording` watches them, the
same for both; RSS is the most that the process has had, with all that it imports.

    python benchmarks/alignment_grpo.py                          # some two minutes on two quiet cores
    PYTHONPATH=FOLDER python benchmarks/alignment_grpo.py        # FOLDER has trl, transformers, accelerate, datasets

The table is also written to benchmarks/results/.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napkin.accounting.recording import recording
from napkin.alignment.environments.environment import Outcome, Task, ask
from napkin.alignment.reinforcement_step import ReinforcementSettings, learn_from_answers
from napkin.alignment.token_sequence import TokenSequence, sequence_of
from napkin.hardware.host import detect_host
from napkin.hardware.malloc import keep_freed_memory
from napkin.inference.chat_format import Message
from napkin.model.config import ModelConfig
from napkin.model.huggingface.convert import load_huggingface_into, read_huggingface_config, save_huggingface
from napkin.model.transformer import Transformer
from napkin.planning.kernel_choice import choose_kernels
from napkin.recipe.optimizer_config import OptimizerConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.reinforcement_config import ReinforcementConfig
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.units import format_bytes
from result_files import write_result

MODEL = ModelConfig(vocab_size=2048, context_length=128, d_model=256, n_layers=4, n_heads=4)
N_PROMPTS, GROUP, PROMPT, ANSWER = 8, 8, 16, 32
LEARNING_RATE = 1e-5
WARM_UP = 3
NEEDED = ("trl", "transformers", "accelerate", "datasets")


def main() -> None:
    """Run the contenders one after the other; print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        name, folder = options.worker
        train = train_with_trl if name == "TRL" else train_with_napkin
        seconds, peak = train(Path(folder), options.steps)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("answer " + json.dumps({"seconds": statistics.median(seconds[WARM_UP:]), "peak": peak, "rss": rss}))
        sys.stdout.flush()
        os._exit(0)
    missing = [name for name in NEEDED if find_spec(name) is None]
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(Transformer(MODEL), Path(folder) / "model")
        found = {
            name: run_worker(name, folder, options.threads, options.steps)
            for name in ["napkin", *([] if missing else ["TRL"])]
        }
    lines = table(found, options.threads)
    if missing:
        lines.append(f"\n{', '.join(missing)} not installed: TRL is left out")
    print("\n".join(lines))
    write_result("alignment-grpo", lines)


def run_worker(name: str, folder: str, threads: int, steps: int) -> dict[str, float]:
    """The figures of a contender, from a process of its own."""
    command = [sys.executable, sys.argv[0], "--threads", str(threads), "--steps", str(steps), "--worker", name, folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    if not answers:
        raise SystemExit(f"{name} has ended before it was done: its own message is above")
    return json.loads(answers[-1].removeprefix("answer "))


def table(found: dict[str, dict[str, float]], threads: int) -> list[str]:
    """The figures, each beside TRL's."""
    n_tokens = N_PROMPTS * GROUP * ANSWER
    lines = [
        f"# GRPO beside TRL: {detect_host().cpu_name}, {threads} threads, {datetime.now(UTC):%Y-%m-%d %H:%M}, "
        f"torch {torch.__version__}, Python {platform.python_version()}",
        "",
        "| who | seconds per step | generated tokens/s | × TRL | peak bytes of tensors | / TRL | most RSS |",
        "|---|---|---|---|---|---|---|",
    ]
    trl = found.get("TRL")
    for name, each in found.items():
        faster = "" if trl is None else f"{trl['seconds'] / each['seconds']:.2f}"
        leaner = "" if trl is None else f"{each['peak'] / trl['peak']:.2f}"
        lines.append(
            f"| {name} | {each['seconds']:.3f} | {n_tokens / each['seconds']:,.0f} | {faster} | "
            f"{format_bytes(each['peak'])} | {leaner} | {format_bytes(each['rss'])} |"
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


def train_with_napkin(folder: Path, steps: int) -> tuple[list[float], int]:
    """Seconds of each step, and the peak bytes of one."""
    keep_freed_memory()
    recipe = Recipe(
        model=read_huggingface_config(folder / "model"),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=0, weight_decay=0.0).resolved,
        training=TrainingConfig(batch_size=N_PROMPTS, precision="fp32", device="cpu"),
    )
    precision = Precision("fp32", "cpu")
    state = build_train_state(ResolvedRecipe(choose_kernels(recipe, precision), precision))
    load_huggingface_into(state.model, folder / "model")
    config = ReinforcementConfig(group_size=GROUP, max_answer=ANSWER)
    settings = ReinforcementSettings(config, EvenTokens(), Words(), 4096)
    seconds: list[float] = []
    peaks: list[int] = []
    for number in range(WARM_UP + steps):
        watch = contextlib.ExitStack()
        if number == WARM_UP - 1:
            watch.enter_context(recording(state.model, lambda ledger, _: peaks.append(ledger.peak_bytes)))
        begin = time.perf_counter()
        with watch:
            learn_from_answers(state, number, range(N_PROMPTS), settings)
        seconds.append(time.perf_counter() - begin)
    return seconds, peaks[0]


def train_with_trl(folder: Path, steps: int) -> tuple[list[float], int]:
    """The same by TRL's trainer."""
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
        max_completion_length=ANSWER, max_steps=WARM_UP + steps, learning_rate=LEARNING_RATE, beta=0.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, loss_type="grpo",
        generation_kwargs={"min_new_tokens": ANSWER},
    )  # fmt: skip
    seconds: list[float] = []
    peaks: list[int] = []

    class Timed(transformers.TrainerCallback):
        """Times each step, and watches one."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.watch = contextlib.ExitStack()
            if len(seconds) == WARM_UP - 1:
                self.watch.enter_context(recording(model, lambda ledger, _: peaks.append(ledger.peak_bytes)))
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)
            self.watch.close()

    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [reward_of(each) for each in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": Words().decode(each)} for each in prompts()]),
        processing_class=tokenizer,
    )
    trainer.add_callback(Timed())
    trainer.train()
    return seconds, peaks[0]


if __name__ == "__main__":
    main()
