"""The folder of checkpoints: their names, their verification, and which are kept.

`step-00000200/` holds model.safetensors, optimizer.safetensors, state.json, and SHA256SUMS over the three, in the
form that `sha256sum -c` reads; of a sharded model each rank has files of its own in place of the first two. Nothing in
it is a program: tensors are safetensors, the rest is text.
"""

import re
import secrets
import shutil
from pathlib import Path

import msgspec

from napkin.checkpoint.checksums import SUMS, checksum_of, damaged, read_sums
from napkin.checkpoint.state import Checkpoint, State
from napkin.files import sync_folder

_NAME = re.compile(r"step-(\d{8,})")


def prune_checkpoints(folder: Path, *, keep: int, best: int | None = None) -> None:
    """Remove all but the `keep` newest checkpoints and that of step `best`, and what killed writers left behind."""
    for path in checkpoint_paths(folder)[keep:]:
        if best is not None and path == checkpoint_path(folder, best):
            continue
        # Renamed first: a kill half-way through leaves no checkpoint with files missing.
        path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way, so that it neither counts as one nor is removed; its new path."""
    names = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def checkpoint_paths(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first; what else somebody keeps beside them is left alone."""
    numbered = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A checkpoint whose files are, to the bit, as they were written; unless `verify`, as somebody else has seen.

    Raises CorruptFile naming the file and what is wrong with it.
    """
    expected = read_sums(path)
    for name in expected if verify else ():
        try:
            found = checksum_of(path / name)
        except OSError as error:
            raise damaged(path / name, f"cannot be read ({error.strerror})") from None
        if found != expected[name]:
            raise damaged(path / name, f"was shortened or altered, its SHA-256 is not the one in {SUMS}")
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(path / "state.json", f"does not describe a checkpoint of this version ({error})") from None
    if path != checkpoint_path(path.parent, state.step):
        raise damaged(path / "state.json", f"describes another checkpoint, of step {state.step}")
    return Checkpoint(path, state)
