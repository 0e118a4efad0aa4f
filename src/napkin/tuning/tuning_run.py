"""Create, open and train a run of tuning: with the loop, the checkpoints and the books of any other run."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.chats.chat_encoder import ChatEncoder, Learned
from napkin.chats.chat_template import ChatTemplate, read_template_file, read_template_variables
from napkin.chats.run_texts import run_texts
from napkin.checkpoint.folder import refuse_too_small_disk
from napkin.checkpoint.state import write_frozen
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.model.transformer import Transformer
from napkin.planning.planner import resolve
from napkin.planning.step.failure_plan import whole_checkpoint_bytes
from napkin.planning.step.machine import ThisMachine
from napkin.planning.step.memory_savings import refuse_what_does_not_fit
from napkin.planning.step.plan_file import plan_file_of
from napkin.planning.step.run_plan import Plan
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.tuning_recipe import TuningMethod, TuningRecipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.model_files import conversation_files
from napkin.runs.run_folder import ReadOnlyRunFolder, RunFolder, is_run
from napkin.tokenizer.base import Tokenizer
from napkin.train_step.step import build_model
from napkin.train_step.tuned_model import adapter_of
from napkin.training.loop import Callback
from napkin.training.preparation import Fetcher, Progress
from napkin.training.run import Outcome, train_run
from napkin.training.start import recipe_differences
from napkin.tuning.example_file import UnitFile, UnitKind, unit_file_of
from napkin.tuning.method import Method, TuningContext
from napkin.tuning.sequence_step import refuse_divided_models
from napkin.tuning.start_model import StartModel, initial_weights, open_start

# FOLD tuning/tuning_run.py
# The chat encoder of a model that tuning starts from, and of a tuned run; what the run keeps of it.


def encoder_of_start(start: StartModel, chat_template: StrPath = "", learned: Learned = "assistant") -> ChatEncoder:
    """The encoder of a model that is to be tuned.

    The template is that of the file `chat_template`, or the model's own, or the built-in one. Raises NapkinError where
    it cannot be read, or the tokenizer lacks what the built-in one needs.
    """
    template = start.chat_template
    if chat_template:
        template = ChatTemplate(read_template_file(chat_template), _variables(start))
    return ChatEncoder(start.tokenizer, template, start.first_ids, stop_ids=start.stop_ids, learned=learned)


def encoder_of_tokenizer(
    tokenizer: Tokenizer, chat_template: StrPath = "", learned: Learned = "assistant"
) -> ChatEncoder:
    """The encoder of models that are trained from scratch with a tokenizer: their texts stand between separators."""
    separators = [tokenizer.special_tokens[SEPARATOR]] if SEPARATOR in tokenizer.special_tokens else []
    template = ChatTemplate(read_template_file(chat_template), _separators(tokenizer)) if chat_template else None
    return ChatEncoder(tokenizer, template, separators, stop_ids=separators, learned=learned)


def encoder_of_run(run: Path, tokenizer: Tokenizer, learned: Learned = "assistant") -> ChatEncoder:
    """The encoder of a tuned run, by its conversation.json."""
    texts = run_texts(run, tokenizer)
    return ChatEncoder(tokenizer, texts.chat_template, texts.first_ids, stop_ids=texts.stop_ids, learned=learned)


def conversation_files_of(encoder: ChatEncoder, start: StartModel) -> dict[str, bytes]:
    """What a run that is tuned with an encoder keeps, by the names of files, so that it is asked as it was trained."""
    kept = start.conversation_file(encoder.template)
    return conversation_files(msgspec.structs.replace(kept, stop_ids=encoder.stop_ids))


def _variables(start: StartModel) -> dict[str, str]:
    """The special tokens that a template may name."""
    if start.chat_template is not None:
        return dict(start.chat_template.special_tokens)
    if variables := read_template_variables(start.folder):
        return variables
    return _separators(start.tokenizer)


def _separators(tokenizer: Tokenizer) -> dict[str, str]:
    return {"bos_token": SEPARATOR, "eos_token": SEPARATOR} if SEPARATOR in tokenizer.special_tokens else {}


# FOLD tuning/tuning_run.py
# The ways of tuning by their names in recipes.

METHODS: dict[TuningMethod, str] = {
    "sft": "supervised:supervised_method",
    "rl": "reinforcement_method:reinforcement_method",
    "preference": "preference_method:preference_method",
    "reward-model": "preference_method:reward_model_method",
}
"""By name, the module of napkin.tuning and the function that makes the method of a context."""


def make_method(context: TuningContext) -> Method:
    """The method of a recipe. Raises NapkinError where its data cannot be used."""
    module, _, function = METHODS[context.recipe.tuning.method].partition(":")
    return getattr(importlib.import_module(f"napkin.tuning.{module}"), function)(context)


@dataclass(frozen=True)
class TuningPreparation:
    """Everything that a run of tuning needs; see `Prepared`."""

    resolved: ResolvedRecipe
    tokenizer: Tokenizer
    method: Method
    start: StartModel | None
    """None of a run that is resumed: its weights are its own."""
    folder: Path
    plan: Plan | None = None
    ranks: Ranks = ALONE

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self.resolved.recipe

    @property
    def precision(self) -> Precision:
        """The number formats of the training."""
        return self.resolved.precision

    @property
    def data_checksum(self) -> str:
        """Of the method's data."""
        return self.method.checksum

    @property
    def token_files(self) -> list[TokenFile | TokenMixture]:
        """None is mapped."""
        return []

    def open_fetcher(self) -> Fetcher:
        """The method's batches."""
        return MethodFetcher(self.method)

    def initialize(self, model: Transformer) -> None:
        """Copy the weights that the run starts from into the model: those that it keeps, or those of its start."""
        assert isinstance(self.recipe, TuningRecipe)
        load = None if self.start is None or adapter_of(self.recipe) else self.start.load_into
        (load or initial_weights(self.folder, self.recipe))(model)


