"""Files of JSON lines are encoded into files of units, which are kept; see `napkin.alignment.unit_file`."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Literal

import numpy as np

from napkin.alignment.chats.chat_encoder import ChatEncoder
from napkin.alignment.chats.chat_encoding import encoded_chats
from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.pair_encoding import encoded_judged_answers, encoded_pairs
from napkin.alignment.preferences.kto import DESIRABLE
from napkin.alignment.token_sequence import TokenSequence, Unit, prompt_of
from napkin.alignment.unit_file import VERSION, UnitFile, UnitKind, UnitSidecar, is_unit_file, mask_path
from napkin.checkpoint.checksums import checksum_of
from napkin.data.sidecar import NUMPY_DTYPES, dtype_name, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_file, cache_folder
from napkin.runs.json_file import format_json

OnProgress = Callable[[int], None]
"""Called with the number of units so far."""
Encode = Callable[[StrPath, ChatEncoder, LeftOut, int], Iterator[tuple[int, Unit]]]
"""The units of a file of JSON lines, each with its line, of sequences of at most so many tokens."""
ENCODE: dict[UnitKind, Encode] = {
    "conversations": encoded_chats,
    "pairs": encoded_pairs,
    "judged answers": encoded_judged_answers,
}


def write_unit_file(
    path: StrPath,
    kind: UnitKind,
    source: StrPath,
    encoder: ChatEncoder,
    *,
    max_length: int,
    overwrite: bool = False,
    progress: OnProgress = lambda n: None,
) -> UnitFile:
    """Encode a file of JSON lines into a new file at `path`, in memory of some units, and open it.

    The same input gives the same bytes. Raises NapkinError if one of the three files exists, where nothing is left to
    learn from, or of judged answers only good ones or only bad ones, and for what the function of `ENCODE` raises.
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
        for number, (_, unit) in enumerate(ENCODE[kind](source, encoder, left_out, max_length), start=1):
            for sequence in unit:
                writer.add(sequence)
            progress(number)
        if not writer.n_sequences:
            raise nothing_to_learn(source, kind, left_out)
        if kind == "judged answers" and writer.n_good in (0, writer.n_sequences):
            raise NapkinError(
                f"all {writer.n_sequences:,} answers of '{source}' are {'good' if writer.n_good else 'bad'}: kto "
                "learns from both, add some of the other kind"
            )
        sidecar_file.write(format_json(writer.finish(left_out, max_length)).encode())
    return UnitFile.open(path)


def nothing_to_learn(source: StrPath, kind: UnitKind, left_out: LeftOut) -> NapkinError:
    """The error for a file of which nothing is left."""
    why = f": {left_out.describe()}" if left_out.n else ""
    return NapkinError(f"'{source}' has no {kind} to learn from{why}: name a file that has some")


def unit_file_of(
    path: StrPath,
    kind: UnitKind,
    encoder: ChatEncoder,
    *,
    max_length: int,
    progress: OnProgress = lambda n: None,
) -> UnitFile:
    """The units of a file of JSON lines, which are encoded once and kept in the cache; or of a file of units.

    Raises NapkinError for units of another kind, tokenizer, template or choice of what is learned, and for what
    `write_unit_file` raises.
    """
    if is_unit_file(path):
        return _opened(path, kind, encoder, max_length)
    if not Path(path).is_file():
        made = ", or what `napkin data chat` made" if kind == "conversations" else ""
        raise NapkinError(f"there is no file '{path}': name JSON lines of {kind}{made}")
    parts = VERSION, kind, checksum_of(Path(path)), encoder.fingerprint, max_length
    key = sha256(" ".join(map(str, parts)).encode()).hexdigest()
    kept = cache_folder() / "chats" / f"{key[:32]}.tokens"
    if is_unit_file(kept):
        try:
            return UnitFile.open(kept)
        except CorruptFile:
            # It is made again, as it was.
            pass
    kept.parent.mkdir(parents=True, exist_ok=True)
    return write_unit_file(kept, kind, path, encoder, max_length=max_length, overwrite=True, progress=progress)


def _opened(path: StrPath, kind: UnitKind, encoder: ChatEncoder, max_length: int) -> UnitFile:
    units = UnitFile.open(path)
    if units.about.kind != kind:
        raise NapkinError(f"'{path}' holds {units.about.kind}, not {kind}: name JSON lines of {kind}")
    units.refuse_other_tokenizer(encoder.tokenizer)
    if units.about.encoder != encoder.fingerprint:
        raise NapkinError(
            f"'{path}' was made with another chat template or another --learned than this model is tuned with: make it "
            "again with `napkin data chat`"
        )
    if units.about.max_length > max_length:
        raise NapkinError(
            f"'{path}' has {kind} of up to {units.about.max_length:,} tokens, {max_length:,} are allowed here: "
            f"make it again with --max-length {max_length}"
        )
    return units


class _Writer:
    def __init__(
        self, file: BinaryIO, mask_file: BinaryIO, index_file: BinaryIO, kind: UnitKind, encoder: ChatEncoder
    ) -> None:
        self._file, self._mask_file, self._index_file = file, mask_file, index_file
        self._kind: UnitKind = kind
        self._encoder = encoder
        self._dtype: Literal["uint16", "uint32"] = dtype_name(encoder.tokenizer.vocab_size)
        self._checksum, self._mask_checksum = sha256(), sha256()
        self._bits = np.empty(0, bool)
        self._prompt, self._run = np.empty(0, np.int64), -1
        self.n_sequences = self.n_tokens = self.n_learned = self.n_good = self.longest = 0

    def add(self, sequence: TokenSequence) -> None:
        """Write a sequence."""
        data = sequence.tokens.astype(NUMPY_DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._checksum.update(data)
        self.n_sequences += 1
        self.n_tokens += len(sequence.tokens)
        self.n_learned += sequence.n_counted
        self.longest = max(self.longest, len(sequence.tokens))
        self._add_bits(sequence.counts)
        row = [self.n_tokens] if self._kind != "judged answers" else [self.n_tokens, *self._judged(sequence)]
        self._index_file.write(np.array(row, "<i8").tobytes())

    def _judged(self, sequence: TokenSequence) -> tuple[int, int]:
        """The number of the run of equal prompts that an answer belongs to, and whether it is good."""
        prompt = prompt_of(sequence)
        self._run += not np.array_equal(prompt, self._prompt)
        self._prompt = prompt
        is_good = int(sequence.values[DESIRABLE][0])
        self.n_good += is_good
        return self._run, is_good

    def finish(self, left_out: LeftOut, max_length: int) -> UnitSidecar:
        """Write the rest of the mask, and the index; the sidecar."""
        self._add_bits(np.zeros(-self.n_tokens % 64, bool))
        self._index_file.seek(0)
        while chunk := self._index_file.read(2**20):
            self._write_mask(chunk)
        return UnitSidecar(
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

    def _add_bits(self, counts: np.ndarray) -> None:
        bits = np.concatenate([self._bits, counts])
        whole = len(bits) // 8 * 8
        self._write_mask(np.packbits(bits[:whole]).tobytes())
        self._bits = bits[whole:]

    def _write_mask(self, data: bytes) -> None:
        self._mask_file.write(data)
        self._mask_checksum.update(data)
