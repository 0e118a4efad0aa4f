r"""The fields of a tokenizer.json that napkin reads.

Pre-tokenization patterns as other libraries write them.

`\p{N}{1,3}+` is possessive in one regular expression engine and repeats in another; `$` is the end of the text or of
each line. So only two types of pattern are accepted: well-known ones, and those with only the parts that all engines
read alike: literals, classes, `?`, `*`, `+`, `{1,3}`, groups, `|` and lookahead. Characters that are missing from an
engine's version of Unicode may still differ.
"""

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
import regex

from napkin.errors import NapkinError
from napkin.tokenizer.pre_tokenization import PATTERNS

Pair = tuple[str, str]


class AddedToken(msgspec.Struct):
    """A text that is looked for before all else."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class Model(msgspec.Struct):
    """Byte-pair encoding of a piece of text."""

    vocab: dict[str, int]
    merges: list[str | Pair]
    type: str = "BPE"
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    ignore_merges: bool = False
    byte_fallback: bool = False


class Step(msgspec.Struct):
    """A normalizer, pre-tokenizer, post-processor or decoder, with the fields of all their types."""

    type: str = ""
    add_prefix_space: bool = True
    use_regex: bool = True
    individual_digits: bool = False
    pattern: dict[str, str] | None = None
    content: str | None = None
    prepend: str | None = None
    replacement: str | None = None
    prepend_scheme: str | None = None
    split: bool = True
    start: int = 0
    stop: int = 0
    decoders: list["Step"] | None = None
    behavior: str = ""
    invert: bool = False
    pretokenizers: list["Step"] | None = None
    processors: list["Step"] | None = None
    normalizers: list["Step"] | None = None
    single: list[dict[str, Any]] | None = None


class TypeOnly(msgspec.Struct):
    """The type of a model."""

    type: str = "BPE"


class Head(msgspec.Struct):
    """Read first: models of other types have other fields."""

    model: TypeOnly


class File(msgspec.Struct):
    """The fields of a whole tokenizer.json."""

    model: Model
    added_tokens: list[AddedToken] | None = None
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None
    post_processor: Step | None = None
    decoder: Step | None = None
    truncation: dict[str, Any] | None = None
    padding: dict[str, Any] | None = None


def text_tokens_of(file: File) -> frozenset[str]:
    """The added tokens that are not special."""
    return frozenset(token.content for token in file.added_tokens or [] if not token.special)


def steps_of(step: Step | None) -> list[Step]:
    """The steps of a sequence, or the one step; none if it is missing."""
    if step is None:
        return []
    if step.type != "Sequence":
        return [step]
    # Each kind of step has a name of its own for those of a sequence.
    return step.normalizers or step.pretokenizers or step.processors or step.decoders or []


def document(
    added: Iterable[tuple[str, int]],
    text_tokens: Collection[str],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    **model: Any,
) -> dict[str, Any]:
    """The contents of a tokenizer.json with these added tokens, steps, and fields of the model."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    unused = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": token not in text_tokens} for token, i in added
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", **unused, **model},
    }


_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS_AND_DIGITS = _WORDS.replace("{1,3}", "")
_WHITE_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

# napkin's names, and equivalent expressions that all engines read alike; the first one is written.
_KNOWN: dict[str, tuple[str, ...]] = {
    "gpt2": (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "gpt4": (_SUFFIXES + _WORDS + _WHITE_SPACE, "'(?i:[sdmt]|ll|ve|re)" + _WORDS + _WHITE_SPACE),
    "qwen2": (_SUFFIXES + _WORDS_AND_DIGITS + _WHITE_SPACE,),
    # As in tiktoken: white space at the end of the text is one pre-token.
    "cl100k": (_SUFFIXES + _WORDS + r"|\s+(?![\s\S])" + _WHITE_SPACE,),
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIXES}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIXES}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _WHITE_SPACE,
    ),
}

_CLASS = r"\\[pP]\{[A-Z][a-z]?\}|\\[sSdDrnt]|\\[^\w\s]"
# Doubled, some engines read & and | and ~ as operations on classes.
_IN_CLASS, _RANGE = r"[^\[\]\\&|~^-]", r"[^\[\]\\^-]-[^\[\]\\-]"
_COMMON = regex.compile(
    rf"{_CLASS}|\[\^?(?:{_CLASS}|{_RANGE}|(?!&&|\|\||~~)[&|~]|(?<!\[)\^|{_IN_CLASS})+\]"
    r"|\(\?[:=!]|\((?!\?)|[)|.]"
    r"|[?*+](?![?*+])|\{\d+(?:,\d*)?\}(?![?*+{])|[^\\\[\](){}|.?*+^$]"
)


def known_pattern(expression: str) -> str | None:
    """napkin's name for an expression, or for a name of a pattern; None if it is not well known."""
    for name, expressions in _KNOWN.items():
        if expression in (name, *expressions):
            return name if name in PATTERNS else expressions[0]
    return None


def expression_of(pattern: str) -> str:
    """napkin's `pattern` as a regular expression, in its usual form if it is well known."""
    for name, expressions in _KNOWN.items():
        if pattern in (name, *expressions):
            return expressions[0]
    return PATTERNS.get(pattern, pattern)


def portable_expression(pattern: str) -> str:
    """An expression for napkin's `pattern` that all engines read alike.

    Raises NapkinError if it has a part that they may read differently.
    """
    expression = expression_of(pattern)
    if known_pattern(expression):
        return expression
    place = 0
    while place < len(expression):
        part = _COMMON.match(expression, place)
        if part is None:
            raise NapkinError(
                f"the pattern {expression!r} has {expression[place : place + 8]!r} at character {place}, which regular "
                "expression engines read differently: use a named pattern, or only classes, groups and repeats"
            )
        place = part.end()
    return expression