class MethodFetcher:
    """A method's batches by step."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def __getitem__(self, index: int) -> Any:
        """The batch of step `index`."""
        return self._method.batch(index)

    def close(self) -> None:
        """Nothing is prepared."""


def create_tuning(
    recipe: TuningRecipe,
    folder: StrPath,
    *,
    progress: Progress = lambda doing: None,
    on_message: Callable[[str], None] = lambda message: None,
    ranks: Ranks = ALONE,
) -> tuple[TuningPreparation, RunFolder]:
    """Open what a recipe of tuning names, plan its steps, and make its run folder.

    Raises NapkinError where the folder exists, files are missing or do not suit each other, or the step does not fit;
    nothing is left behind then.
    """

    def create() -> tuple[TuningPreparation, RunFolder]:
        if ranks.info.restart_count and is_run(Path(folder)) and not recipe_differences(recipe, Path(folder)):
            return _open(folder, progress, on_message, ranks)
        RunFolder.refuse_existing(folder)
        recipe.tracking.refuse_missing()
        start = open_start(recipe.tuning.start)
        resolved = _resolved(recipe, start, ranks)
        tuned = resolved.recipe
        assert isinstance(tuned, TuningRecipe)
        encoder = encoder_of_start(start, tuned.tuning.chat_template, tuned.tuning.learned)
        method = make_method(TuningContext(tuned, start.tokenizer, encoder, Path(folder), ranks, progress, on_message))
        plan = _plan(method, resolved, ranks, progress)
        preparation = TuningPreparation(resolved, start.tokenizer, method, start, Path(folder), plan, ranks)
        files = {} if plan is None else {"plan.json": plan_file_of(plan)}
        if plan is not None:
            refuse_too_small_disk(Path(folder), whole_checkpoint_bytes(plan), plan.ledger.frozen_bytes)

        def keep_what_is_not_trained(checkpoints: Path) -> None:
            if adapter_of(tuned) is not None:
                progress("keeping the frozen weights")
                write_frozen(checkpoints, build_model(resolved, start.load_into))

        conversation = conversation_files_of(encoder, start)
        run = RunFolder.create(folder, tuned, start.tokenizer, conversation, keep_what_is_not_trained)
        for name, content in files.items():
            run.write_json(name, content)
        return preparation, run

    return _on_rank_zero(ranks, folder, create, progress, on_message)


def open_tuning(
    folder: StrPath,
    *,
    progress: Progress = lambda doing: None,
    on_message: Callable[[str], None] = lambda message: None,
    ranks: Ranks = ALONE,
) -> tuple[TuningPreparation, RunFolder]:
    """Open a run of tuning to continue it from its newest good checkpoint."""
    return _on_rank_zero(ranks, folder, lambda: _open(folder, progress, on_message, ranks), progress, on_message)


def train_tuning(
    preparation: TuningPreparation,
    run: RunFolder,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a run of tuning to its end, as `train_run` does."""
    method = preparation.method
    return train_run(
        preparation,
        run,
        step=method.step(),
        evaluation=method.evaluation(),
        on_step=on_step,
        on_message=on_message,
        callbacks=[*method.callbacks(), *callbacks],
    )


def tune(
    recipe: TuningRecipe | StrPath,
    folder: StrPath,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    progress: Progress = lambda doing: None,
) -> Outcome:
    """Plan, train and reconcile a run of tuning in `folder`: start it, or resume it if it exists.

    `recipe` is the recipe, or its TOML file; all else is as in `napkin.train`. Raises NapkinError where the folder
    holds anything else than a run of this recipe, where files are missing or damaged, and where the step does not fit
    into the memory.
    """
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    if not isinstance(chosen, TuningRecipe):
        raise NapkinError(f"'{recipe}' has no [tuning]: it is a recipe of pre-training, train it with `napkin train`")
    with join_ranks(chosen.training) as ranks:
        options: Mapping[str, Any] = {"progress": progress, "on_message": on_message, "ranks": ranks}
        exists = ranks.broadcast_from_zero(lambda: _refuse_other_recipe(chosen, Path(folder)))
        preparation, run = open_tuning(folder, **options) if exists else create_tuning(chosen, folder, **options)
        return train_tuning(preparation, run, on_step=on_step, on_message=on_message)


