"""The folder of a sweep: its runs, and sweep.json, which says which they are and which have failed."""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from napkin.errors import NapkinError
from napkin.runs.json_file import read_json, write_json
from napkin.runs.run_format import is_run, runs_in
from napkin.scaling.axis import Value
from napkin.scaling.trials import Trial
from napkin.training.start import recipe_differences

SWEEP_FILE = "sweep.json"
FORMAT, VERSION = "napkin-sweep", 1


@dataclass(frozen=True)
class SweepFile:
    """sweep.json."""

    format: str = FORMAT
    version: int = VERSION
    runs: dict[str, dict[str, Value]] = field(default_factory=dict)
    """The values of each run's axes, by the name of its folder."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why runs have failed."""


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    def run(self, trial: Trial) -> Path:
        """The folder of a run."""
        return self.path / trial.name

    def open(self, trials: tuple[Trial, ...], besides: Sequence[str] = ()) -> SweepFile:
        """What the folder holds of this sweep; nothing is written.

        A sweep may have runs that an earlier one in this folder did not have, but not the other way round. Raises
        NapkinError where the folder holds anything else, or a run of another recipe.
        """
        if not os.path.lexists(self.path):
            return SweepFile()
        if not self.path.is_dir():
            raise NapkinError(f"'{self.path}' exists and is not a folder: choose another --runs")
        found = read_json(self.path / SWEEP_FILE, SweepFile)
        if found is None:
            if {path.name for path in self.path.iterdir()} - set(besides):
                what = "is a run" if is_run(self.path) else "holds runs" if runs_in(self.path) else "is not empty"
                raise NapkinError(f"'{self.path}' {what} and is not of a sweep: choose another --runs")
            return SweepFile()
        if found.format != FORMAT or not 0 < found.version <= VERSION:
            raise NapkinError(
                f"'{self.path / SWEEP_FILE}' has format {found.format[:40]!r}, version {found.version}, this napkin "
                f"reads versions up to {VERSION}: use the napkin that made it"
            )
        self._refuse_other(found, trials)
        return found

    def _refuse_other(self, found: SweepFile, trials: tuple[Trial, ...]) -> None:
        values = {trial.name: trial.values for trial in trials}
        missing = [name for name in found.runs if name not in values]
        if missing:
            raise NapkinError(
                f"'{self.path}' holds another sweep, of {len(found.runs)} runs: {missing[0]} is not in this one: "
                "name all of its values and new ones, or choose another --runs"
            )
        for trial in trials:
            if is_run(self.run(trial)) and (differences := recipe_differences(trial.recipe, self.run(trial))):
                raise NapkinError(
                    f"'{self.run(trial)}' is a run of another recipe: there {'; '.join(differences)}: choose another "
                    "--runs"
                )

    def write(self, found: SweepFile, trials: tuple[Trial, ...]) -> SweepFile:
        """Make the folder, and write which runs it is for."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = dataclasses.replace(found, runs={trial.name: trial.values for trial in trials})
        write_json(self.path / SWEEP_FILE, file)
        return file

    def write_failure(self, file: SweepFile, name: str, why: str | None) -> SweepFile:
        """Write that a run has failed, and why; None is that it has not."""
        failed = {each: text for each, text in file.failed.items() if each != name}
        changed = dataclasses.replace(file, failed=failed if why is None else {**failed, name: why})
        if changed != file:
            write_json(self.path / SWEEP_FILE, changed)
        return changed

    def __str__(self) -> str:
        return shlex.quote(str(self.path))
