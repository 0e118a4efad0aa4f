"""The runs below a folder, as a page follows them: summaries, and curves that grow with their files.

A run is read once and then from where its file ended; a long file is sampled first, and read whole by a thread in the
background. The memory of all runs together is bounded: with more runs, each has fewer buckets.
"""

import itertools
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from napkin.errors import NapkinError
from napkin.files import StrPath, regular
from napkin.json_files import read_if_present, read_json
from napkin.report.headline import recipe_values
from napkin.report.xy_picture import LABELS, UNITS
from napkin.runs.accounting_files import PlanFile
from napkin.runs.metrics import METRICS_FILE
from napkin.runs.run_folder import is_being_trained, is_run
from napkin.studio.curves import AXES, BUCKETS, FEWEST_BUCKETS, NAMES, FollowedRun, last_lines
from napkin.studio.named_paths import NamedPaths
from napkin.toml_files import MOST_BYTES

MOST_RUNS = 20_000
MOST_CURVE_BYTES = 256 * 2**20
MOST_RECIPES = 5000
_REST = 20
"""Folders are looked through again after so many times the seconds that it took."""
_PATIENCE = 1.0
"""Seconds that one look spends on the summaries of runs that it has not seen before; the others follow."""


class RunIndex:
    """The runs below a folder by their names, which are their paths in it."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self._followed: OrderedDict[str, FollowedRun] = OrderedDict()
        self._buckets = BUCKETS
        self._changing = threading.RLock()
        self._idle = threading.Event()
        self._idle.set()
        self._to_read: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: set[str] = set()
        self._reader: threading.Thread | None = None
        self._recipes: dict[Path, tuple[tuple[float, int], dict[str, Any]]] = {}
        self._plans: dict[Path, tuple[float, dict[str, float]]] = {}
        self._runs = NamedPaths(self.folder, "run", lambda path: path.is_dir() and is_run(path), MOST_RUNS)
        self.tokenizers = NamedPaths(self.folder, "tokenizer", _is_tokenizer, MOST_RUNS)
        self._summaries: dict[Path, tuple[tuple[float, int], dict[str, Any]]] = {}
        self._found_at, self._finding = -math.inf, 0.0

    def runs(self) -> list[dict[str, Any]]:
        """A summary of each run, the newest first."""
        if time.monotonic() - self._found_at > _REST * self._finding:
            self._find()
        end = time.monotonic() + _PATIENCE
        summaries = [self._summary(name, path, end) for name, path in self._runs.known.items()]
        return sorted(summaries, key=lambda each: -each["changed"])

    def _find(self) -> None:
        begin = time.monotonic()
        self._runs.find()
        self._summaries = {path: self._summaries[path] for path in self._runs.known.values() if path in self._summaries}
        self._found_at = time.monotonic()
        self._finding = self._found_at - begin

    def _summary(self, name: str, path: Path, end: float) -> dict[str, Any]:
        try:
            stat = (path / METRICS_FILE).stat()
            state = stat.st_mtime, stat.st_size
        except OSError:
            state = 0.0, 0
        if self._summaries.get(path, (None,))[0] != state:
            if time.monotonic() > end:
                return {"name": name, "training": False, "changed": state[0], "step": 0, "steps": None}
            steps = self._recipe(path).get("training.steps")
            self._summaries[path] = state, {**_summary(path), "steps": steps if isinstance(steps, int) else None}
        training = is_being_trained(path) is True
        return {"name": name, "training": training, "sampled": name in self._waiting, **self._summaries[path][1]}

    @property
    def known(self) -> dict[str, Path]:
        """The folders of the runs that were found, by name."""
        return dict(self._runs.known)

    def path_of(self, name: str) -> Path:
        """The folder of a run that was found. Raises NapkinError for another name: it is no path."""
        if name not in self._runs.known:
            self._find()
        return self._runs.path_of(name)

    @property
    def n_waiting(self) -> int:
        """Number of runs that are known by a sample only, and are being read whole."""
        return len(self._waiting)

    def curves(
        self,
        names: Sequence[str],
        curve: str,
        axis: str,
        points: int,
        *,
        begin: float = -math.inf,
        end: float = math.inf,
        means: bool = False,
    ) -> bytes:
        """A curve of some runs between two positions of an axis, each thinned to about so many points.

        The answer is the length of a JSON text in 4 bytes, the text with spaces up to a multiple of 8 bytes, and then
        positions and values of each run as float64, little-endian. For each run the text has its name, the number of
        points, and whether it is known by a sample only. Runs that no longer exist, or lack that axis, have no points.
        """
        # A thread that computes in the background would get in at each system call, for milliseconds.
        self._idle.clear()
        try:
            return self._curves(names, curve, axis, points, begin, end, means=means)
        finally:
            self._idle.set()

    def _curves(
        self, names: Sequence[str], curve: str, axis: str, points: int, begin: float, end: float, *, means: bool
    ) -> bytes:
        about, arrays = list[dict[str, Any]](), list[np.ndarray]()
        for name in names:
            if name not in self._runs.known:
                self._find()
            if name not in self._runs.known:
                continue
            along, factor = self._axis(self._runs.known[name], axis)
            if not factor:
                continue
            part = begin / factor, end / factor
            with self._changing:
                run = self._follow(name)
                curves = run.closer(along, *part, points)
                positions, values = curves.points(curve, along, points, *part, means=means)
            about.append({"name": name, "n": len(positions), "sampled": not run.is_whole, "damaged": run.damaged})
            arrays += [positions * factor, values]
        self._bound()
        text = msgspec.json.encode({"runs": about, "figures": self._figures(names)})
        text += b" " * (-(len(text) + 4) % 8)
        numbers = np.concatenate(arrays) if arrays else np.empty(0)
        return len(text).to_bytes(4, "little") + text + numbers.astype("<f8").tobytes()

    def _figures(self, names: Sequence[str]) -> list[str]:
        """The further figures that runs have, as far as they are followed."""
        followed = (self._followed[name].curves.names[len(NAMES) :] for name in names if name in self._followed)
        return [*dict.fromkeys(itertools.chain.from_iterable(followed))]

    def _axis(self, path: Path, axis: str) -> tuple[str, float]:
        """The figure that positions on an axis are proportional to, and the factor; 0 if the plan does not have it."""
        if axis in AXES:
            return axis, 1.0
        along, factor = {"flops": ("steps", "flops_per_step"), "dollars": ("seconds", "usd_per_second")}[axis]
        return along, self._plan(path).get(factor, 0.0)

    def _follow(self, name: str) -> FollowedRun:
        """Bring a run up to date with its file; the caller holds `_changing`."""
        path, run = self.path_of(name), self._followed.pop(name, None)
        if run is None or run.path.parent != path:
            run = FollowedRun(path, self._buckets)
        self._followed[name] = run
        if run.look() and name not in self._waiting:
            self._waiting.add(name)
            self._to_read.put(name)
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_whole, daemon=True)
                self._reader.start()
        return run

    def _bound(self) -> None:
        """Keep fewer buckets of every run where all take too many bytes; forget the runs that were asked for longest
        ago where they have the fewest already."""
        with self._changing:
            while self._buckets > FEWEST_BUCKETS and self._kept_bytes() > MOST_CURVE_BYTES:
                self._buckets //= 2
                for run in self._followed.values():
                    run.keep(self._buckets)
            while len(self._followed) > 1 and self._kept_bytes() > MOST_CURVE_BYTES:
                self._followed.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(each.size for each in self._followed.values())

    def _read_whole(self) -> None:
        """Read the runs that wait, one after the other, for as long as the server lives."""
        while True:
            name = self._to_read.get()
            run = self._followed.get(name)
            if run is not None:
                whole = run.whole(lambda: self._idle.wait(_PATIENCE))
                with self._changing:
                    if self._followed.get(name) is run:
                        whole.keep(self._buckets)
                        self._followed[name] = whole
                        self._bound()
            self._waiting.discard(name)

    def _plan(self, path: Path) -> dict[str, float]:
        """FLOPs of a step and dollars of a second by plan.json, as far as it is there."""
        try:
            changed = (path / "plan.json").stat().st_mtime
        except OSError:
            return {}
        if self._plans.get(path, (None,))[0] != changed:
            planned: dict[str, float] = {}
            try:
                plan = read_json(path / "plan.json", PlanFile)
            except NapkinError:
                plan = None
            if plan is not None:
                planned["flops_per_step"] = sum(plan.flops_by_phase.values())
                if plan.dollars is not None and plan.seconds:
                    planned["usd_per_second"] = plan.dollars / plan.seconds
            self._plans[path] = changed, planned
        return self._plans[path][1]

    def differences(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The fields in which the recipes of runs differ, with each run's value as text."""
        recipes = [self._recipe(self.path_of(name)) for name in names]
        fields = list(dict.fromkeys(field for recipe in recipes for field in recipe))
        rows = [(field, [str(recipe.get(field, "–")) for recipe in recipes]) for field in fields]
        return [{"field": field, "values": values} for field, values in rows if len({*values}) > 1]

    def _recipe(self, path: Path) -> dict[str, Any]:
        """The values of a run's recipe, read when it has changed."""
        file = path / "recipe.toml"
        try:
            stat = file.stat()
            state = stat.st_mtime, stat.st_size
        except OSError:
            return {}
        if self._recipes.get(path, (None,))[0] != state:
            if len(self._recipes) >= MOST_RECIPES:
                self._recipes.clear()
            try:
                content = (read_if_present(file) or b"") if stat.st_size <= MOST_BYTES else b""
                text = content.decode("utf-8", errors="replace")
            except NapkinError:
                text = ""
            self._recipes[path] = state, recipe_values(text)
        return self._recipes[path][1]


def _summary(path: Path) -> dict[str, Any]:
    """A run's entry in the list, from the end of its file: its curves are not read."""
    summary: dict[str, Any] = {"changed": 0.0, "step": 0}
    try:
        with open(path / METRICS_FILE, "rb", opener=regular) as file:
            stat = os.fstat(file.fileno())
            summary["changed"] = stat.st_mtime
            lines = last_lines(file.fileno(), stat.st_size)
    except OSError:
        lines = []
    if lines:
        last = lines[-1]
        summary |= {"step": last.step, "tokens": last.tokens, "seconds": last.seconds, "loss": last.loss}
    if validated := [line.validation_loss for line in lines if line.validation_loss is not None]:
        summary["validation_loss"] = validated[-1]
    return summary


def axes() -> dict[str, dict[str, str]]:
    """The axes that curves are shown over: names and units."""
    return {axis: {"name": LABELS[axis], "unit": UNITS[axis]} for axis in LABELS}


def _is_tokenizer(path: Path) -> bool:
    return path.name == "tokenizer.json" and path.is_file()
