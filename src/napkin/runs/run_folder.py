"""The folder of a run: its recipe, plan, metrics, measurements and checkpoints.

A run folder is created atomically: it is prepared under a hidden name and renamed. One process at a time trains in it.
"""

import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.files import (
    StrPath,
    atomic_write_bytes,
    atomic_write_text,
    draft_folder,
    remove_abandoned,
    sync_folder,
    try_lock,
)
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.conversation_file import CONVERSATION_FILE
from napkin.runs.json_file import read_json, write_json
from napkin.runs.run_format import (
    RUN_FILE,
    free_name,
    is_run,
    new_run_format,
    recipe_was_changed,
    refuse_other_format,
    runs_in,
    set_recipe_checksum,
    upgrade,
)
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

TRAINING_FILES = (
    "plan.json",
    "metrics.jsonl",
    "measurement.json",
    "tracking.json",
    "reference-train.safetensors",
    "reference-held-out.safetensors",
    "calibration.json",
)
"""Files that only training writes, besides the checkpoints."""

OTHER_FILES = (
    RUN_FILE,
    "recipe.toml",
    "tokenizer.json",
    CONVERSATION_FILE,
    "report.html",
    "evaluation.json",
    "samples.txt",
)
"""Files that are written when the run is made, and those that other commands may write at any time."""

DRAFT = re.compile(r"\.step-\d{8,}\.[0-9a-f]{16}\.tmp")
"""The name of a checkpoint that is being written or removed."""


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @classmethod
    def create(
        cls,
        path: StrPath,
        recipe: Recipe,
        tokenizer: Tokenizer,
        files: Mapping[str, bytes] | None = None,
        write_weights: Callable[[Path], object] = lambda checkpoints: None,
    ) -> "RunFolder":
        """Create the folder with its recipe, tokenizer and `files` by name, and with what `write_weights` writes to the
        folder of checkpoints. Raises NapkinError where it exists."""
        path = Path(path)
        cls.refuse_existing(path)
        try:
            with draft_folder(path) as draft:
                (draft / "checkpoints").mkdir()
                text = format_recipe(recipe)
                atomic_write_text(draft / RUN_FILE, new_run_format(text))
                atomic_write_text(draft / "recipe.toml", text)
                tokenizer.save(draft / "tokenizer.json")
                for name, content in (files or {}).items():
                    atomic_write_bytes(draft / name, content)
                write_weights(draft / "checkpoints")
                # Renaming a folder onto one that is not empty fails: a run created in the meantime is left as it is.
                draft.rename(path)
                sync_folder(path.parent)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be created ({error.strerror}): choose another --run") from None
        return cls(path)

    @staticmethod
    def refuse_existing(path: StrPath) -> None:
        """Raise NapkinError where `path` exists."""
        path = Path(path)
        if not os.path.lexists(path):
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
    def validation_tokens(self) -> str | None:
        """The token file that the run was evaluated on, see `token_file`; None without one, as of a run tuned on
        conversations."""
        recipe = self.recipe
        if isinstance(recipe, TuningRecipe) or recipe.data.validation is None:
            return None
        return self.token_file(recipe.data.validation)

    def token_file(self, path: str) -> str:
        """Where a token file of the run's recipe is: at `path`, or, for a run that was moved, beside it.

        Beside a run is in its folder or in one above, nearest first, under as much of `path` as is found there:
        `proof/runs/a` and `proof/text/b.tokens` belong together wherever `proof` is. There, a file by another tokenizer
        is another file. Returns `path` where nothing is found.
        """
        if os.path.lexists(path):
            return path
        below = [part for part in Path(path).parts if part not in (os.sep, os.pardir)]
        home = self.path.resolve()
        for folder in (home, *home.parents):
            for n_skipped in range(len(below)):
                found = folder.joinpath(*below[n_skipped:])
                if found.is_file() and self._has_encoded(found):
                    here = os.path.relpath(found)
                    return str(found) if here.startswith(os.pardir) else here
        return path

    def _has_encoded(self, tokens: Path) -> bool:
        # Commands that read no tokens answer before NumPy is loaded.
        from napkin.data.sidecar import read_sidecar

        try:
            return read_sidecar(tokens).tokenizer == self.tokenizer.fingerprint
        except NapkinError:
            return False

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
        write_json(self.path / name, value)

    def read_json(self, name: str) -> Any:
        """Read one of the run's JSON files, an object; None where it does not exist yet."""
        return read_json(self.path / name, dict)

    def remove_leftovers(self) -> None:
        """Remove what killed writers have left: temporary files, and folders of checkpoints; the lock must be held.

        What a live process is writing stays, such as `napkin report`, which needs no lock.
        """
        remove_abandoned(self.path)
        for name in (*TRAINING_FILES, *OTHER_FILES):
            remove_abandoned(self.path / name)
        # Only the process that trains the run writes checkpoints.
        for path in self.checkpoints.iterdir():
            if DRAFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def upgrade(self) -> None:
        """Give a run of an older version the version of what is written from now on; the lock must be held."""
        upgrade(self.path)

    def replace_recipe(self, recipe: Recipe) -> None:
        """Write another recipe.toml, which says the same in other words or at other places."""
        text, was_changed = format_recipe(recipe), self.recipe_was_changed
        # Between the two files the recipe is not known, so that a kill there does not make it look altered.
        if not was_changed:
            set_recipe_checksum(self.path, None)
        atomic_write_text(self.path / "recipe.toml", text, overwrite=True)
        if not was_changed:
            set_recipe_checksum(self.path, text)

    @property
    def recipe_was_changed(self) -> bool:
        """Whether recipe.toml is known to be another one than the run was created with."""
        return recipe_was_changed(self.path)

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

    def upgrade(self) -> None:
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
