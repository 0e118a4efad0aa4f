"""run.json: marks a folder as a run, with the version of its format.

Version 2 is what `RunFolder`, `PlanFile`, `StepMetrics`, `MeasurementFile`, `Evaluation` and the state.json of
checkpoints describe. In version 1, JSON files and lines of metrics.jsonl have no checksums. Folders that were created
before run.json existed are version 0, otherwise the same. Both can be read; resuming makes version 1 version 2.
"""

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import napkin
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import atomic_write_text
from napkin.runs.checksum_field import crc32
from napkin.runs.json_file import decode_json, format_json, read_if_present

RUN_FILE = "run.json"
FORMAT, VERSION = "napkin-run", 2
MOST_NAMED = 3
"""Runs that an error names."""


@dataclass(frozen=True)
class RunFormat:
    """run.json."""

    format: str
    version: int
    napkin: str = ""
    """The version of napkin that created the run."""
    created: str = ""
    recipe_crc32: str = ""
    """Of recipe.toml as it was created; empty where that is not known."""


def new_run_format(recipe: str) -> str:
    """The text of a new run's run.json; `recipe` is the text of its recipe.toml."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return format_json(RunFormat(FORMAT, VERSION, napkin.__version__, created, crc32(recipe.encode())))


def recipe_was_changed(path: Path) -> bool:
    """Whether a run's recipe.toml is known to be another one than the run was created with."""
    expected = _read(path).recipe_crc32 if (path / RUN_FILE).is_file() else ""
    return expected not in ("", crc32(read_if_present(path / "recipe.toml") or b""))


def set_recipe_checksum(path: Path, recipe: str | None) -> None:
    """Say in a run's run.json what its recipe.toml is, or with None that it is not known."""
    if (path / RUN_FILE).is_file():
        found = dataclasses.replace(_read(path), recipe_crc32="" if recipe is None else crc32(recipe.encode()))
        atomic_write_text(path / RUN_FILE, format_json(found), overwrite=True)


def upgrade(path: Path) -> None:
    """Give a run that this napkin is about to write into the version of what it writes."""
    if (path / RUN_FILE).is_file() and (found := _read(path)).version < VERSION:
        atomic_write_text(path / RUN_FILE, format_json(dataclasses.replace(found, version=VERSION)), overwrite=True)


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
    if not (path / RUN_FILE).is_file():
        return
    found = _read(path)
    if found.format != FORMAT or not 0 < found.version <= VERSION:
        made_by = f", {found.napkin[:40]}" if found.napkin else ""
        raise NapkinError(
            f"'{path}' is a run of format {found.format[:40]!r}, version {found.version}, this napkin "
            f"({napkin.__version__}) reads versions up to {VERSION}: use the napkin that made it{made_by}"
        )


def _read(path: Path) -> RunFormat:
    file = path / RUN_FILE
    try:
        return decode_json(read_if_present(file) or b"", RunFormat)
    except (ValueError, RecursionError) as error:
        how = first_line(error)
        raise CorruptFile(f"'{file}' does not describe a run ({how}): put it back as it was") from None
