"""`napkin train` begins a run, `napkin resume` continues one."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from napkin.cli.common.options import JsonOption, RunOptions, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, TokenBudget, recipe_command
from napkin.cli.common.terminal import notify, print_json, say
from napkin.recipe.data_config import TrainFiles
from napkin.recipe.training_config import ParallelismConfig

if TYPE_CHECKING:
    from napkin.checkpoint.state import Checkpoint


@dataclass(frozen=True)
class TrainOptions(RecipeOptions, TokenBudget, JsonOption):
    """Plan a run, train it, meter it, and reconcile plan and measurement."""

    FIRST = (
        *("preset", "run", "tokens", "data.train", "data.validation", "data.tokenizer", "optimizer.learning-rate"),
        *(name for name in RecipeOptions.FIRST if name != "model.vocab-size"),
    )

    run: str | None = None
    """Folder to make for the run, which must not exist; None is runs/ and the name of the recipe, or runs/run."""
    law: str | None = None
    """A file of `napkin law fit` or `napkin ladder`: the validation loss that it predicts is in the plan, and beside
    the measured one at the end."""


@recipe_command("train", TrainOptions)
def train_command(options: TrainOptions, source: RecipeSource) -> int:
    folder = options.run or source.folder()
    from napkin.distributed.joining import join_ranks

    with join_ranks(options.recipe.training) as ranks:
        with progress_line("starting", shown=ranks.is_rank_zero) as line:
            from napkin.cli.train.following import train_and_report
            from napkin.planning.planner import plan_resolved
            from napkin.training.run import create_run

            planner = plan_resolved
            if options.law is not None:
                from napkin.scaling.budget_answer import predicting

                planner = predicting(options.law)
            preparation, run = create_run(options.recipe, folder, progress=line.retitle, ranks=ranks, planner=planner)
        return train_and_report(preparation, run, as_json=options.json)


@dataclass(frozen=True)
class MovedData:
    """The present place of the run's token files, if they have moved; the run's recipe then names it."""

    train: TrainFiles = ()
    """Files of the run's training tokens, in the same order and with the same weights; other files are refused. None
    is as before."""
    validation: str | None = ""
    """Its validation tokens; "" is as before, None disables evaluation."""


@dataclass(frozen=True)
class ResumeOptions(RunOptions):
    """Continue a run from its newest intact checkpoint, as if it had never stopped.

    Another number of ranks, or another layout of them, gives the same losses to the rounding of sums."""

    data: MovedData = field(default_factory=MovedData)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """The layout of the ranks from now on, in place of all of the recipe's [parallelism]: the sizes that are not given
    are 1, or what the others leave. Without any of these options it is as before."""


@takes(ResumeOptions)
def resume_command(arguments: Sequence[str]) -> int:
    """Continue a run."""
    options = parse(ResumeOptions, "resume", arguments)
    from napkin.distributed.joining import join_ranks
    from napkin.runs.run_folder import RunFolder

    recipe = RunFolder.open(options.run).recipe
    from napkin.training.callbacks import finished_checkpoint

    validation = recipe.data.validation if options.data.validation == "" else options.data.validation
    data = dataclasses.replace(recipe.data, train=options.data.train or recipe.data.train, validation=validation)
    # Any option names a layout, be it the default one.
    names_layout = any(argument.startswith("--parallelism.") for argument in arguments)
    finished: list[Checkpoint] = []

    def find_finished() -> bool:
        finished.extend(filter(None, [finished_checkpoint(options.run)]))
        return bool(finished)

    with join_ranks(recipe.training) as ranks:
        with progress_line("starting", shown=ranks.is_rank_zero) as line:
            if data == recipe.data and ranks.broadcast_from_zero(find_finished):
                if ranks.is_rank_zero:
                    _say_it_is_finished(options, finished[0])
                return 0
            from napkin.training.run import open_run

            method, run = open_run(
                options.run,
                data=data,
                parallelism=options.parallelism if names_layout else None,
                progress=line.retitle,
                on_message=notify,
                ranks=ranks,
            )
        from napkin.cli.train.following import train_and_report

        return train_and_report(method, run, as_json=options.json)


def _say_it_is_finished(options: ResumeOptions, checkpoint: "Checkpoint") -> None:
    """Print what training would have said, without the plan and the token files, which nothing needs any more."""
    from napkin.accounting.quantities import QuantityTable
    from napkin.report.page import write_report
    from napkin.runs.run_folder import RunFolder

    run = RunFolder.open(options.run)
    with run.locked():
        run.remove_leftovers()
        report = write_report(run.path, training=False)
    step = checkpoint.state.step
    if options.json:
        state = {"run": run.path, "step": step, "stopped_by": None}
        print_json({**state, "checkpoint": checkpoint.path, "table": QuantityTable()})
        return
    say(f"{run.path} is at step {step:,} of {run.recipe.training.steps:,}: nothing was done")
    say(f"report: {report}", wrap=False)
