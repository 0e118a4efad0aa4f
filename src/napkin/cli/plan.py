"""`napkin plan`."""

from dataclasses import dataclass

from napkin.cli import budget
from napkin.cli.options import Switch
from napkin.cli.recipes import RecipeOptions, parse_with_recipe
from napkin.cli.terminal import print_json, progress_line


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """Say what a run will take, before it starts and without allocating anything of it. No text is needed: without a
    tokenizer, --model.vocab-size says how many tokens it would have. By rule alone, for any size and any accelerator:
    napkin plan --params 70B --tokens 15T --on 1024xH100."""

    json: Switch = False
    """Print the plan for programs."""


def main(arguments: list[str]) -> None:
    """Print rule and count side by side, and whether the run fits; status 2 where it does not."""
    if any(argument.split("=")[0] == "--params" for argument in arguments):
        budget.main(arguments)
        return
    options, _ = parse_with_recipe(PlanOptions, "plan", arguments)
    with progress_line("planning") as line:
        from napkin.cli.planning import describe_plan
        from napkin.training.fitting import refuse_what_does_not_fit
        from napkin.training.runs import plan_as_dict, plan_only

        recipe, precision, plan = plan_only(options.recipe, progress=line.retitle)
    if options.json:
        print_json(plan_as_dict(plan, precision))
    else:
        describe_plan(plan, precision)
    refuse_what_does_not_fit(recipe, precision, plan)
