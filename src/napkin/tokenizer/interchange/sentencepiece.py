"""tokenizer.json for BPE on characters with bytes as fallback: SentencePiece's models as `transformers` converts them.

A space becomes U+2581 and one is put before a text, by normalizers (Prepend, Replace) or by a Metaspace pre_tokenizer;
the decoder (Replace, ByteFallback, Fuse, Strip) undoes it.
"""

from collections.abc import Mapping
from typing import Any

from napkin.errors import NapkinError
from napkin.tokenizer.character_bpe import SPACE, CharacterBPETokenizer, Prefix
from napkin.tokenizer.interchange.assembly import with_unused
from napkin.tokenizer.interchange.huggingface_fields import File, Step, document, steps_of, text_tokens_of

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_METASPACE_PREFIX: dict[str, Prefix] = {"always": "if_missing", "first": "first_if_missing", "never": "none"}


def character_bpe(file: File, special_tokens: Mapping[str, int]) -> CharacterBPETokenizer:
    """The tokenizer of a file, whose added tokens have the ids of `special_tokens`.

    Raises NapkinError for what napkin cannot reproduce exactly.
    """
    vocab = file.model.vocab
    if file.model.ignore_merges:
        raise NapkinError("its model.ignore_merges is on, which is not supported for BPE with byte_fallback")
    # A byte below 128 is in one character alone: where that is a token, the byte is never needed.
    names_of_bytes = [
        name if name in vocab or byte >= 128 else SPACE if chr(byte) == " " else chr(byte)
        for byte, name in enumerate(_BYTES)
    ]
    if lacking := [name for name, known in zip(_BYTES, names_of_bytes, strict=True) if known not in vocab]:
        raise NapkinError(
            f"it has byte_fallback, but {len(lacking)} of the 256 bytes have no token, among them {lacking[0]}"
        )
    prefix, splits_spaces = _prefix_and_split(file)
    names = with_unused({token: i for token, i in vocab.items() if token not in special_tokens}, dict(special_tokens))
    tokens = [""] * len({*vocab.values(), *names.values()})
    for token, i in (*vocab.items(), *names.items()):
        tokens[i] = token.replace(SPACE, " ")
        if " " in token and token not in names:
            raise NapkinError(f"token {token!r} (id {i}) has a space, which is {SPACE!r} in such a vocabulary")
    made = {merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in file.model.merges}
    # A text token that no merge makes is found as a whole or not at all.
    unmade = {name for name in text_tokens_of(file) if name not in made and len(name) > 1}
    special = {token.content for token in file.added_tokens or [] if token.special}
    controls = special | unmade | (names.keys() - vocab.keys())
    # Ordinary text could become a special token whose name contains spaces, since spaces are written differently in
    # names.
    hidden = {names[name] for name in controls if SPACE not in name}
    return CharacterBPETokenizer(
        tokens,
        _merges(file, hidden),
        names,
        byte_ids=[vocab[name] for name in names_of_bytes],
        hidden=sorted(hidden),
        prefix=prefix,
        splits_spaces=splits_spaces,
        strips_space=_strips_space(file.decoder),
        text_tokens=text_tokens_of(file),
    )


def character_bpe_document(tokenizer: CharacterBPETokenizer) -> dict[str, Any]:
    """The contents of a tokenizer.json for such a tokenizer."""
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    texts = [names.get(i) or token.replace(" ", SPACE) for i, token in enumerate(tokenizer.tokens)]
    for byte, (name, i) in enumerate(zip(_BYTES, tokenizer.byte_ids, strict=True)):
        if byte >= 128 or tokenizer.tokens[i] != chr(byte):
            texts[i] = name
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * tokenizer.strips_space
    metaspace = tokenizer.prefix in _METASPACE_PREFIX.values() and (
        tokenizer.prefix != "none" or tokenizer.splits_spaces
    )
    scheme = {value: key for key, value in _METASPACE_PREFIX.items()}.get(tokenizer.prefix)
    prepend = [{"type": "Prepend", "prepend": SPACE}] * (tokenizer.prefix == "always")
    pre_tokenizer = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": scheme,
        "split": tokenizer.splits_spaces,
    }
    return document(
        sorted(tokenizer.special_tokens.items(), key=lambda each: each[1]),
        tokenizer.text_tokens,
        normalizer=None if metaspace else {"type": "Sequence", "normalizers": [*prepend, replace]},
        pre_tokenizer=pre_tokenizer if metaspace else None,
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=False,
        vocab={token: i for i, token in enumerate(texts)},
        merges=[[texts[first], texts[second]] for first, second in tokenizer.merges],
    )


