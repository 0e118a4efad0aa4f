"""`napkin tune sft`, `preference`, `reward-model` and `rl`: a recipe from a file and options, and its run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from napkin.cli.commands import Main
from napkin.cli.common.options import INLINED, JsonOption, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeSource
from napkin.cli.common.terminal import notify
from napkin.errors import NapkinError
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrackingConfig, TrainingConfig
from napkin.recipe.tuning_recipe import (
    RECIPE_OF,
    AdapterConfig,
    PreferenceConfig,
    ReinforcementConfig,
    TuningConfig,
    TuningRecipe,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class TunedData:
    """Files of examples to learn from and to evaluate on."""

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
    """The options that `--help` shows first, where the command has them."""

    recipe: Annotated[TuningTables, INLINED]
    run: str | None = None
    """Folder to make for the run, which must not exist; None is runs/ and the name of the recipe, or of the command."""


Options = TypeVar("Options", bound=TuningOptions)


def tuning_command(method: str, options: type[Options], tables: type[TuningTables]) -> Main:
    """Make a command that reads `[RECIPE.toml] [--field value ...]`, makes the run and trains it."""

    @takes(options)
    def main(arguments: Sequence[str]) -> int:
        source = RecipeSource.of(arguments)
        parsed, recipe = _parsed(options, tables, method, source)
        folder = parsed.run or source.folder(default=method)
        if not recipe.tuning.start:
            raise NapkinError("no model to start from is named: use --tuning.start with a run or a Hugging Face folder")
        from napkin.distributed.joining import join_ranks

        with join_ranks(recipe.training) as ranks:
            with progress_line("starting", shown=ranks.is_rank_zero) as line:
                from napkin.cli.train.following import train_and_report
                from napkin.training.run import create_run

                started, run = create_run(recipe, folder, progress=line.retitle, on_message=notify, ranks=ranks)
            return train_and_report(started, run, as_json=parsed.json)

    return main


def _parsed(
    options: type[Options], tables: type[TuningTables], method: str, source: RecipeSource
) -> tuple[Options, TuningRecipe]:
    base = _recipe(source.path, method)
    shown = tables(**{each.name: _table(base, each.name) for each in dataclasses.fields(tables)})
    default = options(recipe=shown)
    parsed = parse(options, f"tune {method} [RECIPE.toml]", source.options, default=default)
    chosen = {each.name: getattr(parsed.recipe, each.name) for each in dataclasses.fields(tables)}
    chosen["data"] = dataclasses.replace(
        base.data, train=parsed.recipe.data.train, validation=parsed.recipe.data.validation
    )
    return parsed, dataclasses.replace(base, **chosen)


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


@dataclass(frozen=True)
class SupervisedOptions(TuningOptions):
    """Fine-tune a model on conversations: it learns to say what the assistant says. Plans the run, trains it, meters
    it, and reconciles plan and measurement."""


sft_command = tuning_command("sft", SupervisedOptions, TuningTables)


@dataclass(frozen=True)
class PreferenceTables(TuningTables):
    """With how pairs are learned from."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass(frozen=True)
class PreferenceOptions(TuningOptions):
    """Tune a model on preferences: a JSONL file with prompt, chosen and rejected per line, or for kto with prompt,
    completion and label. Plans the run, trains it, meters it, and reconciles plan and measurement."""


preference_command = tuning_command("preference", PreferenceOptions, PreferenceTables)


@dataclass(frozen=True)
class RewardModelOptions(TuningOptions):
    """Train a reward model: a number for each answer, from a JSONL file with prompt, chosen and rejected per line.
    Plans the run, trains it, meters it, and reconciles plan and measurement; on held-out pairs it says how far the
    model's probabilities can be taken at their word."""


reward_model_command = tuning_command("reward-model", RewardModelOptions, TuningTables)


@dataclass(frozen=True)
class ReinforcementTables(TuningTables):
    """The tables of a recipe of reinforcement learning."""

    rl: ReinforcementConfig = field(default_factory=ReinforcementConfig)


@dataclass(frozen=True)
class ReinforcementOptions(TuningOptions):
    """Tune a model on rewards of its own answers, to tasks of an environment or to prompts of a file. Answers held-out
    tasks greedily when an evaluation is due, and keeps answers with their rewards in the run's folder."""

    recipe: Annotated[ReinforcementTables, INLINED]


rl_command = tuning_command("rl", ReinforcementOptions, ReinforcementTables)
