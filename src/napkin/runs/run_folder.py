"""The folder of a run: its recipe, plan, metrics, measurements and checkpoints.

A run folder is created atomically: it is prepared under a hidden name and renamed. One process at a time trains in it.

run.json marks a folder as a run, with the version of its format. Version 2 is what `RunFolder`, `PlanFile`,
`StepMetrics`, `MeasurementFile`, `Evaluation` and the state.json of checkpoints describe. In version 1, JSON files and
lines of metrics.jsonl have no checksums. Folders that were created before run.json existed are version 0, otherwise the
same. Both can be read; resuming makes version 1 version 2.

A process that trains in a run folder holds the folder's lock, which the system releases when the process ends.

conversation.json says how texts and conversations become tokens of a tuned model. A run without it was trained on
documents: each begins and ends with the separator, and there is no chat template. quantized.json describes the folder
of a quantized run, with the checksums of its other files.
"""

import dataclasses
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

import napkin
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import (
    StrPath,
    atomic_write_bytes,
    atomic_write_text,
    draft_folder,
    remove_abandoned,
    sync_folder,
    try_lock,
)
from napkin.json_files import (
    LARGEST,
    crc32,
    decode_json,
    format_json,
    malformed,
    read_if_present,
    read_json,
    write_json,
)
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, is_program, read_recipe
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.toml_files import read_toml

RUN_FILE = "run.json"
CONVERSATION_FILE = "conversation.json"
QUANTIZED_FILE = "quantized.json"
FORMAT, VERSION = "napkin-run", 2
MOST_NAMED = 3
"""The most runs that an error names."""
WAY_OUT = "name a folder that `napkin train` made"


@dataclass(frozen=True)
class RunFormat:
    """The contents of run.json."""

    format: str
    version: int
    napkin: str = ""
    """The version of napkin that created the run."""
    created: str = ""
    recipe_crc32: str = ""
    """The CRC-32 of recipe.toml as it was created; empty where that is not known."""


def is_run(path: Path) -> bool:
    """True for a run of any version: by its run.json or, for version 0, by its files."""
    if (path / RUN_FILE).is_file():
        return True
    return (path / "recipe.toml").is_file() and (path / "tokenizer.json").is_file() and (path / "checkpoints").is_dir()


def is_of_program(path: Path) -> bool:
    """True for the run of a program that napkin watched, which has no model of napkin's and nothing to resume."""
    try:
        return is_program(read_toml(path / "recipe.toml", "a run's recipe"))
    except NapkinError:
        return False


def runs_in(path: Path) -> list[Path]:
    """The runs directly in a folder, by name; those of something else than a folder are none."""
    try:
        return sorted(each for each in path.iterdir() if is_run(each)) if path.is_dir() else []
    except OSError:
        return []


