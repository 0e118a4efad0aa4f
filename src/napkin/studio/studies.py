"""Sweeps, ladders, laws and evaluations below a folder, as pages show them: what the commands have written, read by the
readers of these commands."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import FORMAT as BITS_FORMAT
from napkin.evaluation.bits_per_byte import read_bits_result
from napkin.evaluation.tasks.published import PLAIN_SCORES
from napkin.evaluation.tasks.results import FORMAT as TASK_FORMAT
from napkin.evaluation.tasks.results import read_result
from napkin.files import StrPath, regular
from napkin.json_files import read_json
from napkin.runs.run_folder import is_run, runs_in
from napkin.scaling.fitted_law import LEVEL, FittedLaw, read_law
from napkin.scaling.ladder import LADDER_FILE, read_ladder
from napkin.scaling.observations import Observation, read_run_observations
from napkin.scaling.sweep import SWEEP_FILE, SweepFile

MOST_FILES = 2000
MOST_RESULT_BYTES = 2**26
_DEPTH = 5
_LAW_ENDING = "law.json"
_BEYOND = 100.0
"""A curve of best losses extends to this multiple of the largest run."""
_CURVE_POINTS = 48
_HEAD = 512
"""The number of first bytes of a result that contain its format."""


class Studies:
    """Sweeps, laws and evaluations below a folder, by their paths within it; a name that was not found is not
    opened."""

    def __init__(self, folder: StrPath) -> None:
        self._folder = Path(folder)
        self._sweeps: dict[str, Path] = {}
        self._laws: dict[str, Path] = {}

    def found(self) -> dict[str, Any]:
        """The names of sweeps and laws, and the figures of all evaluations."""
        sweeps, laws, results = [], [], []
        for path in itertools.islice(_files(self._folder, _DEPTH), MOST_FILES):
            if path.name in (SWEEP_FILE, LADDER_FILE):
                sweeps.append(path.parent)
            elif path.name.endswith(_LAW_ENDING):
                laws.append(path)
            else:
                results.append(path)
        self._sweeps = {self._name(path): path for path in dict.fromkeys(sweeps)}
        self._laws = {self._name(path): path for path in laws}
        evaluations, problems = [], []
        for path in results:
            try:
                evaluations += self._evaluations(path)
            except NapkinError as error:
                problems.append(str(error))
        return {
            "sweeps": [*self._sweeps],
            "laws": [*self._laws],
            "evaluations": evaluations,
            "problems": problems[:20],
        }

    def sweep(self, name: str, summaries: dict[Path, dict[str, Any]]) -> dict[str, Any]:
        """The runs of a sweep or of a ladder: the values of its fields, and each run's figures by `summaries`, which
        have the figures of runs by their folders."""
        path = self._known(self._sweeps, name, "sweep")
        file, ladder = read_json(path / SWEEP_FILE, SweepFile) or SweepFile(), read_ladder(path)
        values: dict[str, dict[str, Any]] = {run: {**each} for run, each in file.runs.items()}
        if ladder is not None:
            values = {run: {"FLOPs": each.level, **each.values} for run, each in ladder.runs.items()} | values
            for run, each in ladder.runs.items():
                values[run]["FLOPs"] = each.level
        fields = list(dict.fromkeys(field for each in values.values() for field in each))
        return {
            "name": name,
            "fields": fields,
            "runs": [
                {
                    "run": self._name(path / run),
                    "values": [each.get(field) for field in fields],
                    "failed": file.failed.get(run),
                    **_result_of(summaries.get(path / run)),
                }
                for run, each in values.items()
            ],
        }

    def law(self, name: str) -> dict[str, Any]:
        """A law: its coefficients and best losses with their intervals, and the finished runs beside its file."""
        path = self._known(self._laws, name, "law")
        law = read_law(path)
        runs, notes = _observations(path.parent)
        return {
            "name": name,
            "law": law.form.name,
            "formula": law.form.formula,
            "source": law.form.source,
            "level": LEVEL,
            "runs_fitted": law.content.runs,
            "range": law.ranges["compute"],
            "coefficients": [
                {"group": group, "name": each, "estimate": found.estimate, "low": found.low, "high": found.high}
                for group in law.groups
                for each, found in law.coefficients[group].items()
            ],
            "curves": [_best(law, group) for group in law.groups],
            "points": [
                {
                    "name": run.name,
                    "flops": run.compute,
                    "parameters": run.parameters,
                    "tokens": run.tokens,
                    "loss": run.loss,
                }
                for run in runs
            ],
            "notes": notes,
        }

    def _evaluations(self, path: Path) -> list[dict[str, Any]]:
        """A row per score of a result; none for a file that is no result."""
        try:
            with open(path, "rb", opener=regular) as file:
                head = file.read(_HEAD)
                if file.seek(0, 2) > MOST_RESULT_BYTES:
                    return []
        except OSError:
            return []
        if BITS_FORMAT.encode() in head:
            result = read_bits_result(path)
            if result is None:
                return []
            bits, leading, plain = result.bits, "bits per byte", True
            task, model = str(result.text.get("name") or "a text"), result.model
            evaluations = [(leading, bits.bits_per_byte, bits.standard_error, bits.low, bits.high, bits.windows)]
        elif TASK_FORMAT.encode() in head:
            of_task = read_result(path)
            task, model, leading = str(of_task.task.get("name")), of_task.model, str(of_task.task.get("score"))
            plain = leading in PLAIN_SCORES
            evaluations = [
                (score, each.mean, each.standard_error, each.low, each.high, each.items)
                for score, each in of_task.scores.items()
            ]
        else:
            return []
        return [
            {
                "file": self._name(path),
                "model": str(model.get("name") or self._name(path.parent)),
                "task": task,
                "score": score,
                "leads": score == leading,
                "plain": plain or score in PLAIN_SCORES,
                "mean": mean,
                "standard_error": error,
                "low": low,
                "high": high,
                "items": items,
            }
            for score, mean, error, low, high, items in evaluations
            if math.isfinite(mean)
        ]

    def _known(self, among: dict[str, Path], name: str, kind: str) -> Path:
        if name not in among:
            self.found()
            among = self._sweeps if kind == "sweep" else self._laws
        if name not in among:
            raise NapkinError(f"there is no {kind} '{name}' below '{self._folder}': the list has the names")
        return among[name]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """JSON files that may be of a study. Of a run only its evaluations are looked at; links are not followed."""
    try:
        within = sorted(each for each in folder.iterdir() if not each.is_symlink() and not each.name.startswith("."))
        of_run = is_run(folder)
        for each in within:
            if each.is_dir():
                if depth and (not of_run or each.name == "evaluations"):
                    yield from _files(each, depth - 1)
            elif each.suffix == ".json" and not of_run:
                yield each
    except OSError:
        return


def _result_of(summary: dict[str, Any] | None) -> dict[str, Any]:
    """The loss of a run, that of its validation tokens if it has one, and how far the run is."""
    if summary is None:
        return {"loss": None, "step": 0, "steps": None, "training": False}
    loss = summary.get("validation_loss")
    loss = summary.get("loss") if loss is None else loss
    return {"loss": loss, **{name: summary.get(name) for name in ("step", "steps", "training", "seconds", "tokens")}}


def _observations(folder: Path) -> tuple[tuple[Observation, ...], list[str]]:
    runs = [str(path) for path in runs_in(folder)]
    if not runs:
        return (), ["There are no runs beside the file of this law, so its points are not known."]
    try:
        observations = read_run_observations(runs[:MOST_FILES])
    except NapkinError as error:
        return (), [str(error)]
    return observations.runs, list(observations.notes)


def _best(law: FittedLaw, group: str) -> dict[str, Any]:
    """The lowest loss for each number of FLOPs, with its interval and sizes; nothing where the law does not say."""
    least, most = law.ranges["compute"]
    budgets = [float(each) for each in np.geomspace(least, most * _BEYOND, _CURVE_POINTS)]
    optima = law.optima(budgets, group=group)
    return {
        "group": group,
        "flops": budgets if optima else [],
        "loss": [each.loss.estimate for each in optima],
        "low": [each.loss.low for each in optima],
        "high": [each.loss.high for each in optima],
        "parameters": [each.parameters.estimate for each in optima],
        "tokens": [each.tokens.estimate for each in optima],
    }