def _prefix_and_split(file: File) -> tuple[Prefix, bool]:
    """The space before a text, and whether each space begins a piece."""
    normalizers = [_described(step) for step in steps_of(file.normalizer)]
    replace, prepend = ("Replace", " ", SPACE), ("Prepend", SPACE)
    steps = steps_of(file.pre_tokenizer)
    match normalizers, steps:
        case [], [Step(type="Metaspace") as metaspace] if metaspace.replacement == SPACE:
            scheme = "always" if metaspace.prepend_scheme is None else metaspace.prepend_scheme
            if scheme in _METASPACE_PREFIX:
                return _METASPACE_PREFIX[scheme if metaspace.add_prefix_space else "never"], metaspace.split
        case _, _ if normalizers in ([replace], [prepend, replace]) and all(map(_splits_at_spaces, steps)):
            return "always" if prepend in normalizers else "none", False
    named = " and ".join(step.type for step in (*steps_of(file.normalizer), *steps)) or "nothing"
    raise NapkinError(
        f"it has byte_fallback, and {named} as normalizer and pre_tokenizer: only Prepend and Replace, or Metaspace, "
        f"that make {SPACE!r} of a space are supported"
    )


def _described(step: Step) -> tuple[str, ...]:
    if step.type == "Replace":
        return step.type, (step.pattern or {}).get("String", ""), step.content or ""
    return (step.type, step.prepend or "") if step.type == "Prepend" else (step.type,)


def _splits_at_spaces(step: Step) -> bool:
    """True if a step splits text at spaces; where they have been replaced already, it splits nothing."""
    return step.type == "Split" and step.pattern == {"String": " "} and step.behavior == "MergedWithPrevious"


def _strips_space(decoder: Step | None) -> bool:
    steps = steps_of(decoder)
    match [each.type for each in steps], steps:
        case ["Replace", "ByteFallback", "Fuse"], [replace, _, _]:
            strip = None
        case ["Replace", "ByteFallback", "Fuse", "Strip"], [replace, _, _, strip]:
            pass
        case types, _:
            raise NapkinError(
                f"its decoder is {' and '.join(types) or 'missing'}: with byte_fallback only Replace, ByteFallback, "
                "Fuse and Strip are supported"
            )
    if _described(replace) != ("Replace", SPACE, " "):
        raise NapkinError(f"its decoder replaces {replace.pattern}: only {SPACE!r} by a space is supported")
    if strip is not None and (strip.content, strip.start, strip.stop) not in ((" ", 1, 0), (" ", 0, 0)):
        raise NapkinError("its decoder's Strip takes more than one space from the beginning: that is not supported")
    return strip is not None and strip.start == 1


def _merges(file: File, hidden: set[int]) -> list[tuple[int, int]]:
    """Pairs of ids; those of tokens that ordinary text never becomes are left out."""
    vocab = file.model.vocab
    pairs: list[tuple[int, int]] = []
    for rank, merge in enumerate(file.model.merges):
        parts = merge.split(" ") if isinstance(merge, str) else list(merge)
        if len(parts) != 2:
            raise NapkinError(f"merge {rank} is {' '.join(parts)!r}: two tokens separated by one space are needed")
        ids = [vocab.get(text) for text in (*parts, "".join(parts))]
        if any(i is None for i in ids):
            raise NapkinError(f"merge {rank} of {' '.join(parts)!r} needs a token that is not in the vocabulary")
        if not hidden.intersection(i for i in ids if i is not None):
            pairs.append((vocab[parts[0]], vocab[parts[1]]))
    return pairs
