"""The runs that a law is fitted to: parameters, tokens and loss of each run, from a CSV file or from run folders."""

import contextlib
import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import read_bytes

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Training FLOPs by rule: 6·N·D (Kaplan et al. 2020). Where a file gives FLOPs and no tokens, tokens are FLOPs/6N."""

EXAMPLE = Path(__file__).parent / "examples" / "besiroglu_2024.csv"
"""Chinchilla's runs (Besiroglu et al. 2024); examples/SOURCE.txt says where they are from."""

LARGEST_FILE = 64 * 2**20
MOST_RUNS = 100_000
_LIMITS = {
    "parameters": (1.0, 1e16),
    "tokens": (1.0, 1e19),
    "flops": (1.0, 1e36),
    "loss": (1e-6, 1e3),
    "unique_tokens": (1.0, 1e19),
}
_NAMES = {
    "parameters": ("parameters", "params", "n", "n_params", "num_params", "n_parameters", "model_size", "model size"),
    "tokens": ("tokens", "d", "train_tokens", "training_tokens", "n_tokens", "training tokens"),
    "flops": ("flops", "training_flops", "training flop", "training flops", "c", "compute", "flop", "compute_budget"),
    "loss": ("loss", "final_loss", "validation_loss", "val_loss", "test_loss"),
    "unique_tokens": ("unique_tokens", "unique tokens", "unique"),
}
_GROUPS = ("training_set", "dataset", "data", "group", "corpus")


@dataclass(frozen=True)
class Observation:
    """One finished run, as a law is fitted to it."""

    parameters: float
    tokens: float
    """Tokens trained on; repeated ones count each time."""
    loss: float
    """Nats per token on held-out text."""
    flops: float | None = None
    """FLOPs of the whole training; None is 6·parameters·tokens."""
    unique_tokens: float | None = None
    """Tokens of the training text; None where none was repeated."""
    group: str = ""
    """Training set, where the runs have several: its laws have constants of their own."""
    source: str = ""
    """The source, such as "runs.csv, line 7"."""

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                where = f"{self.source}: " if self.source else ""
                raise NapkinError(f"{where}{name.replace('_', ' ')} is {value:g}: use {least:g} to {most:g}")

    @property
    def name(self) -> str:
        """The source without the path of its file; else the size."""
        where = self.source.rpartition("', ")[2].strip("'")
        return where or f"{self.parameters:.3g} parameters"

    @property
    def compute(self) -> float:
        """FLOPs of the training: as given, or 6·parameters·tokens."""
        if self.flops is not None:
            return self.flops
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


@dataclass(frozen=True)
class Observations:
    """The runs of one file or of some folders."""

    runs: tuple[Observation, ...]
    diverged: tuple[str, ...] = ()
    """The sources of runs that are left out: their loss is not a finite number."""
    notes: tuple[str, ...] = field(default=())
    """Sentences on what was derived."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The training sets, in the order of the file."""
        return tuple(dict.fromkeys(run.group for run in self.runs))


