"""`napkin count`."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from napkin.cli.options import Switch
from napkin.cli.recipes import RecipeOptions, parse_with_recipe
from napkin.cli.terminal import out, print_json, progress_line, say
from napkin.units import format_bytes, format_flops

if TYPE_CHECKING:
    from napkin.accounting.ledger import Ledger

SUMS = ("calls", "flops", "bytes_read", "bytes_written", "bytes_allocated", "bytes_kept")
MOST_ROWS = 40


@dataclass(frozen=True)
class CountOptions(RecipeOptions):
    """Trace a recipe's training step on fake tensors and say where its FLOPs and bytes are; nothing is computed. No
    text is needed: without a tokenizer, --model.vocab-size says how many tokens it would have."""

    by: Literal["operator", "module", "phase"] = "operator"
    """What the rows are summed by."""
    json: Switch = False
    """Print the result for programs."""


def main(arguments: list[str]) -> None:
    """Print the ledger of a recipe's step."""
    options, _ = parse_with_recipe(CountOptions, "count", arguments)
    with progress_line("counting the step"):
        from napkin.training.runs import resolve_alone
        from napkin.training.step import count_step

        recipe, precision, _ = resolve_alone(options.recipe)
        ledger = count_step(recipe, precision)
    sums = _sum(ledger, options.by)
    if options.json:
        totals = {name: getattr(ledger, name) for name in ("parameters", "flops", "causal_flops", "peak_bytes")}
        peak = {"peak_by_category": ledger.peak_by_category, "unknown_operators": ledger.unknown_operators}
        print_json({**totals, **peak, "by": options.by, "rows": sums})
        return
    table = Table(options.by, "calls", "FLOPs", "read", "written", "allocated", "kept", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in list(sums.items())[:MOST_ROWS]:
        sizes = (format_bytes(row[column]) for column in SUMS[2:])
        table.add_row(name or "(outside of modules)", f"{row['calls']:,}", format_flops(row["flops"]), *sizes)
    out.print(table)
    if len(sums) > MOST_ROWS:
        say(f"and {len(sums) - MOST_ROWS} smaller ones: --json shows all")
    say(
        f"{ledger.parameters:,} parameters; {ledger.flops:,} FLOPs a step, {ledger.causal_flops:,} with attention over "
        f"causal pairs alone; peak {ledger.peak_bytes:,} bytes; kept for the backward pass {ledger.kept_bytes:,} bytes"
    )
    for operator, calls in ledger.unknown_operators.items():
        say(f"operator {operator} is not in napkin's tables: the FLOPs of {calls} calls are missing above")


def _sum(ledger: "Ledger", by: Literal["operator", "module", "phase"]) -> dict[str, dict[str, int]]:
    sums: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(SUMS, 0))
    for row in ledger.rows:
        into = sums[getattr(row, by)]
        into["calls"] += 1
        for name in SUMS[1:]:
            into[name] += getattr(row, name)
    return dict(sorted(sums.items(), key=lambda item: (-item[1]["flops"], -item[1]["bytes_written"])))
