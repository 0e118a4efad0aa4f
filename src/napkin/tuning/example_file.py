"""Examples as tokens on disk, memory-mapped instead of read: conversations, pairs, unpaired preferences.

| file | contents |
|---|---|
| `NAME.tokens` | ids of one sequence after the other, little-endian uint16 if the vocabulary allows it, else uint32 |
| `NAME.tokens.mask` | the loss mask: a bit per token, 1 if it is trained on, the first in the highest bit, padded to 8
bytes; the index |
| `NAME.tokens.json` | kind, counts, what is left out, checksums; it gets its name last: without it nothing is opened |

The index is a row of little-endian int64 per sequence: its end in tokens; for unpaired preferences (kind
"judged answers") also the number of its run, which stays the same while prompts are, and 1 for a good completion, 0
for a bad one.

Files of JSON lines are encoded once, and the result is kept; `preference_file.py` reads those of preferences.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.chats.chat_encoder import ChatEncoder, LeftOut
from napkin.chats.read_conversations import (
    encoded_chats,
)
from napkin.chats.token_sequence import Example, TokenSequence, prompt_of
from napkin.checkpoint.shard_files import checksum_of
from napkin.data.token_file import NUMPY_DTYPES, cannot_be_read, dtype_name, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_file, cache_folder, regular
from napkin.json_files import format_json, read_json
from napkin.tokenizer.base import Tokenizer
from napkin.tuning.packing import LazyExamples
from napkin.tuning.preference_file import encoded_pairs, encoded_unpaired_preferences
from napkin.tuning.preferences import DESIRABLE

ExampleKind = Literal["conversations", "pairs", "judged answers"]
SEQUENCES: dict[ExampleKind, int] = {"conversations": 1, "pairs": 2, "judged answers": 1}
"""Sequences per example of a file: a conversation; a chosen and a rejected completion; a completion."""
COLUMNS: dict[ExampleKind, int] = {"conversations": 1, "pairs": 1, "judged answers": 3}
"""Columns of the index."""
VERSION = 2
_AT_A_TIME = 2**20
"""Bytes that are verified at a time: read instead of mapped, so that they do not stay in memory."""
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class ExampleSidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of NAME.tokens.json."""

    format: Literal["napkin-chat-tokens"]
    version: Literal[2]
    kind: ExampleKind
    dtype: Literal["uint16", "uint32"]
    sequences: _Count
    tokens: _Count
    learned_tokens: _Count
    longest: _Count
    """Tokens of the longest sequence."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**32)]
    tokenizer: _Sha256
    encoder: _Sha256
    """Fingerprint of tokenizer, chat template and what is trained on."""
    max_length: _Count
    """The most tokens that a sequence was allowed."""
    left_out: dict[str, tuple[_Count, _Count]]
    """Number of lines left out, and the number of the first, by reason."""
    sha256: _Sha256
    """The checksum of NAME.tokens."""
    mask_sha256: _Sha256

    @property
    def size_bytes(self) -> int:
        return self.tokens * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    @property
    def mask_bytes(self) -> int:
        return -(-self.tokens // 64) * 8

    @property
    def index_bytes(self) -> int:
        """Bytes of the index after the mask."""
        return 8 * COLUMNS[self.kind] * self.sequences


class ExampleFile(LazyExamples):
    """A memory-mapped file of examples."""

    def __init__(
        self,
        path: Path,
        about: ExampleSidecar,
        tokens: NDArray[np.integer],
        bits: NDArray[np.uint8],
        index: NDArray[np.int64],
    ) -> None:
        self.path, self.about = path, about
        self._tokens, self._bits, self._index = tokens, bits, index
        self._size = SEQUENCES[about.kind]

    @classmethod
    def open(cls, path: StrPath) -> "ExampleFile":
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
        """SHA-256, in hexadecimal, of everything that is trained on: tokens, loss mask and labels."""
        return sha256(f"{self.about.kind} {self.about.sha256} {self.about.mask_sha256}".encode()).hexdigest()

    @property
    def left_out(self) -> LeftOut:
        return LeftOut(self.about.left_out)

    @property
    def runs(self) -> NDArray[np.int64]:
        """For unpaired preferences, the number of each completion's run of equal prompts."""
        return self._index[:, 1]

    def refuse_other_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise NapkinError where another tokenizer made the tokens."""
        if self.about.tokenizer != tokenizer.fingerprint:
            raise NapkinError(
                f"'{self.path}' was made by another tokenizer: make it again with `napkin data chat` and this one"
            )

    def __len__(self) -> int:
        return len(self._index) // self._size

    def example(self, number: int) -> Example:
        """Read an example. Raises CorruptFile where the index has other ends than sequences."""
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
        label = np.full(sequence.n_trained, bool(self._index[number, 2]), np.float32)
        return sequence.with_values(**{DESIRABLE: label})


def is_example_file(path: StrPath) -> bool:
    """True if a file of tokens has a loss mask beside it."""
    return mask_path(Path(path)).is_file()


def mask_path(path: Path) -> Path:
    return Path(f"{path}.mask")


class _Versioned(msgspec.Struct):
    """The field that every version has."""

    version: int


def _read_sidecar(path: Path) -> ExampleSidecar:
    sidecar = read_json(path, _Versioned)
    if sidecar is None:
        raise NapkinError(f"'{path}' does not exist: name a file that `napkin data chat` made, or JSON lines")
    if sidecar.version != VERSION:
        raise NapkinError(
            f"'{path}' is of version {sidecar.version} of its format, and this napkin reads version {VERSION}: make "
            "the tokens again, as `napkin data chat` does with --out"
        )
    about = read_json(path, ExampleSidecar)
    assert about is not None
    return about


def _verified(path: Path, size_bytes: int, checksum: str) -> mmap.mmap:
    try:
        with open(path, "rb", opener=regular) as file:
            actual_bytes = os.fstat(file.fileno()).st_size
            if actual_bytes != size_bytes:
                raise CorruptFile(
                    f"'{path}' has {actual_bytes:,} bytes, its sidecar says {size_bytes:,}: make it again"
                )
            actual = sha256()
            while chunk := file.read(_AT_A_TIME):
                actual.update(chunk)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    if actual.hexdigest() != checksum:
        raise CorruptFile(f"'{path}' was altered, its SHA-256 is not what its sidecar says: make it again")
    return content


OnProgress = Callable[[int], None]
"""Called with the number of examples so far."""
Encode = Callable[[StrPath, ChatEncoder, LeftOut, int], Iterator[tuple[int, Example]]]
"""Encodes a file of JSON lines into examples, each with its line, of sequences of at most so many tokens."""
ENCODE: dict[ExampleKind, Encode] = {
    "conversations": encoded_chats,
    "pairs": encoded_pairs,
    "judged answers": encoded_unpaired_preferences,
}


def write_example_file(
    path: StrPath,
    kind: ExampleKind,
    source: StrPath,
    encoder: ChatEncoder,
    *,
    max_length: int,
    overwrite: bool = False,
    progress: OnProgress = lambda n: None,
) -> ExampleFile:
    """Encode a file of JSON lines into a new file at `path`, in the memory of some examples, and open it.

    The same input gives the same bytes. Raises NapkinError if one of the three files exists, where nothing is left to
    train on, or unpaired preferences are all good or all bad, and for what the function of `ENCODE` raises.
    """
    path, left_out = Path(path), LeftOut()
    # The inner files get their names first, so a sidecar never exists beside incomplete tokens.
    with (
        atomic_file(sidecar_path(path), overwrite=overwrite) as sidecar_file,
        atomic_file(mask_path(path), overwrite=overwrite) as mask_file,
        atomic_file(path, overwrite=overwrite) as file,
        TemporaryFile(dir=path.parent) as index_file,
    ):
        writer = _Writer(file, mask_file, index_file, kind, encoder)
        for number, (_, example) in enumerate(ENCODE[kind](source, encoder, left_out, max_length), start=1):
            for sequence in example:
                writer.add(sequence)
            progress(number)
        if not writer.n_sequences:
            raise nothing_to_train_on(source, kind, left_out)
        if kind == "judged answers" and writer.n_good in (0, writer.n_sequences):
            raise NapkinError(
                f"all {writer.n_sequences:,} completions of '{source}' are {'good' if writer.n_good else 'bad'}: kto "
                "needs both, add some of the other kind"
            )
        sidecar_file.write(format_json(writer.finish(left_out, max_length)).encode())
    return ExampleFile.open(path)


def nothing_to_train_on(source: StrPath, kind: ExampleKind, left_out: LeftOut) -> NapkinError:
    why = f": {left_out.describe()}" if left_out.n else ""
    return NapkinError(f"'{source}' has no {kind} to train on{why}: name a file that has some")


def example_file_of(
    path: StrPath,
    kind: ExampleKind,
    encoder: ChatEncoder,
    *,
    max_length: int,
    progress: OnProgress = lambda n: None,
) -> ExampleFile:
    """Open a file of examples, or encode a file of JSON lines once and keep the result in the cache.

    Raises NapkinError for examples of another kind, tokenizer, template or `train_on`, and for what
    `write_example_file` raises.
    """
    if is_example_file(path):
        return _opened(path, kind, encoder, max_length)
    if not Path(path).is_file():
        made = ", or what `napkin data chat` made" if kind == "conversations" else ""
        raise NapkinError(f"there is no file '{path}': name JSON lines of {kind}{made}")
    parts = VERSION, kind, checksum_of(Path(path)), encoder.fingerprint, max_length
    key = sha256(" ".join(map(str, parts)).encode()).hexdigest()
    kept = cache_folder() / "chats" / f"{key[:32]}.tokens"
    if is_example_file(kept):
        try:
            return ExampleFile.open(kept)
        except CorruptFile:
            # A missing or damaged file is made again, with the same bytes.
            pass
    kept.parent.mkdir(parents=True, exist_ok=True)
    return write_example_file(kept, kind, path, encoder, max_length=max_length, overwrite=True, progress=progress)


def _opened(path: StrPath, kind: ExampleKind, encoder: ChatEncoder, max_length: int) -> ExampleFile:
    examples = ExampleFile.open(path)
    if examples.about.kind != kind:
        raise NapkinError(f"'{path}' holds {examples.about.kind}, not {kind}: name JSON lines of {kind}")
    examples.refuse_other_tokenizer(encoder.tokenizer)
    if examples.about.encoder != encoder.fingerprint:
        raise NapkinError(
            f"'{path}' was made with another chat template or another --learned than this model is tuned with: make it "
            "again with `napkin data chat`"
        )
    if examples.about.max_length > max_length:
        raise NapkinError(
            f"'{path}' has {kind} of up to {examples.about.max_length:,} tokens, {max_length:,} are allowed here: "
            f"make it again with --max-length {max_length}"
        )
    return examples


class _Writer:
    def __init__(
        self, file: BinaryIO, mask_file: BinaryIO, index_file: BinaryIO, kind: ExampleKind, encoder: ChatEncoder
    ) -> None:
        self._file, self._mask_file, self._index_file = file, mask_file, index_file
        self._kind: ExampleKind = kind
        self._encoder = encoder
        self._dtype: Literal["uint16", "uint32"] = dtype_name(encoder.tokenizer.vocab_size)
        self._checksum, self._mask_checksum = sha256(), sha256()
        self._bits = np.empty(0, bool)
        self._prompt, self._run = np.empty(0, np.int64), -1
        self.n_sequences = self.n_tokens = self.n_learned = self.n_good = self.longest = 0

    def add(self, sequence: TokenSequence) -> None:
        data = sequence.tokens.astype(NUMPY_DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._checksum.update(data)
        self.n_sequences += 1
        self.n_tokens += len(sequence.tokens)
        self.n_learned += sequence.n_trained
        self.longest = max(self.longest, len(sequence.tokens))
        self._add_bits(sequence.loss_mask)
        row = [self.n_tokens] if self._kind != "judged answers" else [self.n_tokens, *self._judged(sequence)]
        self._index_file.write(np.array(row, "<i8").tobytes())

    def _judged(self, sequence: TokenSequence) -> tuple[int, int]:
        """The number of the run of equal prompts that a completion belongs to, and 1 for a good one."""
        prompt = prompt_of(sequence)
        self._run += not np.array_equal(prompt, self._prompt)
        self._prompt = prompt
        is_good = int(sequence.values[DESIRABLE][0])
        self.n_good += is_good
        return self._run, is_good

    def finish(self, left_out: LeftOut, max_length: int) -> ExampleSidecar:
        """Write the rest of the mask, and the index; return the sidecar."""
        self._add_bits(np.zeros(-self.n_tokens % 64, bool))
        self._index_file.seek(0)
        while chunk := self._index_file.read(2**20):
            self._write_mask(chunk)
        return ExampleSidecar(
            format="napkin-chat-tokens",
            version=VERSION,
            kind=self._kind,
            dtype=self._dtype,
            sequences=self.n_sequences,
            tokens=self.n_tokens,
            learned_tokens=self.n_learned,
            longest=self.longest,
            vocab_size=self._encoder.tokenizer.vocab_size,
            tokenizer=self._encoder.tokenizer.fingerprint,
            encoder=self._encoder.fingerprint,
            max_length=max_length,
            left_out=left_out.by_reason,
            sha256=self._checksum.hexdigest(),
            mask_sha256=self._mask_checksum.hexdigest(),
        )

    def _add_bits(self, loss_mask: np.ndarray) -> None:
        bits = np.concatenate([self._bits, loss_mask])
        whole = len(bits) // 8 * 8
        self._write_mask(np.packbits(bits[:whole]).tobytes())
        self._bits = bits[whole:]

    def _write_mask(self, data: bytes) -> None:
        self._mask_file.write(data)
        self._mask_checksum.update(data)
