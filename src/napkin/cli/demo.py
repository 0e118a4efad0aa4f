"""`napkin demo`: from text to a trained model, command by command, on text that is on every machine; and `napkin tune
demo`: an arithmetic model from scratch, whose rewards correct what it was taught.
"""

import dataclasses
import json
import random
import shlex
import statistics
import time
from pathlib import Path

from napkin.cli.common.files import STANDARD_LIBRARY
from napkin.cli.common.options import command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_table, say
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.model.config import ModelConfig
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig, ReinforcementRecipe, TuningConfig, TuningRecipe
from napkin.units import format_seconds

TRAINING_SECONDS = 240
"""Time for training, by the plan; the other commands take the rest of the five minutes that are promised."""
PROMPTS = ("def main(", "import os\n", 'class Error(Exception):\n    """')


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Train a language model on Python's own library, with the same commands as for your own text."""

    folder: str = "demo"
    """Folder to make for everything; if it exists, the next free name is used: demo-2, demo-3, ..."""


@command("demo", DemoOptions)
def demo_command(options: DemoOptions) -> int:
    """Run the demo; returns the exit status of the first command that fails."""
    folder = free_folder(Path(options.folder))
    folder.mkdir(parents=True)
    recipe, run = folder / "recipe.toml", folder / "run"
    stages = [
        ("tokenizer", ["tokenizer", "train", STANDARD_LIBRARY, "--out", f"{folder}/tokenizer.json"]),
        (
            "tokens",
            ["tokenizer", "encode", STANDARD_LIBRARY, "--tokenizer", f"{folder}/tokenizer.json", "--out", str(folder)],
        ),
        ("plan, train, reconcile", ["train", str(recipe), "--run", str(run)]),
        ("evaluate", ["evaluate", str(run)]),
        ("generate", ["generate", str(run), "--save", "--tokens", "100", "--prompts", *PROMPTS]),
        ("report", ["report", str(run)]),
    ]
    taken: dict[str, float] = {}
    for name, typed in stages:
        if typed[0] == "train":
            start = time.perf_counter()
            atomic_write_text(recipe, format_recipe(within(TRAINING_SECONDS, demo_recipe(str(folder)))))
            taken[name] = time.perf_counter() - start
        if status := run_stage(name, typed, taken):
            return status
    print_times(taken)
    say(f"open {run}/report.html; for your own text, run the commands above with its path in place of stdlib:")
    return 0


def demo_recipe(folder: str) -> Recipe:
    """The demo's recipe: 800 steps that take about two and a half minutes on two cores with native bf16."""
    return Recipe(
        data=DataConfig(
            train=f"{folder}/train.tokens",
            validation=f"{folder}/validation.tokens",
            tokenizer=f"{folder}/tokenizer.json",
        ),
        model=ModelConfig(context_length=256, d_model=192, n_layers=4, n_heads=3),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
        training=TrainingConfig(steps=800, batch_size=8, checkpoint_every=200, evaluate_every=100),
    )


def within(seconds: float, recipe: Recipe) -> Recipe:
    """The recipe with as many steps as this machine can take in `seconds` by the plan, rounded to whole evaluation
    intervals and at least two of them; a reduction is reported."""
    with progress_line("planning") as line:
        from napkin.planning.planner import plan as make_plan

        plan = make_plan(recipe, progress=line.retitle)
    training = recipe.training
    if plan.seconds <= seconds:
        return recipe
    evaluations = max(2, int(training.steps * seconds / plan.seconds / training.evaluate_every))
    steps = evaluations * training.evaluate_every
    say(
        f"{training.steps} steps would take {format_seconds(plan.seconds)} on this machine: {steps} here; for all of "
        f"them set steps = {training.steps} in the recipe and train again"
    )
    return recipe.of_steps(steps)


def run_stage(name: str, typed: list[str], taken: dict[str, float]) -> int:
    """Show a command and run it in this process; adds its seconds to `taken` and returns its exit status."""
    from napkin.cli import main as napkin

    say()
    say(f"$ napkin {shlex.join(typed)}", style="bold", keep_lines=True)
    start = time.perf_counter()
    status = napkin(typed)
    taken[name] = taken.get(name, 0.0) + time.perf_counter() - start
    return status


def print_times(taken: dict[str, float]) -> None:
    """Print what each stage took, and all of them."""
    rows = [(name, format_seconds(seconds)) for name, seconds in (*taken.items(), ("total", sum(taken.values())))]
    say()
    print_table(("stage", "time"), rows)
    say()


def free_folder(folder: Path) -> Path:
    """The folder, or the next free name after it. Raises NapkinError where there is none."""
    if not folder.name:
        raise NapkinError(f"'{folder}' is not a name for a new folder: choose another --folder")
    for candidate in (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))):
        if not candidate.exists():
            return candidate
    raise NapkinError(f"'{folder}' and 998 numbered ones after it exist: remove some or choose another --folder")


ENVIRONMENT = "sums:2"
SOLVED = 12000
"""Sums that the teacher solves."""
WRONG = 2 / 3
"""Fraction of the teacher's sums whose result is one too large."""


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
    run = folder / "practised"
    steps = sorted(int(path.stem.removeprefix("step-")) for path in (run / "answers").glob("step-*.jsonl"))
    right = {step: held_out(run, step) for step in steps}
    print_times(taken)
    rows = [(f"{step:,}", f"{share:.1%}") for step, share in right.items()]
    print_table(("step", "held-out sums that are right"), rows)
    say()
    say(
        f"taught by a teacher who is wrong two times in three, the model answered {right[steps[0]]:.0%} of held-out "
        f"sums right; after {steps[-1]} steps of rewards {right[steps[-1]]:.0%}"
    )
    say(f"open {run}/report.html; answers with their rewards are in {run}/answers")
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
    """Recipes by the name of their run, from random weights to a model that adds."""
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
    """The mean reward of the held-out answers that a run has recorded for a step."""
    lines = (run / "answers" / f"step-{step:08d}.jsonl").read_text().splitlines()
    return statistics.fmean(json.loads(line)["reward"] for line in lines)
