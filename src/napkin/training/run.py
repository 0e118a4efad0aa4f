"""The life of a run, whatever its kind of training: it is created or opened, and trained by the training loop with the
step of its method and the standard callbacks."""

import dataclasses
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from napkin.accounting.pricing import Measurement
from napkin.accounting.quantities import QuantityTable
from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint, refuse_too_small_disk
from napkin.data.token_file import TokenFile
from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath
from napkin.json_files import read_json
from napkin.kernels.deterministic import deterministic_algorithms
from napkin.planning.planner import Planner, plan_resolved
from napkin.planning.step.machine import Progress
from napkin.planning.step.memory_savings import refuse_what_does_not_fit
from napkin.planning.step.plan_file import plan_file_of, whole_checkpoint_bytes
from napkin.planning.step.run_plan import Plan
from napkin.recipe.data_config import DataConfig, TrainFiles, paths_and_weights, renamed_phase
from napkin.recipe.mixture import open_mixture
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.accounting_files import PlanFile
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import ReadOnlyRunFolder, RunFolder, is_run
from napkin.runs.run_record import read_run_record
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.train_step.step import TrainState
from napkin.training.callbacks import Checkpointing, MetricsLog, OnStep, Trackers
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import Accounting
from napkin.training.method import Method, Setting, method_of
from napkin.training.signals import catch_interruption


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of training."""

    train_state: TrainState
    step: int
    """Updates done."""
    checkpoint: Path
    interrupted_by: signal.Signals | None
    measurement: Measurement | None
    """The measurement of this process's steps; None where there were too few to meter one and time another."""
    table: QuantityTable
    """Rule, count and meter of every quantity; without a measurement, empty."""
    first_step: int
    """Step of the checkpoint that training continued from; 0 for a new run."""

    def __repr__(self) -> str:
        stopped = "" if self.interrupted_by is None else f", stopped by {self.interrupted_by.name}"
        done = f"Outcome(step {self.step:,}{stopped}, '{self.checkpoint}')"
        if self.first_step == self.step:
            return f"{done}\nno step was left: the run was complete; `napkin report` writes a page with its table"
        return f"{done}\n{self.table!r}" if self.table else done


def train(
    recipe: Recipe | StrPath,
    folder: StrPath,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    progress: Progress = lambda doing: None,
) -> Outcome:
    """Plan, train and reconcile a run in `folder`: start it, or resume it if it exists.

    Args:
        recipe: the recipe, or its TOML file.
        folder: a new folder, or that of a run of the same recipe.
        on_step: called with the metrics of each step.
        on_message: called with messages for the user: damaged checkpoints, skipped steps, a nearly full disk.
        progress: called with a description of each stage before the first step.

    Under torchrun each rank calls this. Raises NapkinError where the folder holds anything else than a run of this
    recipe, where files are missing or damaged, and where the step does not fit into the memory.
    """
    recipe = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    with join_ranks(recipe.training) as ranks:
        method, run = create_or_open_run(recipe, folder, progress=progress, on_message=on_message, ranks=ranks)
        return train_run(method, run, on_step=on_step, on_message=on_message)