def what_is_there(path: Path, missing: str = "it holds no run.json", way_out: str = WAY_OUT) -> str:
    """A phrase for what is at a path that is not a run, and the way out: a run in it, or the one that it is in, if
    there is one."""
    within = runs_in(path)
    problem = "it does not exist" if not path.exists() else missing
    if path.is_file():
        problem += ", it is a file"
    if within:
        way_out = f"name a run in it: {', '.join(str(each) for each in within[:MOST_NAMED])}"
        way_out += f", or {len(within) - MOST_NAMED:,} others" if len(within) > MOST_NAMED else ""
    elif is_run(path.parent):
        way_out = f"name the run that it is in: {path.parent}"
    return f"{problem}: {way_out}"


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
                created = datetime.now(UTC).isoformat(timespec="seconds")
                marked = RunFormat(FORMAT, VERSION, napkin.__version__, created, crc32(text.encode()))
                atomic_write_text(draft / RUN_FILE, format_json(marked))
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
        path = Path(path)
        if not os.path.lexists(path):
            return
        if is_run(path) and is_of_program(path):
            way_out = "a program that napkin watched has written it: choose another --run"
        elif is_run(path):
            way_out = f"continue it with `napkin resume {shlex.quote(str(path))}` or choose another --run"
        elif path.is_dir():
            what = "holds runs" if runs_in(path) else "is a folder without a run"
            names = ("run", *(f"run-{number}" for number in range(2, 10**6)))
            free = next(path / name for name in names if not (path / name).exists())
            way_out = f"it {what}: choose a --run in it, such as {shlex.quote(str(free))}"
        else:
            way_out = "it is a file, not a run: choose another --run"
        raise NapkinError(f"'{path}' exists and is not overwritten: {way_out}")

    @classmethod
    def open(cls, path: StrPath) -> "RunFolder":
        """Open the folder of an existing run. Raises NapkinError where it is not a run of a known format."""
        path = Path(path)
        if not is_run(path):
            raise NapkinError(f"'{path}' is not a run, {what_is_there(path)}")
        format = cls(path).format
        if format is not None and (format.format != FORMAT or not 0 < format.version <= VERSION):
            made_by = f", {format.napkin[:40]}" if format.napkin else ""
            raise NapkinError(
                f"'{path}' is a run of format {format.format[:40]!r}, version {format.version}, this napkin "
                f"({napkin.__version__}) reads versions up to {VERSION}: use the napkin that made it{made_by}"
            )
        return cls(path)

    @property
    def format(self) -> RunFormat | None:
        """The contents of run.json; None for version 0, which has none."""
        file = self.path / RUN_FILE
        if not file.is_file():
            return None
        try:
            return decode_json(read_if_present(file) or b"", RunFormat)
        except (ValueError, RecursionError) as error:
            how = first_line(error)
            raise CorruptFile(f"'{file}' does not describe a run ({how}): put it back as it was") from None

    @property
    def recipe(self) -> Recipe:
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
        """Return the path of a token file of the run's recipe: `path`, or, for a run that was moved, beside it.

        "Beside" means in the run's folder or one above, nearest first, under as much of the end of `path` as exists
        there: `proof/runs/a` and `proof/text/b.tokens` belong together wherever `proof` is. A file found there that was
        made with another tokenizer is skipped. Returns `path` where nothing is found.
        """
        if os.path.lexists(path):
            return path
        below = [part for part in Path(path).parts if part not in (os.sep, os.pardir)]
        home = self.path.resolve()
        for folder in (home, *home.parents):
            for n_skipped in range(len(below)):
                candidate = folder.joinpath(*below[n_skipped:])
                if candidate.is_file() and self._has_encoded(candidate):
                    here = os.path.relpath(candidate)
                    return str(candidate) if here.startswith(os.pardir) else here
        return path

    def _has_encoded(self, tokens: Path) -> bool:
        # Commands that read no tokens answer before NumPy is loaded.
        from napkin.data.token_file import read_sidecar

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
        return self.path / "checkpoints"

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the run's JSON files atomically, replacing an earlier one."""
        write_json(self.path / name, value)

    def read_json(self, name: str) -> Any:
        """Read one of the run's JSON files, an object; None where it does not exist yet."""
        return read_json(self.path / name, dict)

    def remove_leftovers(self) -> None:
        """Remove what killed writers have left: temporary files, and folders of checkpoints; the lock must be held.

        Files that a live process is writing stay, such as those of `napkin report`, which needs no lock.
        """
        remove_abandoned(self.path)
        for name in (*TRAINING_FILES, *OTHER_FILES):
            remove_abandoned(self.path / name)
        # Only the process that trains the run writes checkpoints.
        for path in self.checkpoints.iterdir():
            if DRAFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def upgrade(self) -> None:
        """Raise the run's version to the present one; the lock must be held."""
        if (format := self.format) is not None and format.version < VERSION:
            self._write_format(dataclasses.replace(format, version=VERSION))

    def replace_recipe(self, recipe: Recipe) -> None:
        """Write another recipe.toml, which says the same in other words or with other paths."""
        text, format = format_recipe(recipe), None if self.recipe_was_changed else self.format
        # Between the two writes the recipe's checksum is unknown, so that a kill there does not make the recipe look
        # altered.
        if format is not None:
            self._write_format(dataclasses.replace(format, recipe_crc32=""))
        atomic_write_text(self.path / "recipe.toml", text, overwrite=True)
        if format is not None:
            self._write_format(dataclasses.replace(format, recipe_crc32=crc32(text.encode())))

    def _write_format(self, format: RunFormat) -> None:
        atomic_write_text(self.path / RUN_FILE, format_json(format), overwrite=True)

    @property
    def recipe_was_changed(self) -> bool:
        """True if recipe.toml is known to differ from the one that the run was created with."""
        format = self.format
        expected = "" if format is None else format.recipe_crc32
        return expected not in ("", crc32(read_if_present(self.path / "recipe.toml") or b""))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock while the block runs. Raises NapkinError where another process is training in it."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # A process that asks whether the run is being trained holds the lock for an instant.
            for pause in (0.05, 0.1, 0.2, None):
                if try_lock(descriptor):
                    break
                if pause is not None:
                    time.sleep(pause)
            else:
                raise NapkinError(
                    f"'{self.path}' is being trained by another process: wait for it, or stop it, and try again"
                )
            yield
        finally:
            os.close(descriptor)


