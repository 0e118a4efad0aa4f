"""`napkin tune sft`, `preference`, `reward-model` and `rl`: a recipe from a file and options, and its run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from napkin.cli.commands import Main
from napkin.cli.common.options import INLINED, JsonOption, command, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeSource
from napkin.cli.common.terminal import notify, print_json, say
from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrackingConfig, TrainingConfig
from napkin.recipe.tuning_recipe import (
    FIRST_FIELDS,
    RECIPE_OF,
    AdapterConfig,
    DistillationConfig,
    DistillationRecipe,
    PreferenceConfig,
    ReinforcementConfig,
    TuningConfig,
    TuningRecipe,
)
from napkin.units import format_bytes


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


@dataclass(frozen=True)
class TuningOptions(JsonOption):
    """Options of commands that start a tuning run."""

    FIRST: ClassVar[tuple[str, ...]] = ("run", *(name.replace("_", "-") for name in FIRST_FIELDS))
    """The options that `--help` shows first, where the command has them."""

    recipe: Annotated[TuningTables, INLINED]
    run: str | None = None
    """Folder to make for the run, which must not exist; None is runs/ and the name of the recipe, or of the command."""


def tuning_command(method: str, about: str, **tables: type) -> Main:
    """Make a command that reads `[RECIPE.toml] [--field value ...]`, makes the run and trains it.

    `tables` are the tables of its recipe besides those that every recipe has.
    """
    fields = [(name, kind, field(default_factory=kind)) for name, kind in tables.items()]
    all_tables = dataclasses.make_dataclass("Tables", fields, bases=(TuningTables,), frozen=True)
    options = dataclasses.make_dataclass(
        "Options",
        [("recipe", Annotated[all_tables, INLINED])],
        bases=(TuningOptions,),
        namespace={"__doc__": about},
        frozen=True,
    )

    @takes(options)
    def main(arguments: Sequence[str]) -> int:
        source = RecipeSource.of(arguments)
        base = _recipe(source.path, method)
        if not isinstance(base.data.train, str):
            raise NapkinError(f"data.train names {len(base.data.train)} files: tuning reads one")
        names = [each.name for each in dataclasses.fields(all_tables)]
        shown = {name: getattr(base, name) for name in names}
        shown["data"] = TunedData(base.data.train, base.data.validation)
        default = options(recipe=all_tables(**shown))
        parsed = parse(options, f"tune {method} [RECIPE.toml]", source.options, default=default)
        chosen = {name: getattr(parsed.recipe, name) for name in names}
        chosen["data"] = dataclasses.replace(base.data, **vars(parsed.recipe.data))
        recipe = dataclasses.replace(base, **chosen)
        folder = parsed.run or source.folder(default=method)
        if not recipe.tuning.start:
            raise NapkinError(
                "no model to start from is named: use --tuning.start with a run, a Hugging Face folder or a GGUF file"
            )
        from napkin.distributed.joining import join_ranks

        with join_ranks(recipe.training) as ranks:
            with progress_line("starting", shown=ranks.is_rank_zero) as line:
                from napkin.cli.train.following import train_and_report
                from napkin.training.run import create_run

                started, run = create_run(recipe, folder, progress=line.retitle, on_message=notify, ranks=ranks)
            return train_and_report(started, run, as_json=parsed.json)

    return main


def _recipe(path: str | None, command: str) -> TuningRecipe:
    recipe: Recipe = RECIPE_OF[command]() if path is None else read_recipe(path)  # pyright: ignore[reportArgumentType]
    if not isinstance(recipe, TuningRecipe):
        raise NapkinError(f"'{path}' has no [tuning]: it is a recipe of pre-training, train it with `napkin train`")
    if recipe.tuning.method != command:
        raise NapkinError(
            f"tuning.method is '{recipe.tuning.method}' in '{path}': use `napkin tune {recipe.tuning.method}`"
        )
    return recipe


_RECONCILED = "Plans the run, trains it, meters it, and reconciles plan and measurement"

sft_command = tuning_command(
    "sft",
    f"Fine-tune a model on conversations: it learns to say what the assistant says. {_RECONCILED}.",
)
preference_command = tuning_command(
    "preference",
    "Tune a model on preferences: a JSONL file with prompt, chosen and rejected per line, or for kto with prompt, "
    f"completion and label. {_RECONCILED}.",
    preference=PreferenceConfig,
)
reward_model_command = tuning_command(
    "reward-model",
    "Train a reward model: a number for each answer, from a JSONL file with prompt, chosen and rejected per line. "
    f"{_RECONCILED}; on held-out pairs it says how far the model's probabilities can be taken at their word.",
)
distill_command = tuning_command(
    "distill",
    "Distill a model: it learns a teacher's distributions of tokens, of conversations or of a file of tokens. "
    f"{_RECONCILED}.",
    distillation=DistillationConfig,
)
rl_command = tuning_command(
    "rl",
    "Tune a model on rewards of its own answers, to tasks of an environment or to prompts of a file. Answers held-out "
    "tasks greedily when an evaluation is due, and keeps answers with their rewards in the run's folder.",
    rl=ReinforcementConfig,
)


@dataclass(frozen=True)
class TeachOptions(JsonOption):
    """Write a teacher's likeliest tokens after each token that a student would learn from it: distillation.teacher of
    any number of runs of `napkin tune distill` with the same data, which then need no teacher beside them."""

    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """File to write, which must not exist."""
    teacher: str
    """Run or Hugging Face folder with the student's tokenizer."""
    start: str
    """The student, as tuning.start names it."""
    data: TunedData
    top_k: int = 64
    """Number of likeliest tokens kept of each distribution; all others are kept as one probability. That takes 8 bytes
    for each kept token, and 4 more."""
    temperature: float = 1.0
    """Logits are divided by it."""
    learned: Literal["assistant", "last", "all"] = "assistant"
    """The tokens of a conversation that the student will learn, as tuning.learned names them."""
    chat_template: str = ""
    """The template that writes conversations, as tuning.chat_template names it."""
    max_length: int = 0
    """The length in tokens at which conversations are truncated, as in tuning.max_length."""
    max_bytes: int = 2**36
    """Largest file that is written."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher's products."""


@command("tune teach", TeachOptions)
def teach_command(options: TeachOptions) -> None:
    tuning = TuningConfig(
        method="distill",
        start=options.start,
        learned=options.learned,
        chat_template=options.chat_template,
        max_length=options.max_length,
    )
    recipe = DistillationRecipe(
        tuning=tuning,
        distillation=DistillationConfig(options.teacher, temperature=options.temperature),
        training=TrainingConfig(precision=options.precision),
    )
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **vars(options.data)))
    with progress_line("opening the teacher") as line:
        from napkin.tuning.distillation_method import teach

        file = teach(
            recipe,
            options.out,
            top_k=options.top_k,
            most_bytes=options.max_bytes,
            on_message=notify,
            progress=line.retitle,
        )
    n_tokens, n_bytes = len(file.ids), Path(options.out).stat().st_size
    if options.json:
        print_json({"file": options.out, "tokens": n_tokens, "top_k": file.top_k, "bytes": n_bytes})
        return
    say(f"{options.out}: the {file.top_k:,} likeliest of {n_tokens:,} tokens, {format_bytes(n_bytes)}")
