"""run.json: marks a folder as a run, with the version of its format.

Version 1 is what `RunFolder`, `PlanFile`, `StepMetrics`, `MeasurementFile`, `Evaluation` and the state.json of
checkpoints describe. Folders that were created before run.json existed are version 0: their other files are the same,
and they can be read.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import napkin
from napkin.errors import CorruptFile, NapkinError

RUN_FILE = "run.json"
MOST_NAMED = 3
"""Runs that an error names."""
FORMAT, VERSION = "napkin-run", 1


class RunFormat(msgspec.Struct, frozen=True):
    """run.json."""

    format: str
    version: int
    napkin: str = ""
    """The version of napkin that created the run."""
    created: str = ""


def new_run_format() -> str:
    """The text of a new run's run.json."""
    made = RunFormat(FORMAT, VERSION, napkin.__version__, datetime.now(UTC).isoformat(timespec="seconds"))
    return json.dumps(msgspec.to_builtins(made), indent=2) + "\n"


def is_run(path: Path) -> bool:
    """Whether a folder is a run of any version: by its run.json or, for version 0, by its files."""
    if (path / RUN_FILE).is_file():
        return True
    return (path / "recipe.toml").is_file() and (path / "tokenizer.json").is_file() and (path / "checkpoints").is_dir()


def runs_in(path: Path) -> list[Path]:
    """The runs directly in a folder, by name; those of something else than a folder are none."""
    try:
        return sorted(each for each in path.iterdir() if is_run(each)) if path.is_dir() else []
    except OSError:
        return []


def free_name(folder: Path) -> Path:
    """A path in a folder that does not exist: run, run-2, run-3, ..."""
    names = ("run", *(f"run-{number}" for number in range(2, 10**6)))
    return next(folder / name for name in names if not (folder / name).exists())


def refuse_other_format(path: Path) -> None:
    """Raise NapkinError where a folder is not a run, or has a version that this napkin does not know."""
    if not is_run(path):
        within = runs_in(path)
        found = "it does not exist" if not path.exists() else "it holds no run.json"
        if path.is_file():
            found += ", it is a file"
        way_out = "name a folder that `napkin train` made"
        if within:
            way_out = f"name a run in it: {', '.join(str(each) for each in within[:MOST_NAMED])}"
            way_out += f", or {len(within) - MOST_NAMED:,} others" if len(within) > MOST_NAMED else ""
        elif is_run(path.parent):
            way_out = f"name the run that it is in: {path.parent}"
        raise NapkinError(f"'{path}' is not a run, {found}: {way_out}")
    file = path / RUN_FILE
    if not file.is_file():
        return
    try:
        found = msgspec.json.decode(file.read_bytes(), type=RunFormat)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(f"'{file}' does not describe a run ({error}): put it back as it was") from None
    if found.format != FORMAT or not 0 < found.version <= VERSION:
        made_by = f", {found.napkin}" if found.napkin else ""
        raise NapkinError(
            f"'{path}' is a run of format {found.format!r}, version {found.version}, this napkin "
            f"({napkin.__version__}) reads versions up to {VERSION}: use the napkin that made it{made_by}"
        )
