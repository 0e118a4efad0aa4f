"""`napkin plan`."""

from dataclasses import dataclass
from typing import Literal

from napkin.cli import budget
from napkin.cli.options import Switch
from napkin.cli.recipe_options import RecipeOptions, parse_with_recipe
from napkin.cli.terminal import print_json, progress_line
from napkin.errors import NapkinError


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """Say what a run will take, before it starts and without allocating anything of it. No text is needed: without a
    tokenizer, --model.vocab-size says how many tokens it would have. By rule alone, for any size and any accelerator:
    napkin plan --params 70B --tokens 15T --on 1024xH100."""

    on: str | None = None
    """Accelerators that are not at hand: A100-80GB, 8xH100; `napkin hardware` lists them. The batch is split among
    several. None is this machine."""
    by: Literal["operator", "module", "phase"] = "operator"
    """What the seconds are split by."""
    usd_per_hour: float | None = None
    """Price of one device; None is the catalogue's, if it knows one."""
    watts: float | None = None
    """Power of one device; None is the catalogue's, if it knows it."""
    rules: Switch = False
    """Print napkin mathematics too: each rule beside the count of the same thing, and how far off it is."""
    memory_options: Switch = False
    """Print what each memory option would save, and what it would cost."""
    json: Switch = False
    """Print the plan for programs."""


def main(arguments: list[str]) -> None:
    """Print rule and count side by side, and whether the run fits; status 2 where it does not."""
    if any(argument.split("=")[0] == "--params" for argument in arguments):
        budget.main(arguments)
        return
    options, _ = parse_with_recipe(PlanOptions, "plan", arguments)
    for name in ("usd_per_hour", "watts"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise NapkinError(f"--{name.replace('_', '-')} is {value}: use a number above 0")
    with progress_line("planning") as line:
        from napkin.cli.memory_options_view import describe_memory_options, find_memory_options
        from napkin.cli.plan_view import describe_plan, describe_rules
        from napkin.planning.micro_batch import refuse_what_does_not_fit
        from napkin.planning.plan_file import plan_file_of
        from napkin.planning.planner import plan as make_plan

        plan = make_plan(options.recipe, options.on, progress=line.retitle).at(
            usd_per_hour=options.usd_per_hour, watts=options.watts
        )
        memory_options = find_memory_options(plan, options.on, line.retitle) if options.memory_options else []
    if options.json:
        print_json(
            {**vars(plan_file_of(plan)), **({"memory_options": memory_options} if options.memory_options else {})}
        )
    else:
        describe_plan(plan, by=options.by)
        if options.rules:
            describe_rules(plan)
        if options.memory_options:
            describe_memory_options(plan, memory_options)
    refuse_what_does_not_fit(plan)
