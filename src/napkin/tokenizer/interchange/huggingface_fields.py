"""The fields of a tokenizer.json that napkin reads."""

from typing import Any

import msgspec

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
    """The whole file."""

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