def _refuse_other_recipe(recipe: TuningRecipe, folder: Path) -> bool:
    """Whether the folder is a run. Raises NapkinError where its recipe is another one."""
    if not is_run(folder):
        return False
    differences = [each for each in recipe_differences(recipe, folder) if not each.startswith("model.")]
    if differences:
        raise NapkinError(
            f"'{folder}' is a run of another recipe: there {'; '.join(differences)}: choose another folder, or "
            f"continue that run with `napkin resume {folder}`"
        )
    return True


def _resolved(recipe: TuningRecipe, start: StartModel, ranks: Ranks) -> ResolvedRecipe:
    training = recipe.training
    if training.compile == "on":
        raise NapkinError("training.compile is 'on', and the sequences of tuning differ in length: leave it out")
    if training.micro_batch_size is not None:
        raise NapkinError(
            f"training.micro_batch_size is {training.micro_batch_size!r}, and sequences differ in length: use "
            "--tuning.micro-batch-tokens"
        )
    training = dataclasses.replace(training, compile="off")
    tuned = dataclasses.replace(recipe, model=start.config, training=training)
    resolved = resolve(tuned, ThisMachine(ranks, device=training.device))
    refuse_divided_models(resolved.layout)
    return resolved


def _plan(method: Method, resolved: ResolvedRecipe, ranks: Ranks, progress: Progress) -> Plan | None:
    plan = method.plan(resolved, ThisMachine(ranks, device=resolved.recipe.training.device), progress)
    if plan is not None:
        refuse_what_does_not_fit(plan)
    return plan


def _open(
    folder: StrPath,
    progress: Progress,
    on_message: Callable[[str], None],
    ranks: Ranks,
    *,
    planned: bool = True,
) -> tuple[TuningPreparation, RunFolder]:
    run = RunFolder.open(folder) if planned else ReadOnlyRunFolder.open(folder)
    recipe = run.recipe
    if not isinstance(recipe, TuningRecipe):
        raise NapkinError(f"'{run.path}' is a run of pre-training: continue it with `napkin resume {run.path}`")
    resolved = resolve(recipe, ThisMachine(ranks, device=recipe.training.device))
    encoder = encoder_of_run(run.path, run.tokenizer, recipe.tuning.learned)
    context = TuningContext(recipe, run.tokenizer, encoder, run.path, ranks, progress, on_message)
    method = make_method(context)
    plan = _plan(method, resolved, ranks, progress) if planned else None
    return TuningPreparation(resolved, run.tokenizer, method, None, run.path, plan, ranks), run


def _on_rank_zero(
    ranks: Ranks,
    folder: StrPath,
    make: Callable[[], tuple[TuningPreparation, RunFolder]],
    progress: Progress,
    on_message: Callable[[str], None],
) -> tuple[TuningPreparation, RunFolder]:
    """Rank 0 makes or opens the run, the others read what it has written."""
    made: list[tuple[TuningPreparation, RunFolder]] = []
    ranks.broadcast_from_zero(lambda: made.append(make()))
    if ranks.is_rank_zero:
        return made[0]
    return _open(folder, progress, on_message, ranks, planned=False)


# FOLD tuning/tuning_run.py
# The files of units that a recipe of tuning names: encoded once, and what is left out of them told every time.


def opened_units(context: TuningContext, kind: UnitKind, *, max_length: int) -> tuple[UnitFile, UnitFile | None]:
    """Those of data.train, and of data.validation if it names a file; sequences have at most `max_length` tokens.

    Raises NapkinError where they cannot be read or hold nothing to learn from.
    """
    data = context.recipe.data
    if not isinstance(data.train, str):
        raise NapkinError("data.train names several files, and tuning reads one: join them")
    if not data.train:
        raise NapkinError(f"no {kind} to learn from are named: use --data.train with a file of JSON lines")
    train = _opened(context, data.train, kind, max_length)
    return train, _opened(context, data.validation, kind, max_length) if data.validation else None


def _opened(context: TuningContext, path: StrPath, kind: UnitKind, max_length: int) -> UnitFile:
    units = unit_file_of(
        path,
        kind,
        context.encoder,
        max_length=max_length,
        progress=lambda n: None if n % 1000 else context.progress(f"encoding {n:,} {kind}"),
    )
    left_out = units.left_out
    if left_out.n and context.ranks.is_rank_zero:
        n = left_out.n + len(units)
        context.on_message(f"'{path}': {left_out.n:,} of {n:,} {kind} are left out: {left_out.describe()}")
    return units
