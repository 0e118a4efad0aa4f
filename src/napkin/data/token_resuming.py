"""Token files that take long to write: what a kill leaves behind is gone on with.

While documents are encoded, `.NAME.partial` holds the tokens so far and `.NAME.partial.json` tells of how many
documents they are, what the text of those was (a checksum) and which tokenizer made them. Tokens are on the disk before
they are told of, so after a kill at any moment the next call finds a true statement. It reads over the documents that
are done, and goes on if they are the same; if not, or if the tokenizer is another, it begins anew.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec

from napkin.data.corpus import Document
from napkin.data.token_file import TokenFile, TokenWriter, sidecar_path
from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_file, atomic_write_bytes, publish, sync_folder
from napkin.tokenizer.base import Tokenizer

# Text between two points from which can be gone on: about a second of encoding.
_BYTES_A_POINT = 2**26
_READ_BYTES = 2**22


def write_token_file_resumably(
    path: StrPath,
    documents: Callable[[], Iterable[Document]],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    *,
    bytes_a_point: int = _BYTES_A_POINT,
) -> TokenFile:
    """What `write_token_file` does, in a way that goes on after a kill; `documents` gives the same ones at each call.

    `progress(text_bytes, n_tokens)` begins where the last call was. Raises what `write_token_file` raises; then, as
    after a kill, what is done is kept for the next call.
    """
    path = Path(path)
    for taken in (path, sidecar_path(path)):
        if os.path.lexists(taken):
            raise NapkinError(f"'{taken}' exists and is not overwritten: remove it or choose another name")
    partial = path.with_name(f".{path.name}.partial")
    with _open(partial) as file:
        writer, text_hash = TokenWriter(file, tokenizer), blake2b(digest_size=16)
        iterator = iter(documents())
        if not _go_on(partial, writer, text_hash, iterator):
            file.seek(0)
            file.truncate()
            writer, text_hash, iterator = TokenWriter(file, tokenizer), blake2b(digest_size=16), iter(documents())
        told = writer.text_bytes
        for document in iterator:
            writer.add(document)
            _add_text(text_hash, document)
            if writer.text_bytes - told >= bytes_a_point:
                _tell(partial, writer, text_hash)
                told = writer.text_bytes
            if progress is not None:
                progress(writer.text_bytes, writer.n_tokens)
        sidecar = writer.finish(path)
        file.flush()
        os.fsync(file.fileno())
    # The tokens get their name first, so that a sidecar never stands beside tokens that are not complete.
    with atomic_file(sidecar_path(path)) as sidecar_file:
        sidecar_file.write(sidecar.to_json())
        publish(partial, path)
    for leftover in (partial, sidecar_path(partial)):
        leftover.unlink(missing_ok=True)
    sync_folder(path.parent)
    return TokenFile.open(path)


class _Point(msgspec.Struct, frozen=True):
    tokenizer: str
    documents: int
    tokens: int
    text_bytes: int
    text_hash: str


@contextlib.contextmanager
def _open(partial: Path) -> Iterator[BinaryIO]:
    try:
        with open(partial, "r+b" if partial.exists() else "x+b") as file:
            yield file
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        raise NapkinError(
            f"'{partial}' cannot be written ({error.strerror}): "
            "choose a folder that exists, that you may write to and that has room"
        ) from error


def _tell(partial: Path, writer: TokenWriter, text_hash: blake2b) -> None:
    writer.file.flush()
    os.fsync(writer.file.fileno())
    point = _Point(
        writer.tokenizer.fingerprint, writer.n_documents, writer.n_tokens, writer.text_bytes, text_hash.hexdigest()
    )
    atomic_write_bytes(sidecar_path(partial), msgspec.json.encode(point), overwrite=True)


def _go_on(partial: Path, writer: TokenWriter, text_hash: blake2b, documents: Iterator[Document]) -> bool:
    """Bring writer, checksum and documents to the last point; whether there is one that fits."""
    try:
        point = msgspec.json.decode(sidecar_path(partial).read_bytes(), type=_Point)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    size_bytes = point.tokens * writer.token_bytes
    if point.tokenizer != writer.tokenizer.fingerprint or os.fstat(writer.file.fileno()).st_size < size_bytes:
        return False
    for _ in range(point.documents):
        document = next(documents, None)
        if document is None:
            return False
        _add_text(text_hash, document)
    if text_hash.hexdigest() != point.text_hash:
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


def _add_text(text_hash: blake2b, document: Document) -> None:
    data = document.text.encode(errors="surrogatepass")
    text_hash.update(len(data).to_bytes(8, "little"))
    text_hash.update(data)
