"""`napkin tokenizer train`."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from napkin.cli.common.files import folder_for, open_documents, refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.tokenizer.texts import TextOptions, describe_unknown_words, read_side, require_texts
from napkin.data.corpus import split_documents
from napkin.data.curated_corpus import Document
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.word_level import CharacterTokenizer, UnknownRate, WordTokenizer, unknown_rate
from napkin.units import format_seconds

Kind = Literal["bpe", "words", "characters", "bytes"]

SAMPLE_DOCUMENTS = 100
VOCAB_SIZE = 4096
NAMES: dict[Kind, str] = {"bpe": "byte-level BPE", "words": "words", "characters": "characters", "bytes": "bytes"}
LEARNED: dict[Kind, str] = {"bpe": "pairs to merge", "words": "words"}
"""Kinds whose vocabulary size is a choice, and what a text may have too few of."""


@dataclass(frozen=True)
class TrainOptions(TextOptions, JsonOption):
    """Train a tokenizer. TEXT is a file, a folder, or stdlib: for Python's own library."""

    out: str = "data/tokenizer.json"
    """File to write."""
    kind: Kind = "bpe"
    """What a token is. bpe: byte-level BPE; words: the most frequent ones, all others become <|unk|> and are lost;
    characters; bytes."""
    vocab_size: int | None = None
    """Number of token ids, <|endoftext|> included; None is 4096 for bpe and words, and what they need for characters
    and bytes."""
    pattern: str | None = None
    """How text is split before merging, and into words: gpt2, gpt4, cl100k (gpt4 as current tiktoken splits), qwen2,
    o200k, whole, or a regular expression; None is gpt2."""


@command("tokenizer train", TrainOptions)
def train_command(options: TrainOptions) -> None:
    require_texts(options, "train")
    _refuse_meaningless(options)
    path = Path(options.out)
    refuse_existing(path)
    start = time.perf_counter()
    with progress_line("training the tokenizer") as line:
        tokenizer = _train(options, partial(_show_progress, line))
        seconds = time.perf_counter() - start
        line.retitle("comparing tokenizers")
        comparison, cost = _compare(tokenizer, options)
    with folder_for(path):
        tokenizer.save(path)
    if options.json:
        kinds = {kind: {"vocab_size": size, "bytes_per_token": ratio} for kind, (size, ratio) in comparison.items()}
        described = {"tokenizer": path, "fingerprint": tokenizer.fingerprint, "kinds": kinds}
        print_json({**described, "unknown_tokens": cost.tokens, "lost_bytes": cost.bytes})
        return
    rows = [(kind, f"{vocab_size:,}", f"{ratio:.3f}") for kind, (vocab_size, ratio) in comparison.items()]
    print_table(("tokenizer", "vocabulary", "bytes per token"), rows)
    if options.kind in LEARNED and tokenizer.vocab_size < _vocab_size(options):
        say(f"the text has no more {LEARNED[options.kind]}: the vocabulary ends at {tokenizer.vocab_size:,}")
    if cost.tokens:
        say(f"words that it does not know: {describe_unknown_words(cost)}")
    say(f"wrote {path} in {format_seconds(seconds)}")


def _refuse_meaningless(options: TrainOptions) -> None:
    for name, value in (("--vocab-size", options.vocab_size), ("--pattern", options.pattern)):
        if value is not None and options.kind not in LEARNED:
            raise NapkinError(f"{name} is not for --kind {options.kind}, whose tokens are {options.kind}: leave it out")


def _train(options: TrainOptions, progress: Callable[[str, int, int], None]) -> Tokenizer:
    from napkin.data.token_file import SEPARATOR

    if options.kind == "bytes":
        return ByteTokenizer([SEPARATOR])
    if options.kind == "characters":
        # Those of the held-out documents too, which could not be encoded otherwise.
        everything = open_documents(options.texts, options.suffixes)
        return CharacterTokenizer.train((document.text for document in everything), [SEPARATOR])
    texts = (document.text for document in read_side(options, "training"))
    pattern = "gpt2" if options.pattern is None else options.pattern
    learn = partial(train_bpe, threads=usable_cores()) if options.kind == "bpe" else WordTokenizer.train
    return learn(texts, _vocab_size(options), special_tokens=[SEPARATOR], pattern=pattern, progress=progress)


def _vocab_size(options: TrainOptions) -> int:
    return VOCAB_SIZE if options.vocab_size is None else options.vocab_size


def _compare(tokenizer: Tokenizer, options: TrainOptions) -> tuple[dict[str, tuple[int, float]], UnknownRate]:
    """Vocabulary size and compression ratio of three kinds, on held-out text if there is any; and what the tokenizer's
    unknown words cost there.
    """
    held_out = split_documents(
        open_documents(options.texts, options.suffixes), options.validation_fraction, "validation"
    )
    sample = "".join(_sample(held_out) or _sample(read_side(options, "training")))
    # The order of the rows; the trained tokenizer takes the place of its kind.
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


def _show_progress(line: ProgressLine, stage: str, done: int, total: int) -> None:
    line.retitle("counting pre-tokens" if stage == "counting" else "merging")
    line(done, total, f"{done:,} documents" if stage == "counting" else f"{done:,} merges")
