"""Hugging Face's tokenizer.json for BPE: on bytes, as GPT-2 and Llama 3, or on characters, see sentencepiece.py.

A file describes how text is normalized (normalizer), split (pre_tokenizer) and encoded (model), and which tokens are
added (post_processor); `added_tokens` are matched before all that. Supported is what napkin reproduces exactly: for
bytes no normalizer or NFC, GPT-2's pattern or Splits by regular expressions, and no added tokens.

Reading files of other libraries, with errors that name the file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import msgspec

from napkin import files
from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_bytes
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import RemappedBPETokenizer
from napkin.tokenizer.character_bpe import CharacterBPETokenizer
from napkin.tokenizer.inspection import pattern_of
from napkin.tokenizer.interchange.assembly import (
    Vocabulary,
    assemble,
    check_round_trip,
    ordinary_tokens,
    ranks_of,
    vocab_and_merges,
)
from napkin.tokenizer.interchange.huggingface_fields import (
    AddedToken,
    File,
    Head,
    Step,
    document,
    known_pattern,
    portable_expression,
    steps_of,
    text_tokens_of,
)
from napkin.tokenizer.interchange.sentencepiece import character_bpe, character_bpe_document
from napkin.tokenizer.pre_tokenization import THEN, patterns_in_a_row


def read_bytes(path: StrPath) -> bytes:
    """The contents of a file. Raises NapkinError if it cannot be read."""
    try:
        return files.read_bytes(path)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a vocabulary file") from error


def decode_json(content: bytes, kind: Any) -> Any:
    """Decode JSON as a type, such as `dict[str, int]`. Raises NapkinError if it is not JSON or not of that type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise NapkinError(f"a value is not of the expected type: {error}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NapkinError(f"it is not JSON ({error})") from error
    except RecursionError as error:
        raise NapkinError("it is nested too deeply to be read") from error


def decode_text(content: bytes) -> str:
    """Decode UTF-8. Raises NapkinError if it is not valid."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NapkinError(f"it is not UTF-8 at byte {error.start}") from error


@contextmanager
def naming(*paths: StrPath) -> Iterator[None]:
    """Prefix the messages of errors with the names of the files."""
    try:
        yield
    except NapkinError as error:
        names = " and ".join(f"'{path}'" for path in paths)
        raise NapkinError(f"{names} cannot be used: {error}") from error


def read_huggingface(path: StrPath, *, drop_template: bool = False, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Read a tokenizer.json. The ids are those of the library's `encode(text)`, with all special tokens allowed.

    `drop_template` ignores the tokens that the file adds to every text (such as one at the beginning), like the
    library's `add_special_tokens=False`; `special_tokens` that are not in the file get the ids after its last. A
    template that begins each text with `<|endoftext|>` is ignored: napkin puts that before documents itself.

    Raises NapkinError, naming file and field, if it is damaged or napkin cannot reproduce it exactly.
    """
    content = read_bytes(path)
    with naming(path):
        return parse(content, drop_template=drop_template, more_special_tokens=special_tokens)


def write_huggingface(tokenizer: Tokenizer, path: StrPath, *, overwrite: bool = False) -> None:
    """Write a BPE tokenizer as a tokenizer.json.

    Raises NapkinError for another kind of tokenizer, if the format cannot represent it exactly, and if another file
    exists or it cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(document_of(tokenizer)), indent=1) + b"\n"
    check_round_trip(path, tokenizer, lambda: parse(content), "a tokenizer.json")
    atomic_write_bytes(path, content, overwrite=overwrite)


def parse(content: bytes, *, drop_template: bool = False, more_special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Build a tokenizer from the contents of a tokenizer.json."""
    head: Head = decode_json(content, Head)
    if head.model.type != "BPE":
        raise NapkinError(f"its model is of type {head.model.type!r}: only BPE is supported")
    file: File = decode_json(content, File)
    _refuse_inexact(file, drop_template)
    special_tokens = _special_tokens(file.added_tokens or [], file.model.vocab)
    for token in more_special_tokens:
        special_tokens.setdefault(token, max([len(file.model.vocab) - 1, *special_tokens.values()]) + 1)
    if file.model.byte_fallback:
        return character_bpe(file, special_tokens)
    _refuse_inexact_bytes(file)
    ids = ordinary_tokens(file.model.vocab, special_tokens)
    merges = (tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in file.model.merges)
    ranks = ranks_of(merges, ids)
    return assemble(
        Vocabulary(
            ids=ids,
            special_tokens=special_tokens,
            pattern=_pattern(file.pre_tokenizer),
            rank=lambda first, second: ranks.get((first, second)),
            whole=file.model.ignore_merges,
            normalize=_is_nfc(file.normalizer),
            text_tokens=text_tokens_of(file),
            drops_bytes=file.model.unk_token is None,
        )
    )


def _refuse_inexact(file: File, drop_template: bool) -> None:
    model = file.model
    for name, value in (
        ("truncation", file.truncation and file.truncation.get("max_length")),
        ("padding", file.padding and "on"),
        ("model.dropout", model.dropout),
        ("model.continuing_subword_prefix", model.continuing_subword_prefix),
        ("model.end_of_word_suffix", model.end_of_word_suffix),
    ):
        if value:
            raise NapkinError(f"its {name} is {value!r}, which napkin's BPE does not support: the ids would differ")
    processors = (file.post_processor and file.post_processor.processors) or [file.post_processor]
    for processor in processors:
        if processor is None or _is_byte_level(processor) or drop_template or _begins_documents(processor):
            continue
        added = ", ".join(_template_tokens(processor))
        raise NapkinError(
            f"its post_processor {processor.type!r} adds {added or 'tokens'} to every text, which napkin's tokenizers "
            "do not: use --drop-template to read the file without it"
        )
    for token in file.added_tokens or []:
        for flag in ("single_word", "lstrip", "rstrip"):
            if getattr(token, flag):
                raise NapkinError(f"its added token {token.content!r} has {flag}: napkin matches it anywhere")
        if token.normalized and steps_of(file.normalizer):
            raise NapkinError(
                f"its added token {token.content!r} is looked for in normalized text: only `normalized: false` is "
                "supported with a normalizer"
            )


def _refuse_inexact_bytes(file: File) -> None:
    for name, step, exact in (
        ("normalizer", file.normalizer, not steps_of(file.normalizer) or _is_nfc(file.normalizer)),
        ("decoder", file.decoder, file.decoder is None or _is_byte_level(file.decoder)),
    ):
        if not exact and step is not None:
            raise NapkinError(f"its {name} is {step.type!r}, which napkin's BPE does not support: the ids would differ")


def _is_nfc(step: Step | None) -> bool:
    return [each.type for each in steps_of(step)] == ["NFC"]


def _is_byte_level(step: Step | None) -> TypeGuard[Step]:
    return step is not None and step.type == "ByteLevel"


def _begins_documents(processor: Step) -> bool:
    """True if it puts before each document what napkin's token files, runs and exported folders have there, and no
    more."""
    before = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    match processor.single:
        case [first, {"Sequence": {"id": "A"}}]:
            return processor.type == "TemplateProcessing" and first == before
    return False


def _template_tokens(processor: Step) -> Iterator[str]:
    for piece in processor.single or []:
        match piece:
            case {"SpecialToken": {"id": str(name)}}:
                yield repr(name)


def _pattern(step: Step | None) -> str:
    """The pattern that splits text as `pre_tokenizer` does."""
    *steps, last = steps_of(step) or [Step("missing")]
    if not _is_byte_level(last):
        types = " and ".join(each.type for each in (*steps, last))
        raise NapkinError(f"its pre_tokenizer is {types}: only ByteLevel, alone or after others, is supported")
    if last.add_prefix_space:
        raise NapkinError(
            "its pre_tokenizer has add_prefix_space, which inserts a space before every text: set it to false"
        )
    return THEN.join([*map(_split_pattern, steps), *["gpt2"] * last.use_regex]) or "whole"


def _split_pattern(split: Step) -> str:
    """The pattern of the pre-tokenizers before ByteLevel."""
    if split.type == "Digits":
        return r"\p{N}" if split.individual_digits else r"\p{N}+"
    if split.type == "Punctuation":
        runs = {"Isolated": "", "Contiguous": "+", "": ""}.get(split.behavior)
        if runs is None:
            raise NapkinError(f"its pre_tokenizer's Punctuation is {split.behavior}: only Isolated is supported")
        return r"[\p{P}$+<=>^`|~]" + runs
    if split.type != "Split":
        raise NapkinError(
            f"its pre_tokenizer has {split.type} before ByteLevel: only Split, Digits and Punctuation are supported"
        )
    expression = (split.pattern or {}).get("Regex")
    if expression is None:
        raise NapkinError(f"its pre_tokenizer splits by {split.pattern}: only a Split by a Regex is supported")
    known = known_pattern(expression)
    # Matches are the pre-tokens. The known patterns have no text between matches that could be kept or removed.
    if (split.behavior, split.invert) != ("Isolated", False) and not (
        known and (split.behavior, split.invert) == ("Removed", True)
    ):
        inverted = ", inverted" * split.invert
        raise NapkinError(f"its pre_tokenizer's Split is {split.behavior}{inverted}: only Isolated is supported")
    return known or portable_expression(expression)


def _special_tokens(added: list[AddedToken], vocab: dict[str, int]) -> dict[str, int]:
    """Added tokens, text to id."""
    special_tokens: dict[str, int] = {}
    following = len(vocab)
    for token in added:
        if token.content in special_tokens:
            raise NapkinError(f"its added token {token.content!r} is given twice: remove one, each has a single id")
        # The library ignores this id: it looks the token up in the vocabulary, and numbers those that are not in it.
        given = vocab.get(token.content, following)
        if given != token.id:
            raise NapkinError(
                f"its added token {token.content!r} has id {token.id}, but the library would give it {given}"
            )
        special_tokens[token.content] = token.id
        following = max(following, token.id + 1)
    early = [token.content for token in added if not token.normalized]
    late = [token.content for token in added if token.normalized]
    # The library searches for them in two passes. One pass gives the same result unless two tokens can overlap.
    for first in early:
        for second in late:
            if _may_overlap(first, second):
                raise NapkinError(
                    f"its added tokens {first!r} and {second!r} can overlap and differ in `normalized`: napkin takes "
                    "the longest match at the first position, the library would not"
                )
    return special_tokens


def _may_overlap(first: str, second: str) -> bool:
    if first in second or second in first:
        return True
    sizes = range(1, min(len(first), len(second)))
    return any(first[-n:] == second[:n] or second[-n:] == first[:n] for n in sizes)


def document_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of a tokenizer.json for a BPE tokenizer. Raises NapkinError for another kind."""
    if isinstance(tokenizer, CharacterBPETokenizer):
        return character_bpe_document(tokenizer)
    vocab, merges = vocab_and_merges(tokenizer)
    remapped = tokenizer if isinstance(tokenizer, RemappedBPETokenizer) else None
    return document(
        tokenizer.special_tokens.items(),
        tokenizer.text_tokens,
        normalizer={"type": "NFC"} if remapped and remapped.normalize else None,
        pre_tokenizer=_pre_tokenizer(pattern_of(tokenizer)),
        decoder=_byte_level(use_regex=False),
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=bool(remapped and remapped.whole),
        # Including the special tokens: one that is only an added token gets the next free id when it is read.
        vocab=vocab,
        merges=merges,
    )


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    *patterns, last = patterns_in_a_row(pattern)
    if last not in ("gpt2", "whole"):
        patterns, last = [*patterns, last], "whole"
    expressions = [{"Regex": portable_expression(each)} for each in patterns]
    splits = [{"type": "Split", "pattern": each, "behavior": "Isolated", "invert": False} for each in expressions]
    byte_level = _byte_level(use_regex=last == "gpt2")
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level]} if splits else byte_level


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}
