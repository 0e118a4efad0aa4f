"""`napkin mcp`: a server of five tools for programs that speak the Model Context Protocol, over standard input.

A tool gives what the command of its name prints with `--json`, or the line with which the command refuses. The shape of
what each gives is declared here, checked at every call, and published to clients as its output schema.
"""

import contextlib
import io
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

import napkin
from napkin.cli.common.options import command
from napkin.cli.plan.recipe import By, Counted
from napkin.errors import NapkinError, import_extra

INSTRUCTIONS = """\
napkin plans, counts and accounts for the training of language models. A recipe is the path of a TOML file, or is left
out for the defaults; `options` override its fields, as in {"model.d_model": 1024, "training.batch_size": 32}. Without a
tokenizer file, give model.vocab_size. Devices are of a catalogue, as in "8xH100". Figures are in bytes, FLOPs and
seconds, never scaled. Nothing is trained and nothing is written."""

Value = str | int | float | bool
Options = dict[str, Value]


class Quantity(TypedDict):
    """One quantity by rule, by count and by meter; in the unit named."""

    quantity: str
    unit: str
    rule: float | None
    count: float | None
    meter: float | None
    note: str


class Planned(TypedDict, total=False):
    """The plan of a run."""

    napkin: str
    device: dict[str, Any]
    steps: int
    tokens_per_step: int
    fits: bool
    seconds: float
    seconds_factor: float
    dollars: float | None
    kilowatt_hours: float | None
    peak_by_category: dict[str, float]
    flops_by_phase: dict[str, float]
    seconds_by_operator: dict[str, float]
    seconds_by_phase: dict[str, float]
    seconds_by_module: dict[str, float]
    communication: dict[str, Any] | None
    table: list[Quantity]


class Fitted(TypedDict):
    """The largest model that devices can train."""

    device: str
    n_devices: int
    rule: dict[str, float]
    count: dict[str, Any] | None


class Reconciled(TypedDict):
    """A run's plan beside its measurement."""

    run: str
    table: list[Quantity]
    mfu: float | None
    steps_measured: int


class Compared(TypedDict, total=False):
    """Runs, and their losses at equal points where there are two or more."""

    runs: list[dict[str, Any]]
    over: str
    loss: str
    points: list[float]
    losses: dict[str, list[float | None]]


@dataclass(frozen=True)
class McpOptions:
    """Serve plan, count, fit, reconcile and runs to programs that speak the Model Context Protocol, over standard input
    and output. A client starts it itself: its configuration names the command `napkin` with the argument `mcp`."""


@command("mcp", McpOptions)
def main(_: McpOptions) -> None:
    server().run("stdio")


def server() -> Any:
    """The `MCPServer` with its tools, for a transport of one's own. Raises NapkinError where the library is missing."""
    made = import_extra("mcp.server.mcpserver", "`napkin mcp`").MCPServer(
        "napkin", version=napkin.__version__, instructions=INSTRUCTIONS, log_level="ERROR"
    )
    for tool in (plan, count, fit, reconcile, runs):
        made.tool()(tool)
    return made


def plan(
    recipe: str | None = None, on: str | None = None, preset: str | None = None, options: Options | None = None
) -> Planned:
    """Say what a training run will take: memory, FLOPs, seconds, dollars, and whether it fits.

    `on` are devices of the catalogue, as in "8xH100"; without it, this machine is measured. `preset` is a published
    model, as "llama-3-8b".
    """
    return _asked("plan", recipe, options, on=on, preset=preset)


def count(
    recipe: str | None = None,
    preset: str | None = None,
    by: By = "component",
    target: Literal["auto", "cpu", "cuda"] = "auto",
    options: Options | None = None,
) -> Counted:
    """Trace one training step on fake tensors: FLOPs and bytes by operator, module, phase or component."""
    return _asked("count", recipe, options, preset=preset, by=by, target=target)


def fit(
    on: str,
    optimizer: str = "adamw",
    batch_size: int = 1,
    context_length: int = 2048,
    vocab_size: int = 50304,
) -> Fitted:
    """Say how large a model some devices can train, by rule and by count; `on` is as in "8xH100"."""
    given = {"on": on, "optimizer": optimizer, "batch_size": batch_size}
    return _asked("fit", None, None, **given, context_length=context_length, vocab_size=vocab_size)


def reconcile(run: str) -> Reconciled:
    """The table of a finished run: rule, count and meter of each quantity side by side."""
    from napkin.json_files import read_json
    from napkin.runs.accounting_files import MEASUREMENT_FILE, MeasurementFile
    from napkin.runs.run_folder import RunFolder

    try:
        measured = read_json(RunFolder.open(run).path / MEASUREMENT_FILE, MeasurementFile)
    except NapkinError as error:
        raise _refusal(str(error)) from None
    if measured is None:
        raise _refusal(f"'{run}' has no {MEASUREMENT_FILE}: a run writes it when it ends")
    rows: list[Quantity] = [
        {
            "quantity": row.quantity,
            "unit": row.unit,
            "rule": row.rule,
            "count": row.count,
            "meter": row.meter,
            "note": row.note,
        }
        for row in measured.table
    ]
    return {"run": run, "table": rows, "mfu": measured.mfu, "steps_measured": measured.steps}


def runs(
    folders: Sequence[str] = (), over: Literal["steps", "tokens", "flops", "seconds", "dollars"] = "tokens"
) -> Compared:
    """List runs below some folders, and compare their losses at equal points."""
    return _asked("runs", None, None, *(str(Path(folder)) for folder in folders), over=over)


# Commands print through one standard output, and the planner keeps what it has measured: one call at a time.
_ONE_AT_A_TIME = threading.Lock()


def _asked(name: str, recipe: str | None, options: Mapping[str, Value] | None, *files: str, **given: Any) -> Any:
    """Return the JSON that a command prints."""
    arguments = [name, *(_file(each) for each in (*([] if recipe is None else [recipe]), *files)), "--json"]
    for option in options or ():
        if not re.fullmatch(r"[a-z]+\.[a-z0-9_]+", option):
            raise _refusal(f"'{option}' is not a field of a recipe: name one as in model.d_model")
    for option, value in {**given, **(options or {})}.items():
        if value is not None:
            arguments.append(f"--{option.replace('_', '-')}={value}")
    from napkin.cli import main as run_command

    printed, said = io.StringIO(), io.StringIO()
    with _ONE_AT_A_TIME, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        status = run_command(arguments)
    if printed.getvalue().strip():
        # A plan that does not fit is an answer, too, though the command's status says no.
        return json.loads(printed.getvalue())
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    raise _refusal(lines[-1] if lines else f"napkin {name} ended with status {status}")


def _file(path: str) -> str:
    if path.startswith("-"):
        raise _refusal(f"'{path}' is not a file's name: begin it with ./")
    return path


def _refusal(message: str) -> Exception:
    """The error that a client is told as the result of its call."""
    return import_extra("mcp.server.mcpserver.exceptions", "`napkin mcp`").ToolError(message)
