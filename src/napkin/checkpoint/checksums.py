"""SHA256SUMS: which files a checkpoint has, and what is in them to the bit; in the form that `sha256sum -c` reads."""

from hashlib import sha256
from pathlib import Path

from napkin.checkpoint.shard_files import STEMS, shard_names
from napkin.errors import CorruptFile
from napkin.files import atomic_write_bytes, atomic_write_text

SUMS = "SHA256SUMS"
TENSOR_FILES = tuple(f"{stem}.safetensors" for stem in STEMS)
"""Of a checkpoint that is not in parts."""


def write_state(draft: Path, state: bytes, sums: dict[str, str]) -> None:
    """Add to files of tensors, whose checksums are `sums`, what makes a checkpoint of them."""
    atomic_write_bytes(draft / "state.json", state)
    sums = {**sums, "state.json": checksum_of(draft / "state.json")}
    atomic_write_text(draft / SUMS, _format_sums(sums))


def read_sums(folder: Path) -> dict[str, str]:
    """Checksums by file name, of all the files that a checkpoint has. Raises CorruptFile."""
    path = folder / SUMS
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise damaged(path, "is no text") from None
    sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}
    wanted = [*(shard_names(sums) or TENSOR_FILES), "state.json"]
    if sums.keys() != set(wanted) or text != _format_sums(sums):
        raise damaged(path, f"does not list {', '.join(wanted)}")
    return sums


def _format_sums(sums: dict[str, str]) -> str:
    return "".join(f"{checksum}  {name}\n" for name, checksum in sums.items())


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    checksum = sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            checksum.update(chunk)
    return checksum.hexdigest()


def damaged(path: Path, how: str) -> CorruptFile:
    """The error that names a file of a checkpoint and what is wrong with it."""
    return CorruptFile(f"'{path}' {how}: put it back as it was, or remove its folder to begin from an earlier step")
