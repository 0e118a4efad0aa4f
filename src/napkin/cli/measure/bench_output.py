"""What `napkin bench` prints: what all rows share in a line, what differs in a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from napkin.cli.common.terminal import print_json, print_table, say
from napkin.units import format_bytes, format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from napkin.benchmarking.conditions import Conditions
    from napkin.benchmarking.intervals import Interval
    from napkin.benchmarking.measuring import Row


def print_rows(name: str, rows: "Sequence[Row]", conditions: "Conditions", *, as_json: bool) -> None:
    """Print the rows, and what else was so while they were measured."""
    if as_json:
        from napkin.benchmarking.measuring import row_values

        print_json({"name": name, "conditions": conditions.values(), "rows": [row_values(row) for row in rows]})
        return
    described = [_described(row) for row in rows]
    names = list(dict.fromkeys(key for each in described for key in each))
    differ = [key for key in names if len({each.get(key) for each in described}) > 1]
    shared = ", ".join(f"{key} {described[0][key]}" for key in names if key not in differ)
    say(f"{name}: {shared}")
    headings = [*(key.replace("_", " ") for key in differ), "median", "±", "FLOP/s", "bytes/s", "of roof", "bound"]
    compared = sorted({row.against for row in rows if row.against})
    headings += [f"over {other}" for other in compared]
    noted = any(map(_note, rows))
    cells = [
        [*(each.get(key, "") for key in differ), *_measured(row), *_ratios(row, compared), *[_note(row)] * noted]
        for row, each in zip(rows, described, strict=True)
    ]
    align = "l" * len(differ) + "rrrrrl" + "r" * len(compared) + "l" * noted
    print_table([*headings, *["note"] * noted], cells, align=align)
    print_conditions(conditions)


def _described(row: "Row") -> dict[str, str]:
    case = row.case
    return {
        "form": case.name,
        **{name: str(size) for name, size in case.shape.items()},
        "precision": case.precision.name,
        "pass": case.timed,
        "cache": "cold" if case.cold else "warm",
    }


def _measured(row: "Row") -> list[str]:
    seconds, work = row.seconds, row.work
    if seconds is None or row.roof_share is None:
        return ["", "", "", "", "", ""]
    return [
        format_seconds(seconds.median),
        format_share(seconds.relative_width),
        format_rate(work.flops / seconds.median) if work.flops else "",
        format_bytes(work.bytes / seconds.median) + "/s",
        format_share(row.roof_share),
        work.bound,
    ]


def _note(row: "Row") -> str:
    from napkin.hardware.conditions import MOST_WAITING

    share = row.waiting_share or 0.0
    waited = f"disturbed: waited {format_share(share)} of the time for a core" if share > MOST_WAITING else ""
    return f"not run: {row.refused}" if row.refused else waited


def _ratios(row: "Row", compared: Sequence[str]) -> list[str]:
    return [_ratio(row.ratio) if row.against == other and row.ratio else "" for other in compared]


def _ratio(ratio: "Interval") -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def print_conditions(conditions: "Conditions") -> None:
    """Print what was so beside the measurement."""
    found: dict[str, Any] = conditions.values()
    before, after = found["before"], found["after"]
    parts = [found["device"], f"{found['threads']} threads", f"torch {found['torch']}"]
    if before["megahertz"]:
        parts.append(f"{before['megahertz']:.0f} to {after['megahertz']:.0f} MHz")
    if before["gpu"]:
        parts.append(f"{before['gpu'].get('clocks.sm', '')} to {(after['gpu'] or {}).get('clocks.sm', '')}")
    if before["load"] is not None:
        parts.append(f"load {before['load']:.2f} before")
    say()
    say("; ".join(parts) + "; ± is half of a 95% interval, the longer one")
