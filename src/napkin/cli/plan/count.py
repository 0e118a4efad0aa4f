"""`napkin count`."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from napkin.cli.common.options import JsonOption
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_flops, format_share

if TYPE_CHECKING:
    from napkin.hardware.target import CudaTarget

MOST_ROWS = 40

By = Literal["component", "operator", "module", "phase"]


@dataclass(frozen=True)
class CountOptions(RecipeOptions, JsonOption):
    """Trace a recipe's training step on fake tensors and print its FLOPs and bytes; nothing is computed. No text is
    needed: without a tokenizer, --model.vocab-size gives the number of token ids."""

    by: By = "operator"
    """What the rows are summed by: component is embedding, attention projections, attention scores, feed-forward,
    norms, head, loss and optimizer; of module, layers that are alike are one row."""
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
        from napkin.planning.step.machine import ThisMachine
        from napkin.train_step.step_ledger import count_step

        target, recipe = _target(options), options.recipe
        if target is not None:
            # What the recipe leaves open is decided for the target, not for this machine.
            auto, formats = recipe.training.precision == "auto", "fp32" if target.capability < (8, 0) else "bf16"
            precision = formats if auto else recipe.training.precision
            model = replace(recipe.model, attention=recipe.model.resolved_attention)
            training = replace(recipe.training, device="cpu", precision=precision)
            recipe = replace(recipe, model=model, training=training)
        resolved = resolve(recipe, ThisMachine(device=recipe.training.device))
        ledger = count_step(
            replace(resolved, target=target or ("cpu" if options.target == "cpu" else None)),
            progress=lambda calls: line(calls, None, f"{calls:,} operator calls"),
        )
    if options.json:
        names = ("parameters", "flops", "causal_flops", "elementwise_flops", "peak_bytes", "reserved_bytes")
        totals = {name: getattr(ledger, name) for name in names}
        peak = {"peak_by_category": ledger.peak_by_category, "unknown_operators": ledger.unknown_operators}
        peak["unknown_scratch"] = ledger.unknown_scratch
        print_json({**totals, **peak, "by": options.by, "rows": ledger.sums_by(options.by)})
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
