"""`napkin train`."""

from dataclasses import dataclass

from napkin.cli.common.options import JsonOption
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, TokenBudget, recipe_command


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
def main(options: TrainOptions, source: RecipeSource) -> int:
    folder = options.run or source.folder()
    from napkin.distributed.joining import join_ranks

    with join_ranks(options.recipe.training) as ranks:
        with progress_line("starting", shown=ranks.is_rank_zero) as line:
            from napkin.cli.train.following import train_and_report
            from napkin.planning.planner import plan_resolved
            from napkin.training.start import create_run

            planner = plan_resolved
            if options.law is not None:
                from napkin.scaling.predicted_loss import predicting

                planner = predicting(options.law)
            preparation, run = create_run(options.recipe, folder, progress=line.retitle, ranks=ranks, planner=planner)
        return train_and_report(preparation, run, as_json=options.json)
