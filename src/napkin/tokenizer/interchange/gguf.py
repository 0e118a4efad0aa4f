"""The vocabulary in a GGUF file's metadata, as a tokenizer: BPE on bytes (`gpt2`) or on characters (`llama`).

A file has tokens, their types and merges, or scores in their place, and the name of the pattern that splits texts. It
is read as the tokenizer.json that says the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from napkin.errors import CorruptFile, NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.character_bpe import SPACE, CharacterBPETokenizer
from napkin.tokenizer.inspection import pattern_of
from napkin.tokenizer.interchange.huggingface import document_of, parse
from napkin.tokenizer.interchange.huggingface_fields import document, expression_of
from napkin.tokenizer.pre_tokenization import THEN

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_PATTERNS = {
    # llama.cpp's names of patterns, by napkin's. The first is written.
    "gpt2": ("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais"),
    "gpt4": ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "stablelm2"),
    "o200k": ("gpt-4o", "llama4"),
}
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_MERGES_LAST = ("llama-bpe", "llama3", "llama-v3")
"""Patterns of models whose pre-tokens are looked up whole before they are merged."""

_ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
_END_KEYS = ("eos", "eot", "eom")


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a file's metadata, with the ids of the library's own.

    Raises NapkinError for a kind or a pattern that napkin does not reproduce exactly, CorruptFile where it is damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _array(metadata, "tokens", str), metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CorruptFile("its tokens and token types are not equally many: download the file again")
    added = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in _ADDED}
    texts = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CorruptFile("it has a token twice: download the file again")
    if kind == "gpt2":
        content = _on_bytes(metadata, vocab, added, texts)
    elif kind == "llama":
        content = _on_characters(metadata, vocab, types, added, texts)
    else:
        raise NapkinError(f"its tokenizer is of kind {str(kind)[:100]!r}: 'gpt2' and 'llama' are supported")
    return parse(msgspec.json.encode(content))


_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)


def _on_bytes(
    metadata: Mapping[str, Any], vocab: dict[str, int], added: dict[str, int], texts: list[str]
) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name in _DIGITS_THEN_GPT2:
        steps: list[dict[str, Any]] = [_DIGITS, _BYTE_LEVEL]
    else:
        known = [pattern for pattern, names in _PATTERNS.items() if name in names]
        if not known:
            raise NapkinError(
                f"its tokenizer splits texts by the pattern {str(name)[:100]!r}, which is not supported: use a file "
                "converted with its tokenizer.json beside it, or the folder that it was made of"
            )
        split = {"type": "Split", "pattern": {"Regex": expression_of(known[0])}, "behavior": "Isolated"}
        steps = [{**split, "invert": False}, {**_BYTE_LEVEL, "use_regex": False}]
        if known[0] == "gpt2":
            steps = [_BYTE_LEVEL]
    return document(
        added.items(),
        texts,
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder=_BYTE_LEVEL,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=name in _MERGES_LAST,
        vocab=vocab,
        merges=_array(metadata, "merges", str),
    )


def _on_characters(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], added: dict[str, int], texts: list[str]
) -> dict[str, Any]:
    prefix = [{"type": "Prepend", "prepend": SPACE}] * metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * len(prefix)
    scores = _array(metadata, "scores", float)
    if len(scores) != len(vocab):
        raise CorruptFile("its tokens and scores are not equally many: download the file again")
    return document(
        added.items(),
        texts,
        normalizer={"type": "Sequence", "normalizers": [*prefix, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=False,
        vocab=vocab,
        merges=list(_merges_by_score(vocab, types, scores)),
    )


def _merges_by_score(vocab: dict[str, int], types: list[int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make each token, the token with the highest score first: SentencePiece merges the
    neighbours whose union scores highest."""
    made = sorted((token for token, i in vocab.items() if types[i] == _NORMAL), key=lambda token: -scores[vocab[token]])
    for token in made:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in vocab and pair[1] in vocab), key=lambda pair: [vocab[e] for e in pair]
        )


def _array(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise CorruptFile(f"it lacks tokenizer.ggml.{key}: download the file again")
    return value


def first_and_last_ids(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that precede every text, and those at which texts end."""
    adds = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
    first = read_bos_id(metadata, tokenizer)
    known = tokenizer.special_tokens
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
    ends += [known[text] for text in _ENDS_OF_TURNS if text in known]
    valid = {i for i in ends if isinstance(i, int) and 0 <= i < tokenizer.vocab_size}
    return (first,) if adds and first is not None else (), tuple(sorted(valid))


def read_bos_id(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    """Return the token that the file calls bos, whether or not it is put before texts; None if it names none."""
    found = metadata.get("tokenizer.ggml.bos_token_id")
    return found if isinstance(found, int) and 0 <= found < tokenizer.vocab_size else None


def gguf_vocabulary(
    tokenizer: Tokenizer,
    first: Sequence[str],
    stops: Sequence[str],
    chat_template: str | None = None,
    bos: str | None = None,
) -> dict[str, Any]:
    """The keys that describe a byte-level BPE tokenizer, the tokens before texts and those that end them. `bos` is
    named in the file, but not put before texts. Raises NapkinError for a tokenizer that llama.cpp lacks.
    """
    if isinstance(tokenizer, CharacterBPETokenizer):
        raise NapkinError("a tokenizer on characters is not written as GGUF: leave it out")
    pattern = pattern_of(tokenizer)
    names = {known: name for known, (name, *_) in _PATTERNS.items()} | {THEN.join((r"\p{N}", "gpt2")): "smollm"}
    if pattern not in names:
        raise NapkinError(
            f"llama.cpp has no name for the pattern {pattern[:60]!r}: train with one of {', '.join(_PATTERNS)}"
        )
    content = document_of(tokenizer)
    special = {each["content"]: each["special"] for each in content["added_tokens"]}
    ids = {each["id"]: each["content"] for each in content["added_tokens"]}
    tokens = ids | {i: token for token, i in content["model"]["vocab"].items()}
    kinds = [_CONTROL if special.get(tokens[i]) else _USER_DEFINED if tokens[i] in special else _NORMAL for i in tokens]
    by_id = dict(zip(tokens, kinds, strict=True))
    named = {token: i for i, token in tokens.items()}
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names[pattern],
        "tokenizer.ggml.tokens": [tokens.get(i, f"[unused{i}]") for i in range(max(tokens) + 1)],
        "tokenizer.ggml.token_type": [by_id.get(i, _UNUSED) for i in range(max(tokens) + 1)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": bool(first),
    }
    named_bos = [bos] if bos in named else []
    marks = [("bos", first[:1] or named_bos), ("eos", stops[:1]), ("eot", stops[1:2])]
    keys |= {f"tokenizer.ggml.{mark}_token_id": named[text] for mark, texts in marks for text in texts}
    return keys | ({} if chat_template is None else {"tokenizer.chat_template": chat_template})