class ReadOnlyRunFolder(RunFolder):
    """A read-only view of a run for ranks other than 0; writes are no-ops."""

    def write_json(self, name: str, value: Any) -> None: ...

    def remove_leftovers(self) -> None: ...

    def upgrade(self) -> None: ...

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield


def lower_learning_rate(run: Path, *, otherwise: str = "") -> str:
    """A hint for error messages on continuing a run that has diverged; `otherwise` is an alternative to the learning
    rate."""
    # `napkin resume` takes no options: it trains by the recipe in the run's folder.
    return (
        f"lower learning_rate in '{run / 'recipe.toml'}'{otherwise} and `napkin resume {run}`; "
        f"earlier checkpoints in '{run / 'checkpoints'}' are kept"
    )


def is_being_trained(run: Path) -> bool | None:
    """True if a process holds the run's lock, as `RunFolder.locked` does; None where that cannot be found out."""
    try:
        import fcntl

        with open(run / ".lock", "rb") as file:
            try:
                # A shared lock, released at once: concurrent queries do not block each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return None
    return False


_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Figure = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


class ConversationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of conversation.json."""

    format: Literal["napkin-conversation"]
    version: Literal[1]
    first_ids: tuple[_Id, ...]
    """Tokens before every text; a chat template writes its own."""
    stop_ids: tuple[_Id, ...]
    """Tokens at which a text ends."""
    chat_template: str | None = None
    """The template in jinja; None without one."""
    template_tokens: dict[str, str] = {}
    """Texts that the template may name: bos_token, eos_token and so on."""


def conversation_files(conversation: ConversationFile) -> dict[str, bytes]:
    """The files of a new run that `RunFolder.create` writes for it."""
    return {CONVERSATION_FILE: format_json(conversation).encode()}


def read_conversation(run: Path, tokenizer: Tokenizer) -> ConversationFile | None:
    """Read a run's conversation.json; None where it has none. Raises CorruptFile where it is not one, or is not of that
    tokenizer."""
    conversation = read_json(run / CONVERSATION_FILE, ConversationFile)
    for each in () if conversation is None else (*conversation.first_ids, *conversation.stop_ids):
        if each >= tokenizer.vocab_size:
            raise CorruptFile(
                f"'{run / CONVERSATION_FILE}' names token {each}, the tokenizer has {tokenizer.vocab_size}: restore it"
            )
    return conversation


class QuantizedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of quantized.json."""

    format: Literal["napkin-quantized"]
    version: Literal[1]
    to: Literal["int8", "int4"]
    group_size: Annotated[int, msgspec.Meta(ge=2, le=2**20)]
    """Numbers that share a scale in int4."""
    step: _Count
    """Updates of the model."""
    source: str
    """The folder of the run, as it was named."""
    evaluated_tokens: _Count
    """Validation tokens of the next two numbers; 0 if there were none."""
    bits_per_byte: _Figure
    """Bits per byte after quantization."""
    original_bits_per_byte: _Figure
    """Bits per byte before quantization."""
    checksums: dict[str, str]
    """SHA-256 of the other files."""


def is_quantized(folder: Path) -> bool:
    """True for the folder of a quantized run."""
    return (folder / QUANTIZED_FILE).is_file()


def read_quantized_file(folder: Path) -> QuantizedRun:
    """Read quantized.json. Raises CorruptFile where it is not one."""
    quantized = read_json(folder / QUANTIZED_FILE, QuantizedRun)
    if quantized is None:
        raise malformed(folder / QUANTIZED_FILE, ValueError("it does not exist"))
    # Runs that were tuned have a file more.
    if quantized.checksums.keys() - {CONVERSATION_FILE} != {"model.safetensors", "recipe.toml", "tokenizer.json"}:
        raise CorruptFile(f"'{folder / QUANTIZED_FILE}' does not list the files of a quantized run: restore it")
    return quantized
