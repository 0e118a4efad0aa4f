"""Token files that take long to write: what a kill leaves behind is gone on with.

While documents are encoded, `.NAME.partial` holds the tokens so far and `.NAME.partial.json` tells of how many
documents they are, what the text of those was (a checksum) and which tokenizer made them. Tokens are on the disk before
they are told of, so after a kill at any moment the next call finds a true statement. It reads over the documents that
are done, and goes on if they are the same; if not, or if the tokenizer is another, it begins anew.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec

from napkin.data.corpus import Document
from napkin.data.token_file import CHARACTERS_A_BATCH, TokenFile, TokenWriter, batches_of, sidecar_path
from napkin.errors import NapkinError
from napkin.files import atomic_file, atomic_write_bytes, publish, sync_folder, try_lock
from napkin.tokenizer.base import Tokenizer

# Text between two points from which can be gone on: a fraction of a second of encoding.
_BYTES_A_POINT = 2**24
_READ_BYTES = 2**22


Documents = Callable[[], Iterable[Document]]


def write_token_files_resumably(
    documents: Mapping[Path, Documents],
    tokenizer: Tokenizer,
    progress: Callable[[Path, int, int], None],
    *,
    threads: int = 1,
    bytes_a_point: int = _BYTES_A_POINT,
) -> list[TokenFile]:
    """What `write_token_file` does, for files that belong together and in a way that goes on after a kill.

    Each call of `documents[path]` gives the same ones. All files get their names after the last one is written.
    `progress(path, text_bytes, n_tokens)` begins where the last call was. Raises what `write_token_file` raises; then,
    as after a kill, what is done is kept for the next call. One process at a time writes a file.
    """
    for path in documents:
        for taken in (path, sidecar_path(path)):
            if os.path.lexists(taken):
                raise NapkinError(f"'{taken}' exists and is not overwritten: remove it or choose another name")
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_pointless, documents)
        files = {path: stack.enter_context(_open(_partial(path))) for path in documents}
        sidecars: dict[Path, bytes] = {}
        for path, file in files.items():
            writing = _write(path, file, documents[path], tokenizer, progress, threads, bytes_a_point)
            sidecars[path] = writing.finish(path).to_json()
            file.flush()
            os.fsync(file.fileno())
        for path, sidecar in sidecars.items():
            _publish(path, sidecar)
    return [TokenFile.open(path) for path in documents]


def _write(
    path: Path,
    file: BinaryIO,
    documents: Documents,
    tokenizer: Tokenizer,
    progress: Callable[[Path, int, int], None],
    threads: int,
    bytes_a_point: int,
) -> TokenWriter:
    writing, iterator = _Writing(TokenWriter(file, tokenizer, threads)), iter(documents())
    if not _go_on(_partial(path), writing, iterator):
        file.seek(0)
        file.truncate()
        writing, iterator = _Writing(TokenWriter(file, tokenizer, threads)), iter(documents())
    writer = writing.writer
    told = writer.text_bytes
    for batch in batches_of(iterator, min(bytes_a_point, CHARACTERS_A_BATCH)):
        writer.add(batch)
        writing.pass_over(batch)
        if writer.text_bytes - told >= bytes_a_point:
            _tell(_partial(path), writing)
            told = writer.text_bytes
        progress(path, writer.text_bytes, writer.n_tokens)
    # The next file may take long.
    _tell(_partial(path), writing)
    return writer


def _publish(path: Path, sidecar: bytes) -> None:
    partial = _partial(path)
    # The tokens get their name first, so that a sidecar never stands beside tokens that are not complete.
    with atomic_file(sidecar_path(path)) as sidecar_file:
        sidecar_file.write(sidecar)
        publish(partial, path)
    for leftover in (partial, sidecar_path(partial)):
        leftover.unlink(missing_ok=True)
    sync_folder(path.parent)


def _remove_pointless(paths: Iterable[Path]) -> None:
    """Remove what nothing can go on from."""
    for partial in map(_partial, paths):
        if not sidecar_path(partial).exists():
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@dataclass
class _Writing:
    """What is written, and which documents and parts of documents that was."""

    writer: TokenWriter
    n_texts: int = 0
    text_hash: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    def pass_over(self, documents: Iterable[Document]) -> None:
        """Note documents that are done."""
        for document in documents:
            data = document.text.encode(errors="surrogatepass")
            self.text_hash.update((2 * len(data) + document.continues).to_bytes(8, "little"))
            self.text_hash.update(data)
            self.n_texts += 1


class _Point(msgspec.Struct, frozen=True):
    tokenizer: str
    texts: int
    documents: int
    tokens: int
    text_bytes: int
    text_hash: str


@contextlib.contextmanager
def _open(partial: Path) -> Iterator[BinaryIO]:
    try:
        with open(partial, "r+b" if partial.exists() else "x+b") as file:
            if not try_lock(file.fileno()):
                raise NapkinError(
                    f"'{partial}' is being written by another process: wait for it, or choose another name"
                )
            yield file
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        raise NapkinError(
            f"'{partial}' cannot be written ({error.strerror}): "
            "choose a folder that exists, that you may write to and that has room"
        ) from error


def _tell(partial: Path, writing: _Writing) -> None:
    writer = writing.writer
    writer.file.flush()
    os.fsync(writer.file.fileno())
    point = _Point(
        tokenizer=writer.tokenizer.fingerprint,
        texts=writing.n_texts,
        documents=writer.n_documents,
        tokens=writer.n_tokens,
        text_bytes=writer.text_bytes,
        text_hash=writing.text_hash.hexdigest(),
    )
    atomic_write_bytes(sidecar_path(partial), msgspec.json.encode(point), overwrite=True)


def _go_on(partial: Path, writing: _Writing, documents: Iterator[Document]) -> bool:
    """Bring writer, checksum and documents to the last point; whether there is one that fits."""
    writer = writing.writer
    try:
        point = msgspec.json.decode(sidecar_path(partial).read_bytes(), type=_Point)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    size_bytes = point.tokens * writer.token_bytes
    if point.tokenizer != writer.tokenizer.fingerprint or os.fstat(writer.file.fileno()).st_size < size_bytes:
        return False
    writing.pass_over(itertools.islice(documents, point.texts))
    if writing.n_texts != point.texts or writing.text_hash.hexdigest() != point.text_hash:
        return False
    left = size_bytes
    while left:
        data = writer.file.read(min(left, _READ_BYTES))
        writer.checksum.update(data)
        left -= len(data)
    writer.file.truncate(size_bytes)
    writer.file.seek(size_bytes)
    writer.n_documents, writer.n_tokens, writer.text_bytes = point.documents, point.tokens, point.text_bytes
    return True
