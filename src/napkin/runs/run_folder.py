"""The folder of a run: what was chosen, what was predicted, what was measured, and the checkpoints.

A run folder appears whole: it is prepared under a hidden name and renamed. One process at a time trains in it.
"""

import json
import os
import secrets
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
from napkin.runs.run_format import RUN_FILE, new_run_format, refuse_other_format
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

TRAINING_FILES = ("plan.json", "metrics.jsonl", "measurement.json", "tracking.json")
"""Files that training alone writes, beside the checkpoints."""


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @classmethod
    def create(cls, path: StrPath, recipe: Recipe, tokenizer: Tokenizer) -> "RunFolder":
        """Make the folder with its recipe and tokenizer; a NapkinError where it exists."""
        path = Path(path)
        cls.refuse_existing(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            draft.mkdir(parents=True)
            (draft / "checkpoints").mkdir()
            atomic_write_text(draft / RUN_FILE, new_run_format())
            atomic_write_text(draft / "recipe.toml", format_recipe(recipe))
            tokenizer.save(draft / "tokenizer.json")
            # Renaming a folder onto one that is not empty fails: a run that appeared meanwhile is not touched.
            draft.rename(path)
            sync_folder(path.parent)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be made ({error.strerror}): choose another --run") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls(path)

    @staticmethod
    def refuse_existing(path: StrPath) -> None:
        """Raise NapkinError where a run, or anything else, is at `path`."""
        if Path(path).exists():
            raise NapkinError(
                f"'{path}' exists and is not overwritten: "
                f"continue it with `napkin resume {path}` or choose another --run"
            )

    @classmethod
    def open(cls, path: StrPath) -> "RunFolder":
        """The folder of a run that was started before. Raises NapkinError where it is not one of a known format."""
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
        """Write one of the run's JSON files, whole, in place of an earlier one."""
        text = json.dumps(msgspec.to_builtins(value), indent=2) + "\n"
        atomic_write_text(self.path / name, text, overwrite=True)

    def read_json(self, name: str) -> Any:
        """One of the run's JSON files, or None where it is not there yet."""
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise CorruptFile(f"'{path}' is not JSON ({error}): remove it") from None

    def remove_leftovers(self) -> None:
        """Remove what killed writers left beside the files that training alone writes; the lock must be held."""
        for name in TRAINING_FILES:
            for path in self.path.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process; a NapkinError where another process trains in it."""
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
        """Left to rank 0."""

    def remove_leftovers(self) -> None:
        """Left to rank 0."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Rank 0 holds the lock for all."""
        yield


def lower_learning_rate(run: Path, *, otherwise: str = "") -> str:
    """The way on for a run whose numbers have become infinite or NaN, with another way between its halves."""
    # `napkin resume` takes no options: what it goes on with stands in the run's own recipe.
    return (
        f"lower learning_rate in '{run / 'recipe.toml'}'{otherwise} and `napkin resume {run}`; "
        f"earlier checkpoints in '{run / 'checkpoints'}' are kept"
    )


def _lock_soon(descriptor: int) -> bool:
    """`try_lock`, repeated for a moment: a process that asks whether the run is trained holds it for an instant."""
    for pause in (0.05, 0.1, 0.2):
        if try_lock(descriptor):
            return True
        time.sleep(pause)
    return try_lock(descriptor)
