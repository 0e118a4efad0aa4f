"""`napkin recipe` prints a recipe, `napkin plan` says what its run will take, `napkin count` traces its step."""

import contextlib
import dataclasses
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w
from typing_extensions import TypedDict

from napkin.cli.common.options import (
    JsonOption,
    Switch,
    field_docstrings,
    option_choices,
    require_above_zero,
    toml_comment,
)
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import ForeignFiles, RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import notify, print_json, print_table, print_verbatim, say
from napkin.cli.plan import layouts
from napkin.cli.plan.rule import FailureOptions
from napkin.errors import NapkinError
from napkin.recipe.foreign import ForeignRun
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.units import format_bytes, format_flops, format_share

if TYPE_CHECKING:
    from napkin.hardware.target import CudaTarget


@dataclass(frozen=True)
class PlanOptions(layouts.LayoutOptions, FailureOptions, ForeignFiles):
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
    """Sequences that are generated at a time, for the rules of thumb about generation."""
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
    further = options.law is not None or options.rules or options.memory_options
    if source.foreign is not None and not layouts.chosen(options):
        options = _as_its_program_trains(options, source.foreign, further=further)
    if layouts.chosen(options):
        layouts.search(options.recipe, options, given)
        return
    if options.stack is not None and options.on is None:
        raise NapkinError("--stack plans devices of the catalogue: name them, as in --on 64xH100")
    if options.on is not None and (
        options.stack is not None
        or options.timeline is not None
        or layouts.splits_more_than_the_batch(options.recipe, options.on)
    ):
        layouts.print_one(options.recipe, options)
        return
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
            from napkin.scaling.budget_answer import with_predicted_loss
            from napkin.scaling.fitted_law import read_law

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


def _as_its_program_trains(options: PlanOptions, run: ForeignRun, *, further: bool) -> PlanOptions:
    """The options with the stack that the files belong to, where it can be planned; says which step is planned."""
    if options.stack is not None:
        return replace(options, stack=None) if options.stack == "napkin" else options
    obstacle = None
    if options.on is None:
        obstacle = "--on names no devices of the catalogue"
    elif options.recipe.training.micro_batch_size == "auto":
        obstacle = "the files give no micro-batch"
    elif further:
        obstacle = "--law, --rules and --memory-options are of that step"
    if obstacle is not None:
        notify(f"planned is napkin's own step, not that of {run.program}: {obstacle}")
        return options
    notify(f"planned as {run.program} trains: --stack napkin plans napkin's own step of the same recipe")
    return replace(options, stack=run.program)


MOST_ROWS = 40

By = Literal["component", "operator", "module", "phase"]


class Counted(TypedDict):
    """The output of `napkin count --json`: a training step, counted on fake tensors."""

    parameters: int
    flops: int
    causal_flops: int
    elementwise_flops: int
    peak_bytes: int
    reserved_bytes: int | None
    peak_by_category: dict[str, int]
    unknown_operators: dict[str, int]
    unknown_scratch: dict[str, int]
    by: By
    rows: dict[str, dict[str, int]]


@dataclass(frozen=True)
class CountOptions(RecipeOptions, ForeignFiles, JsonOption):
    """Trace a recipe's training step on fake tensors and print its FLOPs and bytes; nothing is computed. No text is
    needed: without a tokenizer, --model.vocab-size gives the number of token ids. With --training.compile on, the
    blocks are counted as torch.compile makes them."""

    by: By = "operator"
    """What the rows are summed by: component is embedding, attention projections, attention scores, feed-forward,
    norms, head, loss and optimizer; with module, equal layers share one row."""
    target: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to count for, whether this machine has one or not: its operators and its memory; auto is the recipe's
    device."""
    capability: str | None = None
    """Compute capability of the GPU: 8.0 is an A100, 9.0 an H100, 10.0 a B200. None is this machine's GPU, else 9.0."""


