"""Conversations as tokens on disk, memory-mapped instead of read, with the mask of those that count.

| file | contents |
|---|---|
| `NAME.tokens` | the ids of one conversation after the other, little-endian uint16 if the vocabulary allows it, else uint32 |
| `NAME.tokens.mask` | a bit per token, 1 if it counts, the first in the highest bit, padded to 8 bytes; then the end of each conversation in tokens, as little-endian int64 |
| `NAME.tokens.json` | counts and checksums; it gets its name last: tokens without it cannot be opened |
"""  # noqa: E501

import mmap
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.alignment.token_sequence import TokenSequence, Unit
from napkin.data.sidecar import NUMPY_DTYPES, cannot_be_read, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, regular
from napkin.runs.json_file import read_json
from napkin.tokenizer.base import Tokenizer

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class ChatSidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a file of conversations."""

    format: Literal["napkin-chat-tokens"]
    version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    conversations: _Count
    tokens: _Count
    learned_tokens: _Count
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**32)]
    tokenizer: _Sha256
    encoder: _Sha256
    """Of tokenizer, chat template and what is learned."""
    max_length: _Count
    """Tokens that a conversation may have."""
    left_out: dict[str, _Count]
    """Conversations that are not in it, by reason."""
    sha256: _Sha256
    """Of the tokens."""
    mask_sha256: _Sha256

    @property
    def size_bytes(self) -> int:
        """The size of the tokens on disk."""
        return self.tokens * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    @property
    def mask_bytes(self) -> int:
        """Those of the bits, padded to whole numbers."""
        return -(-self.tokens // 64) * 8


class ChatTokens(Sequence[Unit]):
    """A file of conversations opened for reading: `chats[i]` is the unit of conversation i."""

    def __init__(
        self, path: Path, sidecar: ChatSidecar, tokens: NDArray[np.integer], bits: NDArray[np.uint8], ends: NDArray
    ) -> None:
        self.path, self.about = path, sidecar
        self._tokens, self._bits, self._ends = tokens, bits, ends

    @classmethod
    def open(cls, path: StrPath) -> "ChatTokens":
        """Map a file into memory and verify its checksums: all of it is read once.

        Raises NapkinError where it or a file beside it is missing, CorruptFile where one was altered.
        """
        path = Path(path)
        sidecar = read_json(sidecar_path(path), ChatSidecar)
        if sidecar is None:
            raise NapkinError(
                f"'{sidecar_path(path)}' does not exist: name a file that `napkin data chat` made, or JSON lines"
            )
        content = _mapped(path, sidecar.size_bytes, sidecar.sha256)
        mask = _mapped(mask_path(path), sidecar.mask_bytes + 8 * sidecar.conversations, sidecar.mask_sha256)
        tokens = np.frombuffer(content, NUMPY_DTYPES[sidecar.dtype])
        bits = np.frombuffer(mask, np.uint8, sidecar.mask_bytes)
        ends = np.frombuffer(mask, "<i8", offset=sidecar.mask_bytes)
        if ends[0] < 1 or ends[-1] != sidecar.tokens or (np.diff(ends) < 1).any():
            raise CorruptFile(f"'{mask_path(path)}' has ends that are not those of conversations: make it again")
        if int(tokens.max()) >= sidecar.vocab_size:
            raise CorruptFile(f"'{path}' holds tokens outside the vocabulary of {sidecar.vocab_size}: make it again")
        return cls(path, sidecar, tokens, bits, ends)

    @property
    def checksum(self) -> str:
        """SHA-256, in hexadecimal, of tokens and mask."""
        return sha256(f"{self.about.sha256} {self.about.mask_sha256}".encode()).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return int(np.diff(self._ends, prepend=0).max())

    def refuse_other_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise NapkinError where another tokenizer made the tokens."""
        if self.about.tokenizer != tokenizer.fingerprint:
            raise NapkinError(
                f"'{self.path}' was made by another tokenizer: make it again with `napkin data chat` and this one"
            )

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...
    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        """Raises IndexError for a conversation that does not exist."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start, stop = 0 if number == 0 else int(self._ends[number - 1]), int(self._ends[number])
        bits = np.unpackbits(self._bits[start // 8 : -(-stop // 8)])[start % 8 :][: stop - start]
        return (TokenSequence(self._tokens[start:stop].astype(np.int64), bits.astype(bool)),)


def is_chat_tokens(path: StrPath) -> bool:
    """Whether a path looks like a file of conversations as tokens."""
    return mask_path(Path(path)).is_file()


def mask_path(path: Path) -> Path:
    """The path of the mask of a file of tokens."""
    return Path(f"{path}.mask")


def _mapped(path: Path, size_bytes: int, checksum: str) -> mmap.mmap:
    try:
        with open(path, "rb", opener=regular) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size_bytes:
                raise CorruptFile(f"'{path}' has {found:,} bytes, its sidecar says {size_bytes:,}: make it again")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if sha256(content).hexdigest() != checksum:
        raise CorruptFile(f"'{path}' was altered, its SHA-256 is not what its sidecar says: make it again")
    return content
