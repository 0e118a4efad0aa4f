"""Create a run, or open one to continue it: files are verified, the step is planned, plan.json is written.

With several ranks, rank 0 does this and the others read what it has written.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from napkin.checkpoint.folder import refuse_too_small_disk
from napkin.distributed.ranks import ALONE, Ranks
from napkin.files import StrPath
from napkin.planning.planner import Planner, plan_resolved
from napkin.planning.step.failure_plan import whole_checkpoint_bytes
from napkin.planning.step.memory_savings import refuse_what_does_not_fit
from napkin.planning.step.plan_file import plan_file_of
from napkin.planning.step.run_plan import Plan
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.runs.accounting_files import PlanFile
from napkin.runs.json_file import read_json
from napkin.runs.run_folder import ReadOnlyRunFolder, RunFolder, is_run
from napkin.runs.run_record import read_run_record
from napkin.training.metered_step import found_again, has_moved, with_moved_data
from napkin.training.preparation import Preparation, Progress, prepare, prepare_unplanned

Run = tuple[Preparation, RunFolder]


def create_run(
    recipe: Recipe,
    folder: StrPath,
    *,
    progress: Progress = lambda doing: None,
    ranks: Ranks = ALONE,
    planner: Planner = plan_resolved,
) -> Run:
    """Check and plan a recipe, with `planner`, make its run folder and write plan.json.

    A job that torchrun restarts has the same command line as before: it continues the run that it had created, if the
    recipe is the same. Otherwise raises NapkinError where the folder exists, the files do not belong together or the
    step does not fit; nothing is left behind then.
    """

    def create() -> Run:
        if ranks.info.restart_count and is_run(Path(folder)) and not recipe_differences(recipe, Path(folder)):
            return _open(folder, progress, ranks, recipe.data, planner=planner)
        RunFolder.refuse_existing(folder)
        preparation, plan = _planned(prepare(recipe, progress=progress, ranks=ranks, planner=planner))
        refuse_too_small_disk(Path(folder), whole_checkpoint_bytes(plan))
        run = RunFolder.create(folder, preparation.recipe, preparation.tokenizer)
        run.write_json("plan.json", plan_file_of(plan))
        return preparation, run

    return _on_rank_zero(ranks, folder, create)


def open_run(
    folder: StrPath,
    *,
    data: DataConfig | None = None,
    parallelism: ParallelismConfig | None = None,
    progress: Progress = lambda doing: None,
    ranks: Ranks = ALONE,
    planner: Planner = plan_resolved,
) -> Run:
    """Open a run folder and plan what it holds, with `planner`; training continues from its newest good checkpoint.

    `data` says where its token files are, if they have moved without the run, and `parallelism` is the layout of its
    ranks, if that has changed; the run's recipe then says so. Raises NapkinError where the files are not the same, and
    where the ranks cannot train it in this layout.
    """
    return _on_rank_zero(ranks, folder, lambda: _open(folder, progress, ranks, data, parallelism, planner=planner))


def recipe_differences(recipe: Recipe, folder: Path) -> list[str]:
    """The differences of a run's recipe from `recipe`, as "model.n_layers is 4, not 2".

    Fields that `recipe` leaves open are not compared, nor are threads, which ranks divide; a file of [data] that has
    moved is the same.
    """
    run = RunFolder.open(folder)
    resolved = dataclasses.asdict(run.recipe)
    return [
        f"{table}.{name} is {resolved[table][name]}, not {value}"
        for table, values in dataclasses.asdict(recipe).items()
        for name, value in values.items()
        if value not in (None, "auto")
        and (table, name, value) != ("model", "vocab_size", 0)
        and name != "threads"
        and value != resolved[table][name]
        and not (table == "data" and has_moved(run, name, value))
    ]


def _on_rank_zero(ranks: Ranks, folder: StrPath, make: Callable[[], Run]) -> Run:
    made: list[Run] = []

    def make_and_agree() -> int | str | None:
        made.append(make())
        return made[0][0].recipe.training.micro_batch_size

    micro_batch_size = ranks.broadcast_from_zero(make_and_agree)
    if ranks.is_rank_zero:
        return made[0]
    run = ReadOnlyRunFolder.open(folder)
    return prepare_unplanned(_as_begun(run.recipe), run.tokenizer, ranks, micro_batch_size=micro_batch_size), run


def _open(
    folder: StrPath,
    progress: Progress,
    ranks: Ranks,
    data: DataConfig | None,
    parallelism: ParallelismConfig | None = None,
    *,
    planner: Planner,
) -> Run:
    run = RunFolder.open(folder)
    # A file that is damaged is named now, and not by the report, after all steps.
    read_run_record(run.path)
    recipe = with_moved_data(run, found_again(run, data or run.recipe.data))
    if parallelism is not None:
        recipe = dataclasses.replace(recipe, parallelism=parallelism)
    begun = _as_begun(recipe)
    preparation, plan = _planned(
        _with_prediction(prepare(begun, tokenizer=run.tokenizer, progress=progress, ranks=ranks, planner=planner), run)
    )
    if recipe != run.recipe:
        with run.locked():
            run.replace_recipe(recipe)
            if parallelism is not None:
                run.write_json("plan.json", plan_file_of(plan))
    return preparation, run


def _with_prediction(preparation: Preparation, run: RunFolder) -> Preparation:
    """The preparation of a resumed run: its loss stays the one that was predicted when it began."""
    began = read_json(run.path / "plan.json", PlanFile)
    if began is None or began.predicted_loss is None or preparation.plan is None:
        return preparation
    plan = dataclasses.replace(preparation.plan, predicted_loss=began.predicted_loss)
    return dataclasses.replace(preparation, plan=plan)


def _as_begun(recipe: Recipe) -> Recipe:
    """The resolved recipe of a run. Where it leaves an option open, the run is older than that option and continues as
    it began: uncompiled, with plain kernels, its windows at the same places in every epoch."""
    if recipe.training.compile == "auto":
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, compile="off"))
    if recipe.training.kernels == "auto":
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, kernels="plain"))
    if recipe.data.windows == "auto":
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, windows="fixed"))
    return recipe


def _planned(preparation: Preparation) -> tuple[Preparation, Plan]:
    assert preparation.plan is not None
    refuse_what_does_not_fit(preparation.plan)
    return preparation, preparation.plan
