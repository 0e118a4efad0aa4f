"""Units as tokens on disk, memory-mapped instead of read: conversations, pairs of answers, judged answers.

| file | contents |
|---|---|
| `NAME.tokens` | ids of one sequence after the other, little-endian uint16 if the vocabulary allows it, else uint32 |
| `NAME.tokens.mask` | a bit per token, 1 if it counts, the first in the highest bit, padded to 8 bytes; the index |
| `NAME.tokens.json` | kind, counts, what is left out, checksums; it gets its name last: without it nothing is opened |

The index is a row of little-endian int64 per sequence: its end in tokens; of judged answers also the number of its run,
which is that of the answers before it while their prompts are the same, and 1 for a good answer, 0 for a bad one.
"""

import mmap
import os
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.lazy_units import LazyUnits
from napkin.alignment.preferences.kto import DESIRABLE
from napkin.alignment.token_sequence import TokenSequence, Unit
from napkin.data.sidecar import NUMPY_DTYPES, cannot_be_read, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, regular
from napkin.runs.json_file import read_json
from napkin.tokenizer.base import Tokenizer

UnitKind = Literal["conversations", "pairs", "judged answers"]
SEQUENCES: dict[UnitKind, int] = {"conversations": 1, "pairs": 2, "judged answers": 1}
"""Of a unit in a file: a conversation; a chosen and a rejected answer; an answer."""
COLUMNS: dict[UnitKind, int] = {"conversations": 1, "pairs": 1, "judged answers": 3}
"""Of the index."""
VERSION = 2
_AT_A_TIME = 2**20
"""Bytes that are verified at a time: read, not mapped, so that they do not stay in memory."""
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class UnitSidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a file of units."""

    format: Literal["napkin-chat-tokens"]
    version: Literal[2]
    kind: UnitKind
    dtype: Literal["uint16", "uint32"]
    sequences: _Count
    tokens: _Count
    learned_tokens: _Count
    longest: _Count
    """Tokens of the longest sequence."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**32)]
    tokenizer: _Sha256
    encoder: _Sha256
    """Of tokenizer, chat template and what is learned."""
    max_length: _Count
    """Tokens that a sequence may have."""
    left_out: dict[str, tuple[_Count, _Count]]
    """What is not in it, by reason: how many, and the line of the first."""
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

    @property
    def index_bytes(self) -> int:
        """Those behind the bits."""
        return 8 * COLUMNS[self.kind] * self.sequences


class _Versioned(msgspec.Struct):
    """What every version says of itself."""

    version: int


class UnitFile(LazyUnits):
    """A file of units opened for reading."""

    def __init__(
        self,
        path: Path,
        about: UnitSidecar,
        tokens: NDArray[np.integer],
        bits: NDArray[np.uint8],
        index: NDArray[np.int64],
    ) -> None:
        self.path, self.about = path, about
        self._tokens, self._bits, self._index = tokens, bits, index
        self._size = SEQUENCES[about.kind]

    @classmethod
    def open(cls, path: StrPath) -> "UnitFile":
        """Map a file into memory and verify its checksums: all of it is read once, and none of it kept.

        Raises NapkinError where it or a file beside it is missing or of another version, CorruptFile where one was
        altered.
        """
        path = Path(path)
        about = _read_sidecar(sidecar_path(path))
        content = _verified(path, about.size_bytes, about.sha256)
        mask = _verified(mask_path(path), about.mask_bytes + about.index_bytes, about.mask_sha256)
        tokens = np.frombuffer(content, NUMPY_DTYPES[about.dtype])
        bits = np.frombuffer(mask, np.uint8, about.mask_bytes)
        index = np.frombuffer(mask, "<i8", offset=about.mask_bytes).reshape(-1, COLUMNS[about.kind])
        return cls(path, about, tokens, bits, index)

    @property
    def checksum(self) -> str:
        """SHA-256, in hexadecimal, of all that is learned from: tokens, which of them count, and labels."""
        return sha256(f"{self.about.kind} {self.about.sha256} {self.about.mask_sha256}".encode()).hexdigest()

    @property
    def left_out(self) -> LeftOut:
        """What of the text is not in it."""
        return LeftOut(self.about.left_out)

    @property
    def runs(self) -> NDArray[np.int64]:
        """Of judged answers: the number of each one's run of equal prompts."""
        return self._index[:, 1]

    def refuse_other_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise NapkinError where another tokenizer made the tokens."""
        if self.about.tokenizer != tokenizer.fingerprint:
            raise NapkinError(
                f"'{self.path}' was made by another tokenizer: make it again with `napkin data chat` and this one"
            )

    def __len__(self) -> int:
        return len(self._index) // self._size

    def unit(self, number: int) -> Unit:
        """Read from the file. Raises CorruptFile where its index has other ends than sequences."""
        first = number * self._size
        return tuple(self._sequence(each) for each in range(first, first + self._size))

    def _sequence(self, number: int) -> TokenSequence:
        start, stop = 0 if number == 0 else int(self._index[number - 1, 0]), int(self._index[number, 0])
        if not 0 <= start < stop <= len(self._tokens):
            raise CorruptFile(f"'{mask_path(self.path)}' has ends that are not those of sequences: make it again")
        tokens = self._tokens[start:stop].astype(np.int64)
        if int(tokens.max()) >= self.about.vocab_size:
            raise CorruptFile(
                f"'{self.path}' holds tokens outside the vocabulary of {self.about.vocab_size}: make it again"
            )
        bits = np.unpackbits(self._bits[start // 8 : -(-stop // 8)])[start % 8 :][: stop - start]
        sequence = TokenSequence(tokens, bits.astype(bool))
        if self.about.kind != "judged answers":
            return sequence
        label = np.full(sequence.n_counted, bool(self._index[number, 2]), np.float32)
        return sequence.with_values(**{DESIRABLE: label})


def is_unit_file(path: StrPath) -> bool:
    """Whether a path looks like a file of units."""
    return mask_path(Path(path)).is_file()


def mask_path(path: Path) -> Path:
    """The path of the mask of a file of tokens."""
    return Path(f"{path}.mask")


def _read_sidecar(path: Path) -> UnitSidecar:
    found = read_json(path, _Versioned)
    if found is None:
        raise NapkinError(f"'{path}' does not exist: name a file that `napkin data chat` made, or JSON lines")
    if found.version != VERSION:
        raise NapkinError(
            f"'{path}' is of version {found.version} of its format, and this napkin reads version {VERSION}: make the "
            "tokens again, as `napkin data chat` does with --out"
        )
    about = read_json(path, UnitSidecar)
    assert about is not None
    return about


def _verified(path: Path, size_bytes: int, checksum: str) -> mmap.mmap:
    try:
        with open(path, "rb", opener=regular) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size_bytes:
                raise CorruptFile(f"'{path}' has {found:,} bytes, its sidecar says {size_bytes:,}: make it again")
            actual = sha256()
            while chunk := file.read(_AT_A_TIME):
                actual.update(chunk)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if actual.hexdigest() != checksum:
        raise CorruptFile(f"'{path}' was altered, its SHA-256 is not what its sidecar says: make it again")
    return content
