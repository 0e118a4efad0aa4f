"""`napkin plan --layout`, `--within`, `--for`, `--timeline`, and plans of layouts that split more than the batch."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.accounting.rules import adamw_bytes_rule, bytes_per_parameter, parameters_rule
from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, require_above_zero
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, TokenBudget, recipe_command, with_tokens
from napkin.cli.common.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.hardware.cluster import find_cluster
from napkin.planning.step.site import fits, memory_of
from napkin.recipe.layout import layout_of_recipe
from napkin.recipe.recipe import Recipe
from napkin.units import format_bytes, parse_dollars, parse_seconds

if TYPE_CHECKING:
    from napkin.planning.fit import Tried
    from napkin.planning.layouts.layout_plan import LayoutPlan
    from napkin.planning.step.site import Site

LAYOUT_FIELDS = {"training.parallelism", "training.micro_batch_size", "training.recompute", "training.loss_chunk_size"}
"""Fields of [training] that a search of layouts chooses."""
_WHOLE = "where each device has the whole model, a step needs"
USUAL_TOKENS = 2**22
"""Per step, where a recipe sets no batch size: about what Llama 2 and GPT-3 were trained with."""


@dataclasses.dataclass(frozen=True)
class LayoutOptions(RecipeOptions, TokenBudget, JsonOption):
    """Search how devices divide the work of a run: the best layouts, and why the others lose; or the fewest devices for
    a time, or the fastest for a budget."""

    FIRST = ("preset", "on", "tokens", "layout", "within", "for", *RecipeOptions.FIRST)

    on: str | None = None
    """Accelerators to plan for: A100-80GB; 64xH100, in nodes as they are sold; 8x8xH100, 8 nodes of 8; 4xp4d.24xlarge,
    4 such nodes. `napkin hardware` lists them, and a TOML file describes another: 8xmydevice.toml. The batch is split
    among them. None is this machine."""
    usd_per_hour: float | None = None
    """Price of one device; None is the catalogue's, if it has one."""
    layout: Literal["auto", "any"] | None = None
    """auto searches all layouts of the devices that napkin trains: sizes of all dimensions, micro-batch,
    recomputation, schedule and stages; any also those that it does not train. What the recipe says of these is not
    used."""
    within: str | None = None
    """A time to train for, as in 10days: the fewest devices of that kind that are fast enough, up to the number of
    --on, or any number if it names one device."""
    for_: Annotated[str | None, tyro.conf.arg(name="for")] = None
    """A budget, as in 50000usd: the number of devices that is fastest within it."""
    stack: str | None = None
    """The program that trains, where it is not napkin: megatron, nemo, torchtitan and others of `napkin stacks`, or a
    TOML file of one. Says what is fused, overlapped, recomputed, sent and kept; layouts that napkin does not train are
    planned too."""
    timeline: str | None = None
    """Write a picture of one step, stage by stage, to this SVG file."""

    def __post_init__(self) -> None:
        """Raise NapkinError for a price that cannot be."""
        require_above_zero(self, "usd_per_hour")


@recipe_command("plan layouts", LayoutOptions)
def main(options: LayoutOptions, source: RecipeSource) -> None:
    search(options.recipe, options, source.given())


def chosen(options: LayoutOptions) -> bool:
    """True if the options ask for a search."""
    return any(each is not None for each in (options.layout, options.within, options.for_))


def leaves_layout_open(on: str | None, given: set[str]) -> bool:
    """True if several devices are asked for, and neither recipe nor options say how they divide the work."""
    if on is None or find_cluster(on).n_devices == 1:
        return False
    return not any(field in LAYOUT_FIELDS or field.startswith("parallelism.") for field in given)


def obstacle(recipe: Recipe, on: str, given: set[str]) -> str | None:
    """Why devices that each hold the whole model cannot train a recipe, where that is known without counting."""
    cluster, model = find_cluster(on), recipe.model
    batch_size = recipe.training.batch_size
    if "training.batch_size" not in given and batch_size % cluster.n_devices:
        return f"the default of {batch_size} sequences per step does not divide among {cluster.n_devices:,} devices"
    parameters = parameters_rule(
        vocab_size=model.vocab_size, d_model=model.d_model, n_layers=model.n_layers, tied=model.tie_embeddings
    )
    state = adamw_bytes_rule(parameters, bytes_per_parameter=bytes_per_parameter(recipe.optimizer.name))
    if not fits(state, cluster.device.usable_bytes):
        needed, device = f"{format_bytes(state)} by rule, without activations", cluster.device
        return f"{_WHOLE} {needed}, {memory_of(device.name, device.usable_bytes)}"
    return None


def too_large_whole(peak_bytes: int, site: "Site") -> str:
    """The same for a step that was counted."""
    return f"{_WHOLE} {format_bytes(peak_bytes)}, {memory_of(site.device_name, site.memory_bytes)}"


