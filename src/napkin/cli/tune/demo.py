"""`napkin tune demo`: an arithmetic model from scratch, command by command; then rewards correct what it was taught."""

import dataclasses
import json
import random
import statistics
import time
from pathlib import Path

from napkin.cli.begin.demo import free_folder, print_times, run_stage
from napkin.cli.common.options import command
from napkin.cli.common.terminal import print_table, say
from napkin.files import atomic_write_text
from napkin.model.config import ModelConfig
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig, ReinforcementRecipe, TuningConfig, TuningRecipe

ENVIRONMENT = "sums:2"
SOLVED = 12000
"""Sums that the teacher solves."""
WRONG = 2 / 3
"""Of these, the fraction whose result is one too large."""


@dataclasses.dataclass(frozen=True)
class TuningDemoOptions:
    """Train an arithmetic model from scratch on sums that a careless teacher has solved, two of three wrongly; then
    let it answer sums itself and learn from rewards (GRPO). The same commands as for a model of your own."""

    folder: str = "align-demo"
    """Folder to make for everything; if it exists, the next free name is used: align-demo-2, align-demo-3, ..."""
    seed: int = 0
    """Seed of the teacher, of the weights and of what is drawn."""


@command("tune demo", TuningDemoOptions)
def tuning_demo_command(options: TuningDemoOptions) -> int:
    folder = free_folder(Path(options.folder))
    folder.mkdir(parents=True)
    begin = time.perf_counter()
    write_solved(folder, options.seed)
    for name, recipe in demo_recipes(folder, options.seed).items():
        atomic_write_text(folder / f"{name}.toml", format_recipe(recipe))
    taken = {"the teacher solves sums": time.perf_counter() - begin}
    tokenizer = f"{folder}/tokenizer.json"
    stages = [
        ("tokenizer", ["tokenizer", "train", f"{folder}/solved.txt", "--kind", "characters", "--out", tokenizer]),
        ("tokens", ["tokenizer", "encode", f"{folder}/solved.txt", "--tokenizer", tokenizer, "--out", str(folder)]),
        ("a first look at the characters", ["train", f"{folder}/newborn.toml", "--run", f"{folder}/newborn"]),
        ("supervised tuning", ["tune", "sft", f"{folder}/taught.toml", "--run", f"{folder}/taught"]),
        ("reinforcement learning", ["tune", "rl", f"{folder}/practised.toml", "--run", f"{folder}/practised"]),
    ]
    for name, typed in stages:
        if status := run_stage(name, typed, taken):
            return status
    _summarise(folder, taken)
    return 0


def write_solved(folder: Path, seed: int) -> None:
    """Write sums with the teacher's results: solved.jsonl as conversations, solved.txt as the model will see them."""
    from napkin.environments.environment import SolvedEnvironment
    from napkin.environments.registry import environment_named

    environment = environment_named(ENVIRONMENT)
    assert isinstance(environment, SolvedEnvironment)
    careless = random.Random(seed)
    lines, texts = [], []
    for number in range(SOLVED):
        task = environment.start(seed * SOLVED + number)
        result = str(int(environment.solution(task.state)) + (careless.random() < WRONG))
        asked = task.messages[-1].content
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": result}]
        lines.append(json.dumps({"messages": messages}) + "\n")
        texts.append(f"user: {asked}\nassistant: {result}\n")
    atomic_write_text(folder / "solved.jsonl", "".join(lines))
    atomic_write_text(folder / "solved.txt", "".join(texts))


def demo_recipes(folder: Path, seed: int) -> dict[str, Recipe]:
    """By the name of the run: from random weights to one that adds up."""
    data = DataConfig(f"{folder}/train.tokens", f"{folder}/validation.tokens", f"{folder}/tokenizer.json")
    often = {"precision": "fp32", "device": "cpu", "keep_checkpoints": 1}
    return {
        "newborn": Recipe(
            data=data,
            model=ModelConfig(context_length=32, d_model=64, n_layers=2, n_heads=4),
            optimizer=OptimizerConfig(warmup_steps=1),
            training=TrainingConfig(
                steps=20, batch_size=16, init_seed=seed, evaluate_every=20, checkpoint_every=20, **often
            ),
        ),
        "taught": TuningRecipe(
            data=DataConfig(train=f"{folder}/solved.jsonl", validation=None, tokenizer=""),
            optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=20, schedule="cosine"),
            training=TrainingConfig(steps=1800, batch_size=64, data_seed=seed, checkpoint_every=600, **often),
            tuning=TuningConfig(start=f"{folder}/newborn"),
        ),
        "practised": ReinforcementRecipe(
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5, schedule="linear", weight_decay=0.0),
            training=TrainingConfig(steps=150, batch_size=48, evaluate_every=15, checkpoint_every=75, **often),
            tuning=TuningConfig(method="rl", start=f"{folder}/taught"),
            rl=ReinforcementConfig(
                environment=ENVIRONMENT,
                group_size=8,
                max_answer=8,
                seed=seed,
                evaluation_prompts=256,
                answers_at_a_time=512,
            ),
        ),
    }


def held_out(run: Path, step: int) -> float:
    """The mean reward of the held-out answers that a run has kept of a step."""
    lines = (run / "answers" / f"step-{step:08d}.jsonl").read_text().splitlines()
    return statistics.fmean(json.loads(line)["reward"] for line in lines)


def _summarise(folder: Path, taken: dict[str, float]) -> None:
    run = folder / "practised"
    steps = sorted(int(path.stem.removeprefix("step-")) for path in (run / "answers").glob("step-*.jsonl"))
    print_times(taken)
    print_table(
        ("step", "held-out sums that are right"), [(f"{step:,}", f"{held_out(run, step):.1%}") for step in steps]
    )
    say()
    say(
        f"taught by a teacher who is wrong two times in three, the model answered {held_out(run, steps[0]):.0%} of "
        f"held-out sums right; after {steps[-1]} steps of rewards {held_out(run, steps[-1]):.0%}"
    )
    say(f"open {run}/report.html; answers with their rewards are in {run}/answers")
