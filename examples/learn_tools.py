"""A small model learns by rewards to call a calculator: a few minutes on two cores, from nothing.

The task is the product of two numbers of two digits, which a model of 0.4 million parameters does not know. It is
first taught by conversations of which a fifth call the calculator; the others answer with a number by chance.
Then GRPO rewards right answers alone: nothing says how to get them, and only a call does. Products that are asked in
the evaluation are in no conversation and no prompt of the training.

    python examples/learn_tools.py                   # runs/tools: taught, then rewarded
    python examples/learn_tools.py --folder elsewhere --taught-steps 600 --rewarded-steps 30
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from napkin.environments import environment_named
from napkin.files import atomic_write_text
from napkin.model import ModelConfig, Transformer, save_huggingface
from napkin.model.huggingface import TextForm
from napkin.recipe import (
    OptimizerConfig,
    ReinforcementConfig,
    ReinforcementRecipe,
    TrainingConfig,
    TuningConfig,
    TuningRecipe,
)
from napkin.runs import read_metrics
from napkin.tokenizer import train_bpe
from napkin.tuning import tune

ENVIRONMENT = '''"""Products of two numbers from 32 to 99: four digits."""

from napkin.environments import Outcome, ask


class Products:
    one_turn = True

    def start(self, seed):
        first, second = 32 + seed % 68, 32 + seed // 68 % 68
        return ask(f"{first}*{second}=", first * second, content=f"{first}*{second}")

    def step(self, product, answer):
        return Outcome(float(answer.strip() == str(product)))

    def solution(self, product):
        return str(product)
'''
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("user", "assistant", "tool")
CALLS = 0.2
"""The share of taught conversations with a call."""


def conversations(environment: str, n: int, *, held_out: bool) -> list[str]:
    """Lines of JSON: of each product, a call with the tool's output and the answer, or a number drawn by chance."""
    draw = random.Random(int(held_out))
    tasks = environment_named(environment, held_out=held_out)
    lines = []
    for seed in range(n):
        task = tasks.start(seed)
        question, product = task.messages[-1].content, str(task.state)
        said = [("user", question)]
        if draw.random() < CALLS:
            said += [("assistant", f"<calculator>{question[:-1]}</calculator>"), ("tool", product)]
            said.append(("assistant", product))
        else:
            said.append(("assistant", str(draw.randrange(1024, 2000))))
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    return lines


def make_start(folder: Path) -> Path:
    """An untrained model that knows the tags of a call as tokens, with its chat template."""
    special = ["<|end|>", *(f"<|{role}|>" for role in ROLES)]
    # The tags alone are learned: digits stay tokens of their own.
    tokenizer = train_bpe(["<calculator></calculator>"], 280, special)
    config = ModelConfig(tokenizer.vocab_size, context_length=64, d_model=128, n_layers=2, n_heads=4)
    form = TextForm([], ["<|end|>"], TEMPLATE)
    save_huggingface(Transformer(config), folder / "start", tokenizer=tokenizer, form=form)
    return folder / "start"


def taught(folder: Path, steps: int) -> Path:
    """The run that learns from conversations."""
    recipe = TuningRecipe(
        data=replace(TuningRecipe().data, train=str(folder / "train.jsonl"), validation=str(folder / "held_out.jsonl")),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        training=TrainingConfig(
            steps=steps, batch_size=64, precision="fp32", evaluate_every=steps, checkpoint_every=steps
        ),
        tuning=TuningConfig(method="sft", start=str(folder / "start")),
    )
    tune(recipe, folder / "taught")
    return folder / "taught"


def rewarded(folder: Path, start: Path, steps: int) -> Path:
    """The run that learns from rewards, by GRPO."""
    rl = ReinforcementConfig(
        environment=f"{folder / 'products.py'}:Products",
        tools="calculator",
        tool_calls=2,
        group_size=8,
        max_answer=16,
        evaluation_prompts=64,
    )
    recipe = ReinforcementRecipe(
        rl=rl,
        optimizer=OptimizerConfig(learning_rate=5e-4, schedule="constant", warmup_steps=0),
        training=TrainingConfig(steps=steps, batch_size=16, precision="fp32", evaluate_every=10, checkpoint_every=10),
        tuning=TuningConfig(method="rl", start=str(start)),
    )
    tune(recipe, folder / "rewarded")
    return folder / "rewarded"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tools"))
    parser.add_argument("--taught-steps", type=int, default=600)
    parser.add_argument("--rewarded-steps", type=int, default=30)
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / "products.py"
    atomic_write_text(environment, ENVIRONMENT, overwrite=True)
    for name, n in (("train", 10000), ("held_out", 200)):
        lines = conversations(f"{environment}:Products", n, held_out=name == "held_out")
        atomic_write_text(folder / f"{name}.jsonl", "\n".join(lines) + "\n", overwrite=True)
    if not (folder / "start").exists():
        make_start(folder)
    run = rewarded(folder, taught(folder, options.taught_steps), options.rewarded_steps)
    print("| step | answers with a call | right answers | held-out, the likeliest answer |")
    print("|---|---|---|---|")
    lines = read_metrics(run / "metrics.jsonl")
    for line in lines:
        figures = line.figures or {}
        if line.step % 10 == 0 or line.step == 1:
            held_out = figures.get("held-out reward")
            cells = [figures.get("part tool calls"), figures.get("reward"), held_out]
            print(f"| {line.step} | " + " | ".join("" if cell is None else f"{cell:.0%}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