def read_observations(path: str | Path, *, loss: str | None = None) -> Observations:
    """Read a CSV file with a header.

    Columns are found by their usual names, in any case and order: parameters, tokens, FLOPs and loss; `unique_tokens`,
    and a training set such as `training_set` or `dataset`. Of tokens and FLOPs one may be missing: tokens are then
    FLOPs/6N. A run whose loss is empty, not a number or infinite has diverged: it is left out and named.

    `loss` is the name of the column with the loss; None is the one called loss, or the only one that begins so. Raises
    NapkinError for a file of more than 64 MiB or without the columns, and for a line with other than numbers in range.
    """
    path = Path(path)
    rows = _rows(path)
    header = [name.strip() for name in next(rows, [])]
    columns = _columns(path, header, loss)
    runs: list[Observation] = []
    diverged: list[str] = []
    derived = False
    for number, row in enumerate(rows, 2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"'{path}', line {number}"
        if len(row) != len(header):
            raise NapkinError(f"{where}: {len(row)} columns, the header has {len(header)}: give each line all columns")
        if len(runs) == MOST_RUNS:
            raise NapkinError(f"'{path}' has more than {MOST_RUNS:,} runs: give fewer")
        cells = {name: row[index].strip() for name, index in columns.items()}
        given = _number(cells["loss"], where, header[columns["loss"]], missing="nan")
        if given is None or not math.isfinite(given):
            diverged.append(where)
            continue
        figures = {
            name: _number(cells.get(name, ""), where, header[columns[name]] if name in columns else name)
            for name in ("parameters", "tokens", "flops", "unique_tokens")
        }
        if figures["parameters"] is None:
            raise NapkinError(f"{where}: parameters are missing: give the number of parameters of each run")
        if figures["tokens"] is None:
            if figures["flops"] is None:
                raise NapkinError(f"{where}: tokens are missing, and so are FLOPs to derive them from: give one")
            derived = True
            figures["tokens"] = figures["flops"] / (FLOPS_PER_PARAMETER_AND_TOKEN * figures["parameters"])
        runs.append(Observation(**figures, loss=given, group=cells.get("group", ""), source=where))  # pyright: ignore[reportArgumentType]
    if not runs:
        raise NapkinError(f"'{path}' holds no run with a finite loss: give one line per run")
    notes = ("tokens are FLOPs/(6·parameters): the file has no tokens",) if derived else ()
    return Observations(tuple(runs), tuple(diverged), notes)


def read_run_observations(folders: Sequence[str]) -> Observations:
    """The finished runs among folders of `napkin train`, each with its last validation loss.

    Parameters and FLOPs are those that its plan has counted. A run that is not finished, has no validation loss or no
    plan is left out and named in `notes`.

    Raises:
        NapkinError: for a folder that holds no run, and where no run is left.
    """
    from napkin.report.comparison import find_runs
    from napkin.runs.run_folder import is_being_trained
    from napkin.runs.run_record import read_run_record

    runs: list[Observation] = []
    diverged: list[str] = []
    notes: list[str] = []
    for folder in find_runs(folders):
        record = read_run_record(folder)
        plan, last = record.plan, record.metrics[-1] if record.metrics else None
        losses = [line.validation_loss for line in record.metrics if line.validation_loss is not None]
        count = next((row.count for row in plan.table if row.quantity == "parameters"), None) if plan else None
        if plan is None or last is None or count is None or last.step < plan.steps or is_being_trained(folder):
            notes.append(f"'{folder}' is left out: it is not finished, or has no plan")
        elif not losses:
            notes.append(f"'{folder}' is left out: it has no validation loss, which data.validation gives")
        elif not math.isfinite(losses[-1]):
            diverged.append(f"'{folder}'")
        else:
            flops = sum(plan.flops_by_phase.values()) * last.step
            unique = last.tokens / last.epochs if last.epochs and last.epochs > 1 else None
            runs.append(
                Observation(
                    parameters=float(count),
                    tokens=float(last.tokens),
                    loss=losses[-1],
                    flops=flops or None,
                    unique_tokens=unique,
                    source=f"'{folder}'",
                )
            )
    if not runs:
        raise NapkinError(
            f"none of the runs in {', '.join(map(repr, folders))} is finished with a finite validation loss: "
            "train them to their end, with data.validation"
        )
    return Observations(tuple(runs), tuple(diverged), tuple(notes))


def drop_highest(runs: Iterable[Observation], count: int) -> tuple[list[Observation], list[Observation]]:
    """The runs without the `count` of highest loss, in their order, and those, the highest first."""
    runs = list(runs)
    order = sorted(range(len(runs)), key=lambda index: -runs[index].loss)
    dropped = order[:count]
    return [run for index, run in enumerate(runs) if index not in set(dropped)], [runs[index] for index in dropped]


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise NapkinError(f"'{path}' does not exist: name a CSV file, or folders of runs") from None
    if len(data) > LARGEST_FILE:
        raise NapkinError(f"'{path}' has {len(data):,} bytes: use at most {LARGEST_FILE:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NapkinError(f"'{path}' is not UTF-8 at byte {error.start}: save it as CSV in UTF-8") from None
    if "\0" in text:
        raise NapkinError(f"'{path}' contains NUL characters: it is not a CSV file")
    try:
        yield from csv.reader(io.StringIO(text, newline=""))
    except csv.Error as error:
        raise NapkinError(f"'{path}' is not a CSV file ({error}): use commas and a header") from None


def _columns(path: Path, header: Sequence[str], loss: str | None) -> dict[str, int]:
    """The index of each known column."""
    names = [name.lower() for name in header]
    columns: dict[str, int] = {}
    for meaning, known in _NAMES.items():
        matches = [index for index, name in enumerate(names) if name in known]
        if len(matches) > 1:
            raise NapkinError(
                f"'{path}' has more than one column for {meaning.replace('_', ' ')}: "
                f"{', '.join(header[index] for index in matches)}: keep one"
            )
        if matches:
            columns[meaning] = matches[0]
    if loss is not None:
        if loss.lower() not in names:
            raise NapkinError(f"'{path}' has no column '{loss}': it has {_listed(header)}")
        columns["loss"] = names.index(loss.lower())
    elif "loss" not in columns:
        candidates = [index for index, name in enumerate(names) if "loss" in name]
        if len(candidates) != 1:
            raise NapkinError(f"'{path}' has no column 'loss': name one of {_listed(header)} with --loss-column")
        columns["loss"] = candidates[0]
    if "parameters" not in columns:
        raise NapkinError(f"'{path}' has no column 'parameters': it has {_listed(header)}")
    if not {"tokens", "flops"} & columns.keys():
        raise NapkinError(f"'{path}' has neither a column 'tokens' nor 'flops': it has {_listed(header)}")
    group = next((names.index(name) for name in _GROUPS if name in names), None)
    return columns if group is None else {**columns, "group": group}


def _listed(header: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in header[:12])
    return f"{shown} ..." if len(header) > 12 else shown or "no columns"


def _number(text: str, where: str, name: str, *, missing: str = "") -> float | None:
    text = text or missing
    if not text:
        return None
    # float() reads digits of any script, and underscores.
    if text.isascii() and "_" not in text:
        with contextlib.suppress(ValueError):
            return float(text)
    raise NapkinError(f"{where}: {name} is '{text[:60]}', which is not a number: use digits such as 1.5e9")
