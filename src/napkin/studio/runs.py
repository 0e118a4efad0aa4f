"""The runs below a folder, as a page follows them: summaries, and curves that grow with their files.

A run is read once and then from where its file ended. What is kept of all runs together is bounded: the curves of those
that were asked for longest ago are forgotten, and read again when they are asked for.
"""

import itertools
import math
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.json_files import read_if_present, read_json
from napkin.report.headline import recipe_values
from napkin.report.overfitting import Curve, thin
from napkin.report.xy_picture import LABELS, UNITS
from napkin.runs.accounting_files import PlanFile
from napkin.runs.metrics import METRICS_FILE, StepMetrics, parse_metrics
from napkin.runs.run_folder import is_being_trained, is_run

MOST_RUNS = 5000
MOST_CURVE_BYTES = 256 * 2**20
_DEPTH = 4
_TAIL = 2**16
_REST = 20
"""Folders are looked through again after so many times the seconds that it took."""
_NAMES = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "bytes")


@dataclass
class FollowedRun:
    """A run's metrics so far, and how much of its file they are."""

    path: Path
    columns: dict[str, "array[float]"] = field(default_factory=dict)
    rows: int = 0
    offset: int = 0
    inode: int = 0
    damaged: int = 0

    @property
    def size(self) -> int:
        """Bytes of the numbers."""
        return 8 * self.rows * len(self.columns)

    def refresh(self) -> None:
        """Read what the file has more than before; all of it where it was replaced, as a resumed run does."""
        path = self.path / METRICS_FILE
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.columns, self.rows, self.offset, self.damaged = {}, 0, 0, 0
                    self.inode = stat.st_ino
                file.seek(self.offset)
                # What a process is writing right now is read the next time.
                for line in iter(file.readline, b""):
                    if not line.endswith(b"\n"):
                        break
                    self.offset += len(line)
                    self._add(line)
        except OSError:
            return

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            logged = parse_metrics(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
            self.damaged += 1
            return
        values = _values(logged)
        for name in values.keys() - self.columns.keys():
            self.columns[name] = array("d", [math.nan]) * self.rows
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        self.rows += 1


def _values(logged: StepMetrics) -> dict[str, float]:
    figures = {name: value for name, value in (logged.figures or {}).items() if value is not None}
    own = {name: getattr(logged, name) for name in ("step", "tokens", "seconds", *_NAMES)}
    return {**figures, **{name: math.nan if value is None else float(value) for name, value in own.items()}}


class RunIndex:
    """The runs below a folder by their names, which are their paths in it."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self._followed: OrderedDict[str, FollowedRun] = OrderedDict()
        self._plans: dict[Path, tuple[float, dict[str, float]]] = {}
        self._known: dict[str, Path] = {}
        self._tokenizers: dict[str, Path] = {}
        self._summaries: dict[Path, tuple[tuple[float, int], dict[str, Any]]] = {}
        self._found_at, self._finding = -math.inf, 0.0

    def runs(self) -> list[dict[str, Any]]:
        """A summary of each run, the newest first."""
        if time.monotonic() - self._found_at > _REST * self._finding:
            self._find()
        found = [self._summary(name, path) for name, path in self._known.items()]
        return sorted(found, key=lambda each: -each["changed"])

    def _find(self) -> None:
        begin = time.monotonic()
        runs = itertools.islice(self._walk(self.folder, _DEPTH), MOST_RUNS)
        self._known = {path.relative_to(self.folder).as_posix(): path for path in runs}
        self._summaries = {path: self._summaries[path] for path in self._known.values() if path in self._summaries}
        self._found_at = time.monotonic()
        self._finding = self._found_at - begin

    def _summary(self, name: str, path: Path) -> dict[str, Any]:
        try:
            stat = (path / METRICS_FILE).stat()
            state = stat.st_mtime, stat.st_size
        except OSError:
            state = 0.0, 0
        if self._summaries.get(path, (None,))[0] != state:
            self._summaries[path] = state, _summary(path)
        return {"name": name, "training": is_being_trained(path) is True, **self._summaries[path][1]}

    def _walk(self, folder: Path, depth: int) -> Iterator[Path]:
        try:
            if is_run(folder):
                yield folder
                return
            within = sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())
        except OSError:
            return
        for each in within if depth else ():
            if not each.name.startswith("."):
                yield from self._walk(each, depth - 1)

    def find_tokenizers(self) -> list[str]:
        """Look for the files of napkin's tokenizers, of runs and beside them: their paths below the folder."""
        files = itertools.islice(self._files("tokenizer.json", self.folder, _DEPTH), MOST_RUNS)
        self._tokenizers = {path.relative_to(self.folder).as_posix(): path for path in files}
        return [*self._tokenizers]

    def tokenizer_path(self, name: str) -> Path:
        """The file of a tokenizer that was found. Raises NapkinError for another name: it is no path."""
        if name not in self._tokenizers:
            self.find_tokenizers()
        if name not in self._tokenizers:
            raise NapkinError(f"there is no tokenizer '{name}' below '{self.folder}'")
        return self._tokenizers[name]

    def _files(self, name: str, folder: Path, depth: int) -> Iterator[Path]:
        try:
            within = sorted(each for each in folder.iterdir() if not each.is_symlink())
        except OSError:
            return
        for each in within:
            if each.name == name and each.is_file():
                yield each
            elif depth and not each.name.startswith(".") and each.is_dir():
                yield from self._files(name, each, depth - 1)

    def path_of(self, name: str) -> Path:
        """The folder of a run that was found. Raises NapkinError for another name: it is no path."""
        if name not in self._known:
            self._find()
        if name not in self._known:
            raise NapkinError(f"there is no run '{name}' below '{self.folder}': the list of runs has the names")
        return self._known[name]

    def curves(self, name: str, points: int, begin: float = -math.inf, end: float = math.inf) -> dict[str, Any]:
        """The curves of a run between two steps, each thinned to about so many points with its extremes, beside the
        steps, tokens and seconds of these points."""
        run = self._follow(name)
        columns = {name: np.array(values) for name, values in run.columns.items()}
        if not run.rows:
            return {"steps": [], "tokens": [], "seconds": [], "curves": {}, "end": 0, **self._plan(run.path)}
        steps = columns.pop("step")
        shown = (steps >= begin) & (steps <= end)
        known = {name: curve[shown] for name, curve in columns.items() if not np.all(np.isnan(curve[shown]))}
        tokens, seconds = known.pop("tokens", np.empty(0)), known.pop("seconds", np.empty(0))
        kept = thin([*known.values()] or [steps[shown]], points * max(1, len(known)))
        return {
            "steps": steps[shown][kept].tolist(),
            "tokens": tokens[kept].tolist(),
            "seconds": seconds[kept].tolist(),
            "curves": {name: _as_numbers(curve[kept]) for name, curve in known.items()},
            "end": int(steps[-1]),
            "damaged": run.damaged,
            **self._plan(run.path),
        }

    def _follow(self, name: str) -> FollowedRun:
        path = self.path_of(name)
        run = self._followed.pop(name, None)
        if run is None or run.path != path:
            run = FollowedRun(path)
        self._followed[name] = run
        run.refresh()
        while len(self._followed) > 1 and sum(each.size for each in self._followed.values()) > MOST_CURVE_BYTES:
            self._followed.popitem(last=False)
        return run

    def _plan(self, path: Path) -> dict[str, float]:
        """FLOPs of a step and dollars of a second by plan.json, as far as it is there."""
        try:
            changed = (path / "plan.json").stat().st_mtime
        except OSError:
            return {}
        if self._plans.get(path, (None,))[0] != changed:
            found: dict[str, float] = {}
            try:
                plan = read_json(path / "plan.json", PlanFile)
            except NapkinError:
                plan = None
            if plan is not None:
                found["flops_per_step"] = sum(plan.flops_by_phase.values())
                if plan.dollars is not None and plan.seconds:
                    found["usd_per_second"] = plan.dollars / plan.seconds
            self._plans[path] = changed, found
        return self._plans[path][1]

    def differences(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The fields in which the recipes of runs differ, with each run's value as text."""
        recipes = []
        for name in names:
            text = (read_if_present(self.path_of(name) / "recipe.toml") or b"").decode("utf-8", errors="replace")
            recipes.append(recipe_values(text))
        fields = list(dict.fromkeys(field for recipe in recipes for field in recipe))
        rows = [(field, [str(recipe.get(field, "–")) for recipe in recipes]) for field in fields]
        return [{"field": field, "values": values} for field, values in rows if len({*values}) > 1]


def _as_numbers(values: Curve) -> list[float | None]:
    """Six digits are more than a chart shows."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _summary(path: Path) -> dict[str, Any]:
    """What a list shows of a run, by the end of its file: its curves are not read."""
    found: dict[str, Any] = {"changed": 0.0, "step": 0}
    try:
        with open(path / METRICS_FILE, "rb") as file:
            stat = os.fstat(file.fileno())
            found["changed"] = stat.st_mtime
            file.seek(max(0, stat.st_size - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except OSError:
        lines = []
    for line in reversed(lines):
        try:
            logged = parse_metrics(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        if "loss" not in found:
            found |= {"step": logged.step, "tokens": logged.tokens, "seconds": logged.seconds, "loss": logged.loss}
        if logged.validation_loss is not None:
            found["validation_loss"] = logged.validation_loss
            break
    recipe = (read_if_present(path / "recipe.toml") or b"").decode("utf-8", errors="replace")
    steps = recipe_values(recipe).get("training.steps")
    return {**found, "steps": steps if isinstance(steps, int) else None}


def axes() -> dict[str, dict[str, str]]:
    """The axes that curves are shown over: names and units."""
    return {axis: {"name": LABELS[axis], "unit": UNITS[axis]} for axis in LABELS}