@recipe_command("count", CountOptions)
def count_command(options: CountOptions, _: RecipeSource) -> None:
    with progress_line("counting the step") as line:
        from napkin.cli.plan.output import print_unknown_operators, print_unknown_scratch
        from napkin.planning.planner import resolve
        from napkin.planning.step.kernel_choice import compile_obstacle
        from napkin.planning.step.machine import ThisMachine
        from napkin.train_step.step_ledger import count_step

        target, recipe = _target(options), options.recipe
        if target is not None:
            # Open settings of the recipe are decided for the target, not for this machine.
            auto, formats = recipe.training.precision == "auto", "fp32" if target.capability < (8, 0) else "bf16"
            precision = formats if auto else recipe.training.precision
            model = replace(recipe.model, attention=recipe.model.resolved_attention)
            training = replace(recipe.training, device="cpu", precision=precision)
            recipe = replace(recipe, model=model, training=training)
        resolved = resolve(recipe, ThisMachine(device=recipe.training.device))
        compiled = recipe.training.compile == "on" and compile_obstacle(resolved) is None
        ledger = count_step(
            replace(resolved, target=target or ("cpu" if options.target == "cpu" else None)),
            compiled=compiled,
            progress=lambda calls: line(calls, None, f"{calls:,} operator calls"),
        )
    if options.json:
        counted: Counted = {
            "parameters": ledger.parameters,
            "flops": ledger.flops,
            "causal_flops": ledger.causal_flops,
            "elementwise_flops": ledger.elementwise_flops,
            "peak_bytes": ledger.peak_bytes,
            "reserved_bytes": ledger.reserved_bytes,
            "peak_by_category": {**ledger.peak_by_category},
            "unknown_operators": ledger.unknown_operators,
            "unknown_scratch": ledger.unknown_scratch,
            "by": options.by,
            "rows": ledger.sums_by(options.by),
        }
        print_json(counted)
        return
    sums = ledger.sums_by(options.by, alike=True)
    from napkin.accounting.ledger import SUMS

    rows, whole = [], sum(row["flops"] for row in sums.values())
    for name, row in list(sums.items())[:MOST_ROWS]:
        sizes = (format_bytes(row[column]) for column in SUMS[2:])
        share = format_share(row["flops"] / whole) if row["flops"] else ""
        rows.append((name or "(outside of modules)", f"{row['calls']:,}", format_flops(row["flops"]), share, *sizes))
    print_table((options.by, "calls", "FLOPs", "share", "read", "written", "allocated", "kept"), rows)
    if len(sums) > MOST_ROWS:
        say(f"and {len(sums) - MOST_ROWS} smaller ones: --json shows all")
    say(
        f"{ledger.parameters:,} parameters; {ledger.flops:,} FLOPs per step, {ledger.causal_flops:,} with attention "
        f"over causal pairs only; peak {ledger.peak_bytes:,} bytes; kept for the backward pass "
        f"{ledger.kept_bytes:,} bytes"
    )
    say(f"{ledger.elementwise_flops:,} elementwise FLOPs per step, one per element, which are in no figure above")
    if ledger.reserved_bytes is not None:
        say(f"reserved on the GPU by torch's caching allocator: {ledger.reserved_bytes:,} bytes")
    print_unknown_operators(ledger.unknown_operators)
    print_unknown_scratch(ledger.unknown_scratch)


def _target(options: CountOptions) -> "CudaTarget | None":
    if options.target != "cuda":
        if options.capability is not None:
            raise NapkinError(f"--capability {options.capability} is for GPUs: use it with --target cuda")
        return None
    from napkin.hardware.target import CudaTarget, cuda_target

    if options.capability is None:
        return cuda_target("cuda")
    if not re.fullmatch(r"\d{1,2}\.\d", options.capability):
        raise NapkinError(f"--capability {options.capability} is not a compute capability: use two numbers, as in 9.0")
    major, minor = options.capability.split(".")
    return CudaTarget((int(major), int(minor)))


@dataclass(frozen=True)
class PrintOptions(RecipeOptions, ForeignFiles):
    """Print a recipe as TOML: the defaults or a file, with the options given here: napkin recipe > recipe.toml"""


@recipe_command("recipe", PrintOptions)
def print_command(options: PrintOptions, _: RecipeSource) -> None:
    print_verbatim(with_comments(options.recipe).removesuffix("\n"))


def with_comments(recipe: Recipe) -> str:
    """A recipe as TOML, each field below a comment that says what it is; unset fields are comments, with the value that
    they resolve to if it is known."""
    tables = {field.name for field in dataclasses.fields(recipe)}
    choices = option_choices(type(recipe))
    blocks: list[str] = []
    for block in format_recipe(recipe).rstrip("\n").split("\n\n"):
        # A nested table has a block of its own, after that of the table around it.
        name = block.partition("]")[0].removeprefix("[")
        blocks.append(_explained(recipe, name, block, choices) if name in tables else block)
    return "\n\n".join(blocks) + "\n"


def _explained(recipe: Recipe, table: str, block: str, choices: dict[str, tuple[str, ...]]) -> str:
    values = getattr(recipe, table)
    heading, *lines = block.splitlines()
    entries: dict[str, list[str]] = {}
    for line in lines:
        if assignment := _ASSIGNMENT.match(line):
            entries[assignment[1]] = []
        # A list may go over several lines.
        entries[next(reversed(entries))].append(line)
    shown = [heading, *toml_comment((values.__doc__ or "").partition("\n\n")[0])]
    for field in dataclasses.fields(values):
        entry = entries.get(field.name) or _unset_field(recipe, values, field)
        if entry:
            text = _SENTENCE.split(field_docstrings(type(values)).get(field.name, ""))[0].rstrip(".")
            allowed = ", ".join(choices.get(f"{table}.{field.name.replace('_', '-')}", ()))
            shown += ["", *toml_comment(f"{text}. One of {allowed}." if allowed else f"{text}."), *entry]
    return "\n".join(shown)


_ASSIGNMENT = re.compile(r"(\w+) = ")
_SENTENCE = re.compile(r"(?<=[\w)`'])(?<!et al)\. (?=[A-Z0-9`])|\n\n")


def _unset_field(recipe: Recipe, values: Any, field: dataclasses.Field[Any]) -> list[str]:
    """The line of a field that is not set, as a comment; empty for a field that is set, or whose default is a value."""
    if getattr(values, field.name) is not None or field.default is not None:
        return []
    if values is recipe.optimizer:
        known = getattr(replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps), field.name)
    else:
        known = getattr(values, f"resolved_{field.name}", None)
    if known is not None:
        # Some sizes cannot be set, because the model has no such part.
        with contextlib.suppress(NapkinError):
            replace(values, **{field.name: known})
            return [f"# {tomli_w.dumps({field.name: known}).rstrip()}"]
    return [f"# {field.name} is not set"]
