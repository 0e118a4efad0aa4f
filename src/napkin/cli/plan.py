"""`napkin plan`."""

from dataclasses import dataclass
from pathlib import Path

from napkin.cli.planning import describe_plan
from napkin.cli.recipes import RecipeOptions, parse_with_recipe
from napkin.cli.terminal import print_json, progress_line
from napkin.errors import NapkinError


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """Say what a run will take, before it starts and without allocating anything of it."""

    json: bool = False
    """Print the plan for programs."""


def main(arguments: list[str]) -> None:
    """Print rule and count side by side, and whether the run fits; status 2 where it does not."""
    options, _ = parse_with_recipe(PlanOptions, "plan", arguments)
    recipe = options.recipe
    with progress_line("planning") as line:
        from napkin.hardware.host import detect_host
        from napkin.tokenizer.storage import load_tokenizer
        from napkin.training.preparation import make_plan, refuse_what_does_not_fit, resolve
        from napkin.training.runs import plan_as_dict

        vocab_size = recipe.model.vocab_size
        if not vocab_size and not Path(recipe.data.tokenizer).exists():
            raise NapkinError(
                f"'{recipe.data.tokenizer}' does not exist, so the vocabulary is unknown: "
                "train a tokenizer, or give --model.vocab-size"
            )
        host = detect_host()
        recipe, precision = resolve(recipe, vocab_size or load_tokenizer(recipe.data.tokenizer).vocab_size, host)
        plan = make_plan(recipe, precision, host, line.retitle)
    if options.json:
        print_json(plan_as_dict(plan, precision))
    else:
        describe_plan(plan, precision)
    refuse_what_does_not_fit(recipe, precision, plan)