def train_run(
    method: Method,
    run: RunFolder,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a run to its end, from its newest good checkpoint if it has one, and write its metrics and checkpoints.

    The steps that remain are bit for bit those of a run that was never stopped, on the same machine with the same
    number of threads: weights, moments and step number come from the checkpoint, everything else is a function of the
    step number. Signals that ask it to stop (see `signals.py`) end it after the current step, with a checkpoint; an
    evaluation, or a step of many micro-batches, is interrupted and repeated on resuming. With several ranks all call
    this, interrupt nothing, and stop after the same step; rank 0 writes. `callbacks` are called after the run's own.
    """
    plan = method.plan
    with run.locked(), catch_interruption() as interruption:
        run.remove_leftovers()
        run.upgrade()
        # The process may have been killed between creating the folder and writing the plan.
        if plan is not None and not (run.path / "plan.json").exists():
            run.write_json("plan.json", plan_file_of(plan))
        step = method.step()
        loop = TrainingLoop(method, run, on_message, interruption, step)
        metrics_log = MetricsLog(loop)
        checkpointing = Checkpointing(loop, metrics_log)
        for warning in () if plan is None else plan.warnings:
            on_message(warning)
        accounting = Accounting(step)
        loop.callbacks = [
            method.evaluation(),
            metrics_log,
            accounting,
            checkpointing,
            Trackers(),
            OnStep(on_step),
            *method.callbacks(),
            *callbacks,
        ]
        with deterministic_algorithms(method.recipe.training.deterministic):
            loop.run_to_end()
        assert checkpointing.last is not None
        accounting.write(loop)
        stopped_by, last = interruption.signal, checkpointing.last.path
        return Outcome(
            loop.train_state, loop.step, last, stopped_by, accounting.measurement, accounting.table, loop.first_step
        )


# Create a run, or open one to continue it: files are verified, the step is planned, plan.json is written. With several
# ranks, rank 0 does this and the others read what it has written.

Run = tuple[Method, RunFolder]


def create_run(
    recipe: Recipe,
    folder: StrPath,
    *,
    progress: Progress = lambda doing: None,
    on_message: Callable[[str], None] = lambda message: None,
    ranks: Ranks = ALONE,
    planner: Planner = plan_resolved,
) -> Run:
    """Check and plan a recipe of any kind of training, make its run folder and write plan.json.

    `planner` plans the steps of pre-training. A job that torchrun restarts has the same command line as before: it
    continues the run that it had created, if the recipe is the same. Otherwise raises NapkinError where the folder
    exists, the files do not belong together or the step does not fit; nothing is left behind then.
    """
    path, setting = Path(folder), Setting(ranks, progress, on_message, planner)

    def create() -> Run:
        if ranks.info.restart_count and is_run(path) and not recipe_differences(recipe, path):
            return _open(path, setting, None if isinstance(recipe, TuningRecipe) else recipe.data)
        RunFolder.refuse_existing(path)
        method = prepare(recipe, path, setting)
        plan = method.plan
        assert plan is not None
        refuse_too_small_disk(path, whole_checkpoint_bytes(plan), plan.ledger.frozen_bytes)
        run = RunFolder.create(path, method.recipe, method.tokenizer, method.run_files(), method.write_weights)
        run.write_json("plan.json", plan_file_of(plan))
        return method, run

    return _on_rank_zero(path, setting, create)


def prepare(recipe: Recipe, folder: Path = Path(), setting: Setting | None = None) -> Method:
    """Open what the recipe of a new run names, check that it fits together, and plan its steps, which have to fit.

    Raises NapkinError for files that are missing, damaged or do not belong together.
    """
    setting = setting or Setting()
    method = method_of(recipe).begin(recipe, folder, setting)
    _plan(method, setting)
    return method


def open_run(
    folder: StrPath,
    *,
    data: DataConfig | None = None,
    parallelism: ParallelismConfig | None = None,
    progress: Progress = lambda doing: None,
    on_message: Callable[[str], None] = lambda message: None,
    ranks: Ranks = ALONE,
    planner: Planner = plan_resolved,
) -> Run:
    """Open a run folder and plan what it holds; training continues from its newest good checkpoint.

    `data` says where the token files of a run of pre-training are, if they have moved without the run, and
    `parallelism` is the layout of its ranks, if that has changed; the run's recipe then says so. Raises NapkinError
    where the files are not the same, and where the ranks cannot train it in this layout.
    """
    setting = Setting(ranks, progress, on_message, planner)
    return _on_rank_zero(Path(folder), setting, lambda: _open(Path(folder), setting, data, parallelism))


def create_or_open_run(
    recipe: Recipe,
    folder: StrPath,
    *,
    progress: Progress = lambda doing: None,
    on_message: Callable[[str], None] = lambda message: None,
    ranks: Ranks = ALONE,
) -> Run:
    """Open the folder if it is a run of this recipe, otherwise create the run; see `create_run` and `open_run`.

    Raises NapkinError where the folder is a run of another recipe.
    """

    def is_of_this_recipe() -> bool:
        if not is_run(Path(folder)):
            return False
        if differences := recipe_differences(recipe, Path(folder)):
            raise NapkinError(
                f"'{folder}' is a run of another recipe: there {'; '.join(differences)}: choose another folder, or "
                f"continue that run with `napkin resume {folder}`"
            )
        return True

    if not ranks.broadcast_from_zero(is_of_this_recipe):
        return create_run(recipe, folder, progress=progress, on_message=on_message, ranks=ranks)
    data = None if isinstance(recipe, TuningRecipe) else recipe.data
    return open_run(folder, data=data, progress=progress, on_message=on_message, ranks=ranks)


def recipe_differences(recipe: Recipe, folder: Path) -> list[str]:
    """The differences of a run's recipe from `recipe`, as "model.n_layers is 4, not 2".

    Fields that `recipe` leaves open are not compared, nor are threads, which ranks divide; a file of [data] that has
    moved is the same. The [model] of a recipe of tuning is that of its base model.
    """
    run = RunFolder.open(folder)
    resolved = dataclasses.asdict(run.recipe)
    return [
        f"{table}.{name} is {resolved[table][name]}, not {value}"
        for table, values in dataclasses.asdict(recipe).items()
        if not (table == "model" and isinstance(recipe, TuningRecipe))
        for name, value in values.items()
        if value not in (None, "auto")
        and (table, name, value) != ("model", "vocab_size", 0)
        and name != "threads"
        and value != resolved[table][name]
        and not (table == "data" and _has_moved(run, name, value))
    ]


def _open(folder: Path, setting: Setting, data: DataConfig | None, parallelism: ParallelismConfig | None = None) -> Run:
    run = RunFolder.open(folder)
    # A file that is damaged is named now, and not by the report, after all steps.
    read_run_record(run.path)
    recipe = _with_changes(run, data, parallelism)
    method = method_of(recipe).reopen(run, recipe, setting)
    plan = _plan(method, setting)
    began = read_json(run.path / "plan.json", PlanFile)
    if began is not None and began.predicted_loss is not None:
        # The loss stays the one that was predicted when the run began.
        method.plan = dataclasses.replace(plan, predicted_loss=began.predicted_loss)
    if recipe != run.recipe:
        with run.locked():
            run.replace_recipe(recipe)
            if parallelism is not None:
                run.write_json("plan.json", plan_file_of(method.plan or plan))
    return method, run


def _plan(method: Method, setting: Setting) -> Plan:
    method.plan = plan = method.make_plan(setting)
    method.resolved = plan.resolved
    refuse_what_does_not_fit(plan)
    return plan


def _on_rank_zero(folder: Path, setting: Setting, make: Callable[[], Run]) -> Run:
    """Rank 0 makes or opens the run; the others read what it has written."""
    runs: list[Run] = []

    def make_and_agree() -> int | str | None:
        runs.append(make())
        return runs[0][0].recipe.training.micro_batch_size

    micro_batch_size = setting.ranks.broadcast_from_zero(make_and_agree)
    if setting.ranks.is_rank_zero:
        return runs[0]
    run = ReadOnlyRunFolder.open(folder)
    # Resolved from each rank's own free memory, "auto" could differ between ranks.
    training = dataclasses.replace(run.recipe.training, micro_batch_size=micro_batch_size)
    recipe = dataclasses.replace(run.recipe, training=training)
    return method_of(recipe).reopen(run, recipe, setting), run


def _with_changes(run: RunFolder, data: DataConfig | None, parallelism: ParallelismConfig | None) -> Recipe:
    """The run's recipe with the present paths of its token files, and with another layout. Raises NapkinError where the
    training tokens are not those that the run was trained with."""
    recipe = run.recipe
    if isinstance(recipe, TuningRecipe):
        if parallelism is not None or data not in (None, recipe.data):
            raise NapkinError(
                f"'{run.path}' is a run of tuning, which continues with the files and the layout that it began with: "
                "leave out --data and --parallelism"
            )
        return recipe
    data = data or recipe.data
    train: TrainFiles
    # Where the run was moved together with its files, see `RunFolder.token_file`.
    match data.train:
        case str():
            train = run.token_file(data.train)
        case dict():
            train = {run.token_file(path): weight for path, weight in data.train.items()}
        case paths:
            train = tuple(map(run.token_file, paths))
    if train != recipe.data.train:
        recipe = _with_train(recipe, train)
        trained_with = _checksum_before(run)
        if trained_with is not None and _train_checksum(recipe) != trained_with:
            paths = ", ".join(f"'{path}'" for path in paths_and_weights(train)[0])
            raise NapkinError(
                f"{paths}: these are not the tokens that '{run.path}' was trained with: name the same files at their "
                "new place, or start a new run with `napkin train`"
            )
    validation = None if data.validation is None else run.token_file(data.validation)
    data = dataclasses.replace(recipe.data, validation=validation)
    return dataclasses.replace(recipe, data=data, parallelism=parallelism or recipe.parallelism)


def _has_moved(run: RunFolder, name: str, now: TrainFiles | None) -> bool:
    """True if `now`, another value of the run's data.`name`, names the same contents at another path."""
    try:
        match name, now:
            case "tokenizer", str():
                return load_tokenizer(now).fingerprint == run.tokenizer.fingerprint
            case "train", str() | tuple() | dict():
                return _train_checksum(_with_train(run.recipe, now)) == _checksum_before(run)
            case "validation", str():
                before = run.recipe.data.validation
                if before is None:
                    return False
                tokens = TokenFile.open(now, tokenizer_fingerprint=run.tokenizer.fingerprint)
                # A run does not record the checksum of its validation tokens: where the old file is gone, the name has
                # to do.
                if Path(before).is_file():
                    return TokenFile.open(before).sha256 == tokens.sha256
                return Path(before).name == Path(now).name
    except NapkinError:
        pass
    return False


def _with_train(recipe: Recipe, train: TrainFiles) -> Recipe:
    """The recipe with other names of its training files, in its curriculum too: the first is the first, and so on."""
    names = dict(zip(paths_and_weights(recipe.data.train)[0], paths_and_weights(train)[0], strict=False))
    curriculum = tuple(renamed_phase(line, names) for line in recipe.data.curriculum)
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=train, curriculum=curriculum))


def _train_checksum(recipe: Recipe) -> str:
    return open_mixture(recipe, TokenFile.open).sha256


def _checksum_before(run: RunFolder) -> str | None:
    """The checksum of the tokens that the run was trained with; None before its first checkpoint if they are gone."""
    for path in checkpoint_paths(run.checkpoints):
        try:
            return read_checkpoint(path, verify=False).state.train_tokens
        except CorruptFile:
            continue
    try:
        return _train_checksum(run.recipe)
    except NapkinError:
        return None
