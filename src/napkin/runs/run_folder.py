"""The folder of a run: its recipe, plan, metrics, measurements and checkpoints.

A run folder is created atomically: it is prepared under a hidden name and renamed. One process at a time trains in it.
"""

import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_write_text, sync_folder, try_lock
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.runs.run_format import RUN_FILE, free_name, is_run, new_run_format, refuse_other_format, runs_in
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

TRAINING_FILES = ("plan.json", "metrics.jsonl", "measurement.json", "tracking.json")
"""Files that only training writes, besides the checkpoints."""


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @classmethod
    def create(cls, path: StrPath, recipe: Recipe, tokenizer: Tokenizer) -> "RunFolder":
        """Create the folder with its recipe and tokenizer. Raises NapkinError where it exists."""
        path = Path(path)
        cls.refuse_existing(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            draft.mkdir(parents=True)
            (draft / "checkpoints").mkdir()
            atomic_write_text(draft / RUN_FILE, new_run_format())
            atomic_write_text(draft / "recipe.toml", format_recipe(recipe))
            tokenizer.save(draft / "tokenizer.json")
            # Renaming a folder onto one that is not empty fails: a run created in the meantime is left as it is.
            draft.rename(path)
            sync_folder(path.parent)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be created ({error.strerror}): choose another --run") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls(path)

    @staticmethod
    def refuse_existing(path: StrPath) -> None:
        """Raise NapkinError where `path` exists."""
        path = Path(path)
        if not path.exists():
            return
        if is_run(path):
            way_out = f"continue it with `napkin resume {shlex.quote(str(path))}` or choose another --run"
        elif path.is_dir():
            what = "holds runs" if runs_in(path) else "is a folder without a run"
            way_out = f"it {what}: choose a --run in it, such as {shlex.quote(str(free_name(path)))}"
        else:
            way_out = "it is a file, not a run: choose another --run"
        raise NapkinError(f"'{path}' exists and is not overwritten: {way_out}")

    @classmethod
    def open(cls, path: StrPath) -> "RunFolder":
        """Open the folder of an existing run. Raises NapkinError where it is not a run of a known format."""
        path = Path(path)
        refuse_other_format(path)
        return cls(path)

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return read_recipe(self.path / "recipe.toml")

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's own copy of its tokenizer."""
        return load_tokenizer(self.path / "tokenizer.json")

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints."""
        return self.path / "checkpoints"

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the run's JSON files atomically, replacing an earlier one."""
        text = json.dumps(msgspec.to_builtins(value), indent=2) + "\n"
        atomic_write_text(self.path / name, text, overwrite=True)

    def read_json(self, name: str) -> Any:
        """Read one of the run's JSON files; None where it does not exist yet."""
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise CorruptFile(f"'{path}' is not JSON ({error}): remove it") from None

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed writers; the lock must be held."""
        for name in TRAINING_FILES:
            for path in self.path.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock while the block runs. Raises NapkinError where another process is training in it."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock_soon(descriptor):
                raise NapkinError(
                    f"'{self.path}' is being trained by another process: wait for it, or stop it, and try again"
                )
            yield
        finally:
            os.close(descriptor)


class ReadOnlyRunFolder(RunFolder):
    """A read-only view of a run for ranks other than 0; writes are no-ops."""

    def write_json(self, name: str, value: Any) -> None:
        """A no-op: rank 0 does it."""

    def remove_leftovers(self) -> None:
        """A no-op: rank 0 does it."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A no-op: rank 0 holds the lock."""
        yield


def lower_learning_rate(run: Path, *, otherwise: str = "") -> str:
    """How to continue a run that has diverged, for error messages; `otherwise` is an alternative to the learning
    rate."""
    # `napkin resume` takes no options: it trains by the recipe in the run's folder.
    return (
        f"lower learning_rate in '{run / 'recipe.toml'}'{otherwise} and `napkin resume {run}`; "
        f"earlier checkpoints in '{run / 'checkpoints'}' are kept"
    )


def _lock_soon(descriptor: int) -> bool:
    """`try_lock`, with a few retries: a process that asks whether the run is being trained holds the lock for an
    instant."""
    for pause in (0.05, 0.1, 0.2):
        if try_lock(descriptor):
            return True
        time.sleep(pause)
    return try_lock(descriptor)
