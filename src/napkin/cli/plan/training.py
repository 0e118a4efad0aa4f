"""`napkin plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from napkin.cli.common.options import Switch, require_above_zero
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import notify, print_json
from napkin.cli.plan import layouts
from napkin.cli.plan.failure_options import FailureOptions
from napkin.errors import NapkinError


@dataclass(frozen=True)
class PlanOptions(layouts.LayoutOptions, FailureOptions):
    """Say what a run will take before it starts, without allocating its tensors. No text is needed: without a
    tokenizer, --model.vocab-size gives the number of token ids. Other plans, with options of their own: by rule alone,
    for any size and any accelerator, napkin plan rule --params 70B --tokens 15T --on 1024xH100; the best of all
    layouts, napkin plan layouts; a service, napkin plan service."""

    FIRST = ("preset", "on", "tokens", "layout", "within", "memory-options", *RecipeOptions.FIRST)

    by: Literal["operator", "module", "phase"] = "operator"
    """What the seconds are split by."""
    watts: float | None = None
    """Power of one device; None is the catalogue's, if it has it."""
    law: str | None = None
    """A file of `napkin law fit` or `napkin ladder`: also predict the validation loss, with its 90% interval."""
    rules: Switch = False
    """Also print the rules of thumb, each beside the count of the same quantity, and its error."""
    decode_batch_size: int = 64
    """Sequences that are generated at a time, for the rules on generating."""
    memory_options: Switch = False
    """Also print what each memory option, such as recomputing activations, saves and costs."""


@recipe_command("plan", PlanOptions)
def plan_command(options: PlanOptions, source: RecipeSource) -> None:
    """Print rule and count side by side, and whether the run fits; the status is 2 if it does not."""
    require_above_zero(options, "decode_batch_size", "watts")
    options.refuse_impossible()
    if options.law is not None and (layouts.chosen(options) or options.timeline is not None):
        raise NapkinError("--law predicts the loss of a plan of one layout: leave --layout and --timeline out")
    given = source.given()
    if layouts.chosen(options):
        layouts.search(options.recipe, options, given)
        return
    if options.on is not None and (
        options.timeline is not None or layouts.splits_more_than_the_batch(options.recipe, options.on)
    ):
        layouts.print_one(options.recipe, options)
        return
    further = options.law is not None or options.rules or options.memory_options
    is_open = not further and layouts.leaves_layout_open(options.on, given)
    if is_open and (why := layouts.obstacle(options.recipe, options.on or "", given)):
        layouts.search(options.recipe, options, given, why=why)
        return
    with progress_line("planning") as line:
        from napkin.cli.plan.output import find_memory_options, print_memory_options, print_plan, print_rules
        from napkin.planning.planner import plan as make_plan
        from napkin.planning.step.memory_savings import refuse_what_does_not_fit
        from napkin.planning.step.plan_file import plan_file_of

        plan = make_plan(options.recipe, options.on, progress=line.retitle).at(
            usd_per_hour=options.usd_per_hour,
            watts=options.watts,
            mtbf_hours=options.mtbf_hours,
            restart_minutes=options.restart_minutes,
        )
        if options.law is not None:
            from napkin.scaling.fitted_law import read_law
            from napkin.scaling.predicted_loss import with_predicted_loss

            plan = with_predicted_loss(plan, read_law(options.law), Path(options.law).name)
        memory_options = find_memory_options(plan, options.on, line.retitle) if options.memory_options else []
    if is_open and not plan.fits:
        layouts.search(options.recipe, options, given, why=layouts.too_large_whole(plan.peak_bytes, plan.site))
        return
    if options.json:
        print_json(
            {**vars(plan_file_of(plan)), **({"memory_options": memory_options} if options.memory_options else {})}
        )
    else:
        print_plan(plan, by=options.by)
        if options.rules:
            print_rules(plan, decode_batch_size=options.decode_batch_size)
        if options.memory_options:
            print_memory_options(plan, memory_options)
    refuse_what_does_not_fit(plan)
    for warning in plan.warnings:
        notify(warning)
