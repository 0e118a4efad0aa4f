"""SHA256SUMS: the checksums of all files of a checkpoint, in the format that `sha256sum -c` reads."""

from hashlib import sha256
from pathlib import Path

from napkin.checkpoint.shard_files import STEMS, tensor_files
from napkin.errors import CorruptFile
from napkin.files import atomic_write_bytes, atomic_write_text, read_bytes, regular

SUMS = "SHA256SUMS"
FROZEN = "../frozen/model.safetensors"
"""The weights that a run does not train, as a checkpoint that needs them lists them; see `frozen_file.py`."""
TENSOR_FILES = tuple(f"{stem}.safetensors" for stem in STEMS)
"""The tensor files of a checkpoint that is not sharded."""


def write_state(draft: Path, state: bytes, sums: dict[str, str], *, frozen: str | None = None) -> None:
    """Complete a checkpoint: add state.json and SHA256SUMS to tensor files whose checksums are `sums`; `frozen` is that
    of the run's frozen weights, if it has any."""
    atomic_write_bytes(draft / "state.json", state)
    sums = {**sums, "state.json": checksum_of(draft / "state.json")}
    write_sums(draft, sums if frozen is None else {**sums, FROZEN: frozen})


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write the checksums of files, by name, into a folder."""
    atomic_write_text(folder / SUMS, _format_sums(sums))


def read_sums(folder: Path) -> dict[str, str]:
    """Read the checksums of all files of a checkpoint, by file name; of one that needs frozen weights those too.

    Raises CorruptFile.
    """
    sums, text = parse_sums(folder)
    expected = [*(name for stem in STEMS for name in tensor_files(stem, sums)), "state.json"]
    if sums.keys() - {FROZEN} != set(expected) or text != _format_sums(sums):
        raise damaged(folder / SUMS, f"does not list {', '.join(expected)}")
    return sums


def parse_sums(folder: Path) -> tuple[dict[str, str], str]:
    """The checksums in a folder, by file name, whatever it lists; and the text. Raises CorruptFile."""
    path = folder / SUMS
    try:
        text = read_bytes(path).decode("ascii")
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise damaged(path, "is not text") from None
    return {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}, text


def _format_sums(sums: dict[str, str]) -> str:
    return "".join(f"{checksum}  {name}\n" for name, checksum in sums.items())


def frozen_path(checkpoints: Path) -> Path:
    """The file of the frozen weights of a folder of checkpoints."""
    return checkpoints / Path(FROZEN).parent.name / Path(FROZEN).name


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    checksum = sha256()
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(2**20):
            checksum.update(chunk)
    return checksum.hexdigest()


def damaged(path: Path, how: str) -> CorruptFile:
    """The error that names a file of a checkpoint and what is wrong with it."""
    if path.parent.name == Path(FROZEN).parent.name:
        return CorruptFile(f"'{path}' {how}: restore the file, all checkpoints of the run need it")
    return CorruptFile(f"'{path}' {how}: restore the file, or remove its folder to continue from an earlier step")
