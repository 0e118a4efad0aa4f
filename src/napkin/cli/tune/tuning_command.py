"""What the commands of `napkin tune` share: a recipe from a file and options, and a run that is trained by it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from napkin.cli.options import INLINED, JsonOption, parse
from napkin.cli.progress import progress_line
from napkin.cli.terminal import notify
from napkin.cli.training_lines import TrainingLines
from napkin.errors import NapkinError
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrackingConfig, TrainingConfig
from napkin.recipe.tuning_recipe import RECIPE_OF, AdapterConfig, TuningConfig, TuningRecipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from napkin.training.method import Method


@dataclass(frozen=True)
class TunedData:
    """What is learned from, and evaluated on."""

    train: str = ""
    """JSONL file to learn from."""
    validation: str | None = None
    """JSONL file for evaluation only; None disables evaluation."""


@dataclass(frozen=True)
class TuningTables:
    """The tables of a recipe of tuning that the user fills; [model] is that of the start."""

    data: TunedData = field(default_factory=TunedData)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


Tables = TypeVar("Tables", bound=TuningTables)


@dataclass(frozen=True)
class TuningOptions(JsonOption):
    """For commands that make a run of tuning."""

    FIRST: ClassVar[tuple[str, ...]] = (
        *("run", "tuning.start", "data.train", "data.validation", "rl.environment", "rl.reward", "rl.algorithm"),
        *("preference.objective", "adapter.kind", "adapter.rank", "optimizer.learning-rate", "training.steps"),
        *("training.batch-size", "training.precision"),
    )
    """What `--help` shows first, of those that the command has."""

    recipe: Annotated[TuningTables, INLINED]
    run: str | None = None
    """Folder to make for the run, which must not exist; None is runs/ and the name of the recipe, or of the command."""


Options = TypeVar("Options", bound=TuningOptions)


def tune_by(options: type[Options], tables: type[TuningTables], command: str, arguments: list[str]) -> int:
    """Read `[RECIPE.toml] [--field value ...]`, make the run and train it; the exit status."""
    parsed, recipe, path = _parsed(options, tables, command, arguments)
    folder = parsed.run or str(Path("runs") / (Path(path).stem if path else command))
    if not recipe.tuning.start:
        raise NapkinError("no model to start from is named: use --tuning.start with a run or a Hugging Face folder")
    from napkin.distributed.joining import join_ranks

    with join_ranks(recipe.training) as ranks:
        with progress_line("starting", shown=ranks.is_rank_zero) as line:
            from napkin.training.start import create_run

            method, run = create_run(recipe, folder, progress=line.retitle, on_message=notify, ranks=ranks)
        return follow_tuning(method, run, as_json=parsed.json)


def follow_tuning(method: "Method", run: RunFolder, *, as_json: bool) -> int:
    """Train a run of tuning with its lines on the terminal; the exit status."""
    from napkin.cli.train_and_report import follow_training

    lines = TuningLines(run.path, steps=method.recipe.training.steps)
    return follow_training(method, run, lines, as_json=as_json)


class TuningLines(TrainingLines):
    """With the figures that a method is judged by."""

    SHOWN = ("reward", "accuracy", "held-out reward", "held-out accuracy")

    def _shown(self, metrics: StepMetrics) -> list[str]:
        figures = metrics.figures or {}
        return [f"{name} {figures[name]:.3f}" for name in self.SHOWN if figures.get(name) is not None]


def _parsed(
    options: type[Options], tables: type[TuningTables], command: str, arguments: Sequence[str]
) -> tuple[Options, TuningRecipe, str | None]:
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    base = _recipe(path, command)
    rest = arguments if path is None else arguments[1:]
    shown = tables(**{each.name: _table(base, each.name) for each in dataclasses.fields(tables)})
    default = options(recipe=shown)
    parsed = parse(options, f"tune {command} [RECIPE.toml]", rest, default=default)
    chosen = {each.name: getattr(parsed.recipe, each.name) for each in dataclasses.fields(tables)}
    chosen["data"] = dataclasses.replace(
        base.data, train=parsed.recipe.data.train, validation=parsed.recipe.data.validation
    )
    return parsed, dataclasses.replace(base, **chosen), path


def _recipe(path: str | None, command: str) -> TuningRecipe:
    recipe: Recipe = RECIPE_OF[command]() if path is None else read_recipe(path)  # pyright: ignore[reportArgumentType]
    if not isinstance(recipe, TuningRecipe):
        raise NapkinError(f"'{path}' has no [tuning]: it is a recipe of pre-training, train it with `napkin train`")
    if recipe.tuning.method != command:
        raise NapkinError(
            f"tuning.method is '{recipe.tuning.method}' in '{path}': use `napkin tune {recipe.tuning.method}`"
        )
    return recipe


def _table(recipe: TuningRecipe, name: str) -> Any:
    found = getattr(recipe, name)
    if not isinstance(found, DataConfig):
        return found
    if not isinstance(found.train, str):
        raise NapkinError(f"data.train names {len(found.train)} files: tuning reads one")
    return TunedData(found.train, found.validation)