def search(recipe: Recipe, options: LayoutOptions, given: set[str], *, why: str | None = None) -> None:
    """Print the best layouts, or the least hardware; `why` says why they are searched where that was not asked for."""
    if options.on is None:
        raise NapkinError("--layout, --within and --for plan devices of the catalogue: name them, as in --on 512xH100")
    within = None if options.within is None else parse_seconds(options.within)
    budget = None if options.for_ is None else parse_dollars(options.for_)
    picture = _picture_path(options)
    cluster = find_cluster(options.on)
    recipe, chosen_batch = _with_batch(recipe, cluster.n_devices, given=given)
    if options.tokens is not None:
        recipe = with_tokens(recipe, options.tokens)
    if why is not None and not options.json:
        say(f"{why}: the best of all layouts follows, as with --layout auto")
    with progress_line("planning") as line:
        from napkin.cli.plan.output import print_search, print_tried
        from napkin.planning.fit import MOST_DEVICES, least_hardware
        from napkin.planning.layouts.costs import LayoutCosts
        from napkin.planning.layouts.search import search_layouts, tensor_sizes, with_best_counted
        from napkin.planning.layouts.stack import find_stack
        from napkin.planning.layouts.stack_plan import stack_machine
        from napkin.planning.planner import resolve
        from napkin.planning.step.machine import CatalogueMachine
        from napkin.recipe.training_config import ParallelismConfig

        stack = find_stack(options.stack or "napkin")
        machine = stack_machine(options.on, stack)
        training = dataclasses.replace(recipe.training, micro_batch_size=None)
        whole = dataclasses.replace(recipe, training=training, parallelism=ParallelismConfig())
        resolved = resolve(whole, CatalogueMachine(cluster.device, 1, node=cluster.node))
        resolved = dataclasses.replace(resolved, world_size=cluster.n_devices)
        sizes = tensor_sizes(resolved, cluster.n_devices if cluster.n_devices > 1 else 64)
        costs = LayoutCosts(
            resolved, machine, sizes, usd_per_hour=options.usd_per_hour, stack=stack, progress=line.retitle
        )
        trains = options.layout != "any" and options.stack is None
        tried: list[Tried] = []
        if within is not None or budget is not None:
            most = cluster.n_devices if cluster.n_devices > 1 else MOST_DEVICES
            tried = least_hardware(
                costs, within_seconds=within, for_usd=budget, most=most, trains=trains, progress=line.retitle
            )
            costs = costs.on(tried[-1].machine)
        result = search_layouts(costs, trains=trains, progress=line.retitle)
        if trains:
            # A layout that napkin does not train has no step to count.
            result = with_best_counted(result, line.retitle)
    if options.json:
        print_json({"tried": [each.as_values() for each in tried], **result.as_values()})
    else:
        if tried:
            print_tried(tried)
        print_search(result, chosen_batch)
        if options.tokens is None and "training.steps" not in given:
            say("nothing says how long the run is: --tokens 300B plans it for as many tokens", style="dim")
    if picture is not None:
        _write_picture(result.plans[0], picture)


def print_one(recipe: Recipe, options: LayoutOptions) -> None:
    """Print the plan of the recipe's own layout."""
    assert options.on is not None
    picture = _picture_path(options)
    with progress_line("planning") as line:
        from napkin.cli.plan.output import print_layout_plan, refuse_too_large
        from napkin.planning.layouts.stack import find_stack
        from napkin.planning.layouts.stack_plan import plan_stack
        from napkin.planning.planner import plan as make_plan

        if options.stack is not None:
            stack = find_stack(options.stack)
            plan = plan_stack(recipe, options.on, stack, usd_per_hour=options.usd_per_hour, progress=line.retitle)
        else:
            plan = make_plan(recipe, options.on, progress=line.retitle).at(usd_per_hour=options.usd_per_hour).layout
    if plan is None:
        raise NapkinError(
            f"it is not known what connects the devices of {options.on}: describe them in a TOML file with their "
            "link_bandwidth, as `napkin hardware` shows them"
        )
    if options.json:
        print_json(plan.as_values())
    else:
        print_layout_plan(plan)
    if picture is not None:
        _write_picture(plan, picture)
    refuse_too_large(plan)


def splits_more_than_the_batch(recipe: Recipe, on: str) -> bool:
    """True if a recipe's layout of these devices has its own kind of plan."""
    return not layout_of_recipe(recipe, find_cluster(on).n_devices).splits_only_batches


def _with_batch(recipe: Recipe, n_devices: int, *, given: set[str]) -> tuple[Recipe, str | None]:
    if "training.batch_size" in given:
        return recipe, None
    batch_size = max(1, USUAL_TOKENS // recipe.model.context_length)
    if n_devices % batch_size:
        # A multiple that leaves many ways to divide it.
        batch_size = n_devices * 2 ** max(0, round(math.log2(batch_size / n_devices)))
    training = dataclasses.replace(recipe.training, batch_size=batch_size, micro_batch_size=None)
    notice = (
        f"{batch_size:,} sequences of {recipe.model.context_length:,} tokens per step, because the recipe sets no "
        "number: --training.batch-size"
    )
    return dataclasses.replace(recipe, training=training), notice


def _picture_path(options: LayoutOptions) -> Path | None:
    if options.timeline is None:
        return None
    path = Path(options.timeline)
    refuse_existing(path)
    return path


def _write_picture(plan: "LayoutPlan", path: Path) -> None:
    from napkin.report.timeline_picture import timeline_svg

    with folder_for(path):
        atomic_write_text(path, timeline_svg(plan.timeline))
    say(f"wrote {path}: one step, a row for each rank of the pipeline")
