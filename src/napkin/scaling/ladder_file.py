"""ladder.json, beside the runs of a ladder: their recipes, so that the same ladder goes on whatever a new plan says."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.toml_text import parse_toml
from napkin.runs.json_file import read_json, write_json
from napkin.scaling.axis import Value
from napkin.scaling.ladder import Rung
from napkin.scaling.trials import Trial

LADDER_FILE = "ladder.json"
FORMAT, VERSION = "napkin-ladder", 1


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder."""

    level: float
    """FLOPs that it was made for."""
    values: dict[str, Value]
    recipe: str
    """As TOML."""

    @property
    def parsed(self) -> Recipe:
        """The recipe. Raises NapkinError where it is none."""
        try:
            return msgspec.convert(parse_toml(self.recipe), Recipe)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
            raise NapkinError(f"{LADDER_FILE} holds a recipe that cannot be read ({error}): restore the file") from None


@dataclass(frozen=True)
class LadderFile:
    """ladder.json."""

    format: str = FORMAT
    version: int = VERSION
    runs: dict[str, LadderRun] = field(default_factory=dict)
    """By the names of their folders."""
    next: LadderRun | None = None
    """The larger run that the law is to predict."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The runs of the ladder, for a sweep."""
        return tuple(Trial(name, run.values, run.parsed) for name, run in self.runs.items())


def ladder_file_of(rungs: tuple[Rung, ...], larger: Rung | None) -> LadderFile:
    """What is written of a ladder, and of the run after it."""
    return LadderFile(
        runs={rung.trial.name: _run(rung) for rung in rungs}, next=None if larger is None else _run(larger)
    )


def read_ladder(folder: Path) -> LadderFile | None:
    """The ladder in a folder of runs; None where there is none."""
    found = read_json(folder / LADDER_FILE, LadderFile)
    if found is not None and (found.format != FORMAT or found.version != VERSION):
        raise NapkinError(
            f"'{folder / LADDER_FILE}' has format {found.format[:40]!r}, version {found.version}, this napkin reads "
            f"version {VERSION}: use the napkin that made it"
        )
    return found


def write_ladder(folder: Path, file: LadderFile) -> None:
    """Write ladder.json into a folder of runs, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / LADDER_FILE, file)


def _run(rung: Rung) -> LadderRun:
    return LadderRun(rung.level, rung.trial.values, format_recipe(rung.trial.recipe))
