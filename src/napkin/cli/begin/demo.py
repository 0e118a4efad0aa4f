"""`napkin demo`: from text to a trained model, command by command, on text that is on every machine."""

import dataclasses
import shlex
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
