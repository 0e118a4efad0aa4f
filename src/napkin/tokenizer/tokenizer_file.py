"""Tokenizer files: JSON with format, version, kind, the data of that kind, and a fingerprint of it all.

    {
    "format": "napkin-tokenizer",
    "version": 1,
    "kind": "bpe",
    "pattern": "gpt2",
    "unicode": "16.0",
    "special_tokens": [
      "<|endoftext|>"
    ],
    "merges": [
      [32, 116],
      ...
    ],
    "fingerprint": "3f1c..."
    }

Merge i joins two ids into id 256 + i; the vocabulary follows from the merges. A tokenizer with another library's ids
has three more fields (see bpe.py): "ids", "unmerged" tokens in hexadecimal, and "whole"; "normal_form" where
text is normalized first; and "text_tokens" where special tokens mark no boundary. The fields of a "character-bpe" are
the arguments of character_bpe.py. "unicode" is the version of Unicode whose letters, numbers and marks the pattern
means. Files written before it was named do not have it: they are read with Unicode 18.0, that of the library with which
they were made, and keep their fingerprint. The file is not trusted: every field's type, every id and the fingerprint
are checked.
"""

from typing import Literal

import msgspec

from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import StrPath, read_bytes
from napkin.tokenizer.base import FORMAT, VERSION, Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer, RemappedBPETokenizer
from napkin.tokenizer.character_bpe import CharacterBPETokenizer, Prefix
from napkin.tokenizer.word_level import CharacterTokenizer, WordTokenizer


def save_tokenizer(tokenizer: Tokenizer, path: StrPath, *, overwrite: bool = False) -> None:
    """Write a tokenizer to one JSON file; see `Tokenizer.save`."""
    tokenizer.save(path, overwrite=overwrite)


def load_tokenizer(path: StrPath) -> Tokenizer:
    """Read a tokenizer that `save_tokenizer` wrote.

    Raises CorruptFile if it is not a tokenizer file or was altered, and NapkinError if it cannot be read.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise NapkinError(f"{path} cannot be read ({error.strerror}): name a tokenizer file") from error
    try:
        _check_header(path, msgspec.json.decode(content, type=_Header))
        file = msgspec.json.decode(content, type=_BPEFile | _CharacterBPEFile | _ByteFile | _CharacterFile | _WordFile)
        tokenizer = file.tokenizer()
    except CorruptFile:
        raise
    except (msgspec.MsgspecError, UnicodeError, RecursionError, NapkinError) as error:
        raise _corrupt(path, first_line(error)) from error
    if file.fingerprint != tokenizer.fingerprint:
        stated = file.fingerprint[:64]
        raise _corrupt(path, f"its fingerprint is {stated}, that of its contents {tokenizer.fingerprint}")
    return tokenizer


def _corrupt(path: StrPath, fact: str) -> CorruptFile:
    return CorruptFile(f"{path} is not an intact tokenizer file: {fact}; restore it from a copy or train it again")


class _Header(msgspec.Struct):
    format: str
    version: int


def _check_header(path: StrPath, header: _Header) -> None:
    if header.format != FORMAT:
        raise CorruptFile(
            f"{path} is not a tokenizer file: its format is {header.format[:40]!r}, not {FORMAT!r}: name one"
        )
    if header.version != VERSION:
        raise CorruptFile(
            f"{path} has version {header.version}, this napkin reads {VERSION}: use the napkin that wrote it"
        )


class _File(_Header, tag_field="kind", forbid_unknown_fields=True):
    special_tokens: list[str]
    fingerprint: str


class _BPEFile(_File, tag=BPETokenizer.kind):
    pattern: str
    merges: list[tuple[int, int]]
    ids: list[int] | None = None
    unmerged: list[str] | None = None
    whole: bool | None = None
    normal_form: Literal["NFC"] | None = None
    unicode: str | None = None
    text_tokens: list[str] | None = None

    def tokenizer(self) -> BPETokenizer | RemappedBPETokenizer:
        if all(each is None for each in (self.ids, self.unmerged, self.whole, self.normal_form, self.text_tokens)):
            return BPETokenizer(self.merges, self.special_tokens, self.pattern, unicode_version=self.unicode)
        if self.ids is None or self.unmerged is None or self.whole is None:
            raise NapkinError("it has some of the fields `ids`, `unmerged` and `whole`, but not all")
        unmerged = [_bytes(token) for token in self.unmerged]
        return RemappedBPETokenizer(
            self.merges,
            self.special_tokens,
            self.pattern,
            ids=self.ids,
            unmerged=unmerged,
            whole=self.whole,
            normalize=self.normal_form is not None,
            text_tokens=self.text_tokens or (),
            unicode_version=self.unicode,
        )


class _CharacterBPEFile(_File, tag=CharacterBPETokenizer.kind):
    prefix: Prefix
    splits_spaces: bool
    strips_space: bool
    special_ids: list[int]
    byte_ids: list[int]
    hidden: list[int]
    tokens: list[str]
    merges: list[tuple[int, int]]
    text_tokens: list[str] | None = None

    def tokenizer(self) -> CharacterBPETokenizer:
        return CharacterBPETokenizer(
            self.tokens,
            self.merges,
            _special_ids(self.special_tokens, self.special_ids),
            byte_ids=self.byte_ids,
            hidden=self.hidden,
            prefix=self.prefix,
            splits_spaces=self.splits_spaces,
            strips_space=self.strips_space,
            text_tokens=self.text_tokens or (),
        )


class _ByteFile(_File, tag=ByteTokenizer.kind):
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer(self.special_tokens)


class _CharacterFile(_File, tag=CharacterTokenizer.kind):
    characters: str

    def tokenizer(self) -> CharacterTokenizer:
        return CharacterTokenizer(self.characters, self.special_tokens)


class _WordFile(_File, tag=WordTokenizer.kind):
    pattern: str
    words: list[str]
    unicode: str | None = None

    def tokenizer(self) -> WordTokenizer:
        return WordTokenizer(self.words, self.special_tokens, self.pattern, unicode_version=self.unicode)


def _special_ids(names: list[str], ids: list[int]) -> dict[str, int]:
    if len(names) != len(ids) or len(set(names)) != len(names):
        raise NapkinError(f"it has {len(ids)} special_ids for {len(set(names))} distinct special tokens")
    return dict(zip(names, ids, strict=True))


def _bytes(hexadecimal: str) -> bytes:
    try:
        return bytes.fromhex(hexadecimal)
    except ValueError as error:
        raise NapkinError(f"{hexadecimal!r} is not bytes in hexadecimal") from error
