"""What `napkin tokenizer train` and `napkin tokenizer encode` do."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from rich.table import Table

from napkin.cli.folders import folder_for
from napkin.cli.terminal import ProgressLine, out, print_json, progress_line, say
from napkin.cli.texts import PART_BYTES, open_documents
from napkin.cli.tokenizer import EncodeOptions, Kind, TrainOptions
from napkin.data.corpus import Document
from napkin.data.split import split_documents
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.data.token_writer import write_token_files
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.byte_level import ByteTokenizer
from napkin.tokenizer.character_level import CharacterTokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import UNK, UnknownRate, WordTokenizer, unknown_rate
from napkin.units import format_bytes, format_count, format_seconds

Side = Literal["training", "validation"]

SAMPLE_DOCUMENTS = 100
CHUNK_TOKENS = 2**20
VOCAB_SIZE = 4096
NAMES: dict[Kind, str] = {"bpe": "byte-level BPE", "words": "words", "characters": "characters", "bytes": "bytes"}
LEARNED: dict[Kind, str] = {"bpe": "pairs to merge", "words": "words"}
"""Kinds whose size is a choice, and what a text may have too few of."""
FILE_NAMES: dict[Side, str] = {"training": "train.tokens", "validation": "validation.tokens"}


def train(options: TrainOptions) -> None:
    """Train a tokenizer, compare it with simpler ones, write its file."""
    _refuse_meaningless(options)
    path = Path(options.out)
    _refuse_existing(path)
    start = time.perf_counter()
    with progress_line("training the tokenizer") as line:
        tokenizer = _train(options, lambda stage, done, total: _show(line, stage, done, total))
        seconds = time.perf_counter() - start
        line.retitle("comparing tokenizers")
        comparison, lost = _compare(tokenizer, options)
    with folder_for(path):
        tokenizer.save(path)
    if options.json:
        kinds = {kind: {"vocab_size": size, "bytes_per_token": ratio} for kind, (size, ratio) in comparison.items()}
        described = {"tokenizer": path, "fingerprint": tokenizer.fingerprint, "kinds": kinds}
        print_json({**described, "unknown_tokens": lost.tokens, "lost_bytes": lost.bytes})
        return
    table = Table("tokenizer", "vocabulary", "bytes per token", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, (vocab_size, ratio) in comparison.items():
        table.add_row(kind, f"{vocab_size:,}", f"{ratio:.3f}")
    out.print(table)
    if options.kind in LEARNED and tokenizer.vocab_size < _size(options):
        say(f"the text has no more {LEARNED[options.kind]}: the vocabulary ends at {tokenizer.vocab_size:,}")
    if lost.tokens:
        say(f"words that it does not know: {describe_loss(lost)}")
    say(f"wrote {path} in {format_seconds(seconds)}")


def encode(options: EncodeOptions) -> None:
    """Write a token file a side of the split."""
    tokenizer = load_tokenizer(options.tokenizer)
    sides: list[Side] = ["training", "validation"] if options.validation_fraction else ["training"]
    paths: dict[Side, Path] = {side: Path(options.out) / FILE_NAMES[side] for side in sides}
    for path in paths.values():
        _refuse_existing(path)
        _refuse_existing(path.with_name(f"{path.name}.json"))
    start = time.perf_counter()
    with progress_line("reading the text") as line:
        # Both before either is written: a side that would be empty leaves nothing behind.
        documents = {path: _side(options, side, tokenizer) for side, path in paths.items()}
        with folder_for(paths["training"]):
            files = write_token_files(
                documents, tokenizer, lambda *totals: _show_written(line, *totals), threads=usable_cores()
            )
    written = dict(zip(sides, files, strict=True))
    if options.json:
        print_json({side: _describe(tokens, tokenizer) for side, tokens in written.items()})
        return
    for tokens in written.values():
        say(
            f"wrote {tokens.path}: {tokens.n_tokens:,} tokens of {tokens.n_documents:,} documents, "
            f"{format_bytes(tokens.text_bytes)}, {tokens.text_bytes / tokens.n_tokens:.3f} bytes per token"
        )
        if (lost := _lost(tokens, tokenizer)).tokens:
            say(f"words that the tokenizer does not know: {describe_loss(lost)}")
    say(f"encoded in {format_seconds(time.perf_counter() - start)}")


def _side(options: EncodeOptions, side: Side, tokenizer: Tokenizer) -> Callable[[], Iterator[Document]]:
    part_bytes = PART_BYTES if tokenizer.is_splittable else None
    next(_documents(options, side, part_bytes))
    return lambda: _documents(options, side, part_bytes)


def _show_written(line: ProgressLine, path: Path, text_bytes: int, n_tokens: int) -> None:
    line.retitle(f"encoding {path}")
    line(text_bytes, None, f"{format_bytes(text_bytes)}, {format_count(n_tokens)} tokens")


def _documents(
    options: TrainOptions | EncodeOptions, side: Side, part_bytes: int | None = PART_BYTES
) -> Iterator[Document]:
    """The documents of one side, of which there is at least one."""
    fraction = options.validation_fraction
    documents = split_documents(open_documents(options.texts, options.suffixes, part_bytes), fraction, side)
    first = next(documents, None)
    if first is None:
        raise NapkinError(
            f"--validation-fraction {fraction} leaves no text for {side}: "
            "use more text, another fraction, or 0 to hold nothing out"
        )
    return itertools.chain([first], documents)


def _refuse_meaningless(options: TrainOptions) -> None:
    for name, value in (("--vocab-size", options.vocab_size), ("--pattern", options.pattern)):
        if value is not None and options.kind not in LEARNED:
            raise NapkinError(f"{name} is not for --kind {options.kind}, whose tokens are {options.kind}: leave it out")


def _train(options: TrainOptions, progress: Callable[[str, int, int], None]) -> Tokenizer:
    if options.kind == "bytes":
        return ByteTokenizer([SEPARATOR])
    if options.kind == "characters":
        # Those of the held-out documents too, which could not be encoded otherwise.
        everything = open_documents(options.texts, options.suffixes)
        return CharacterTokenizer.train((document.text for document in everything), [SEPARATOR])
    texts = (document.text for document in _documents(options, "training"))
    pattern = "gpt2" if options.pattern is None else options.pattern
    learn = partial(train_bpe, threads=usable_cores()) if options.kind == "bpe" else WordTokenizer.train
    return learn(texts, _size(options), special_tokens=[SEPARATOR], pattern=pattern, progress=progress)


def _size(options: TrainOptions) -> int:
    return VOCAB_SIZE if options.vocab_size is None else options.vocab_size


def _compare(tokenizer: Tokenizer, options: TrainOptions) -> tuple[dict[str, tuple[int, float]], UnknownRate]:
    """Vocabulary and compression ratio of three kinds, on text that the tokenizer was not trained on if there is; and
    what the tokenizer loses of it.
    """
    held_out = split_documents(
        open_documents(options.texts, options.suffixes), options.validation_fraction, "validation"
    )
    sample = "".join(_sample(held_out) or _sample(_documents(options, "training")))
    # In this order; the trained one takes the place of its kind.
    kinds = {
        NAMES[options.kind]: tokenizer,
        "characters": CharacterTokenizer.train([sample]),
        "bytes": ByteTokenizer(),
        NAMES[options.kind]: tokenizer,
    }
    comparison = {kind: (each.vocab_size, each.compression_ratio(sample)) for kind, each in kinds.items()}
    return comparison, unknown_rate(tokenizer, Counter(tokenizer.encode(sample)), len(sample.encode()))


def _sample(documents: Iterable[Document]) -> list[str]:
    return [document.text for document in itertools.islice(documents, SAMPLE_DOCUMENTS)]


def _show(line: ProgressLine, stage: str, done: int, total: int) -> None:
    line.retitle("counting pre-tokens" if stage == "counting" else "merging")
    line(done, total, f"{done:,} documents" if stage == "counting" else f"{done:,} merges")


def describe_loss(lost: UnknownRate) -> str:
    """What UNK takes of a text, in words."""
    return f"{lost.tokens:.1%} of the tokens are {UNK}, and {lost.bytes:.1%} of the bytes are lost in them"


def _lost(tokens: TokenFile, tokenizer: Tokenizer) -> UnknownRate:
    counts: Counter[int] = Counter()
    for start in range(0, tokens.n_tokens if tokenizer.unknown_id is not None else 0, CHUNK_TOKENS):
        ids, n = np.unique(tokens.tokens[start : start + CHUNK_TOKENS], return_counts=True)
        counts.update(dict(zip(ids.tolist(), n.tolist(), strict=True)))
    del counts[tokens.separator]
    return unknown_rate(tokenizer, counts, tokens.text_bytes)


def _describe(tokens: TokenFile, tokenizer: Tokenizer) -> dict[str, object]:
    lost = _lost(tokens, tokenizer)
    return {
        "path": tokens.path,
        "tokens": tokens.n_tokens,
        "documents": tokens.n_documents,
        "text_bytes": tokens.text_bytes,
        "unknown_tokens": lost.tokens,
        "lost_bytes": lost.bytes,
    }


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another --out")
