"""`napkin tokenizer train` and `encode`, of texts that are split into training and validation."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.files import PART_BYTES, folder_for, open_documents, refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.data.corpus import Document, Side, divide_inline, split_documents, split_into_sides
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import UNK, CharacterTokenizer, UnknownRate, WordTokenizer, unknown_rate
from napkin.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from napkin.data.token_file import TokenFile


@dataclass(frozen=True)
class TextOptions:
    """The texts of a command, and how they are split."""

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")] = ()
    """Where the text is; at least one."""
    suffixes: tuple[str, ...] = ()
    """Endings of the files that are read in folders: --suffixes .py .md; none is all files."""
    validation_fraction: float = 0.05
    """Fraction of the documents, 0 to 1, that is held out for validation, chosen by a hash of each; of a single
    document, its last part; of one larger than 8 MB, the last part of each 8 MB. Give `train` and `encode` the same;
    0 holds nothing out and makes no validation.tokens."""


def require_texts(options: TextOptions, command: str) -> None:
    """Raise NapkinError if there are none."""
    if not options.texts:
        raise NapkinError(
            f"no TEXT is given: name a file, a folder, or stdlib: as in `napkin tokenizer {command} stdlib:`"
        )


def read_side(options: TextOptions, side: Side) -> Iterator[Document]:
    """The documents of one side of the split; raises NapkinError if there are none."""
    return (document for each, document in read_sides(options, [side]) if each == side)


def read_sides(
    options: TextOptions,
    sides: Sequence[Side],
    part_bytes: int | None = PART_BYTES,
    *,
    inline_boundaries: bool = False,
    on_inline: Callable[[Path], None] | None = None,
) -> Iterator[tuple[Side, Document]]:
    """The documents with the side of the split that each is on; raises NapkinError if one of `sides` has none.

    With `inline_boundaries` they are divided by `divide_inline`; `on_inline` as `read_documents`.
    """
    fraction = options.validation_fraction
    missing = set(sides)
    documents = open_documents(options.texts, options.suffixes, part_bytes, on_inline)
    if inline_boundaries:
        documents = divide_inline(documents)
    for side, document in split_into_sides(documents, fraction):
        missing.discard(side)
        yield side, document
    for side in sides:
        if side in missing:
            raise NapkinError(
                f"--validation-fraction {fraction} leaves no text for {side}: "
                "use more text, another fraction, or 0 to hold nothing out"
            )


def describe_unknown_words(cost: UnknownRate) -> str:
    """The fraction of the tokens that are UNK, and the fraction of the bytes that they lose."""
    return f"{cost.tokens:.1%} of the tokens are {UNK}, and {cost.bytes:.1%} of the bytes are lost in them"


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
    for name, value in (("--vocab-size", options.vocab_size), ("--pattern", options.pattern)):
        if value is not None and options.kind not in LEARNED:
            raise NapkinError(f"{name} is not for --kind {options.kind}, whose tokens are {options.kind}: leave it out")
    path = Path(options.out)
    refuse_existing(path)
    start = time.perf_counter()
    with progress_line("training the tokenizer") as line:

        def progress(stage: str, done: int, total: int) -> None:
            line.retitle("counting pre-tokens" if stage == "counting" else "merging")
            line(done, total, f"{done:,} documents" if stage == "counting" else f"{done:,} merges")

        tokenizer = _train(options, progress)
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


def _train(options: TrainOptions, progress: Callable[[str, int, int], None]) -> Tokenizer:
    from napkin.data.token_file import SEPARATOR

    if options.kind == "bytes":
        return ByteTokenizer([SEPARATOR])
    if options.kind == "characters":
        # Characters of held-out documents are included, which could not be encoded otherwise.
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


CHUNK_TOKENS = 2**20
FILE_NAMES: dict[Side, str] = {"training": "train.tokens", "validation": "validation.tokens"}


@dataclass(frozen=True)
class EncodeOptions(TextOptions, JsonOption):
    """Encode text into two token files, train.tokens and validation.tokens. TEXT is a file, a folder, or stdlib: for
    Python's own library. Texts may be larger than the memory; a killed command continues if it is called again."""

    tokenizer: str = "data/tokenizer.json"
    """The tokenizer to use."""
    out: str = "data"
    """Folder to write to."""
    inline_boundaries: bool = False
    """Take <|endoftext|> within a line as the end of a document too, as training does. Without this it is text there,
    and a line says so."""


@command("tokenizer encode", EncodeOptions)
def encode_command(options: EncodeOptions) -> None:
    require_texts(options, "encode")
    tokenizer = load_tokenizer(options.tokenizer)
    sides: list[Side] = ["training", "validation"] if options.validation_fraction else ["training"]
    paths: dict[Side, Path] = {side: Path(options.out) / FILE_NAMES[side] for side in sides}
    from napkin.data.token_writer import take_back_unfinished, write_token_files_together

    take_back_unfinished(list(paths.values()))
    for path in paths.values():
        refuse_existing(path)
        refuse_existing(path.with_name(f"{path.name}.json"))
    start = time.perf_counter()
    with progress_line("reading the text") as line:
        inline: set[Path] = set()
        divided = options.inline_boundaries
        part_bytes = PART_BYTES if tokenizer.is_splittable else None
        totals: dict[Path, tuple[int, int]] = {}

        def documents() -> Iterator[tuple[Path, Document]]:
            read = read_sides(options, sides, part_bytes, inline_boundaries=divided, on_inline=inline.add)
            return ((paths[side], document) for side, document in read)

        def progress(path: Path, text_bytes: int, n_tokens: int) -> None:
            totals[path] = text_bytes, n_tokens
            text_bytes, n_tokens = (sum(each) for each in zip(*totals.values(), strict=True))
            line.retitle("encoding")
            line(text_bytes, None, f"{format_bytes(text_bytes)}, {format_count(n_tokens)} tokens")

        with folder_for(paths["training"]):
            files = write_token_files_together(
                list(paths.values()), documents, tokenizer, progress, threads=usable_cores()
            )
    written = dict(zip(sides, files, strict=True))
    costs = {side: _unknown_cost(tokens, tokenizer) for side, tokens in written.items()}
    if inline and not options.inline_boundaries:
        others = f" and {len(inline) - 1:,} more" if len(inline) > 1 else ""
        notify(
            f"'{min(inline)}'{others}: <|endoftext|> within a line was encoded as text, though training takes it as a "
            "boundary: use --inline-boundaries to end a document there"
        )
    if options.json:
        print_json(
            {
                side: {
                    "path": tokens.path,
                    "tokens": tokens.n_tokens,
                    "documents": tokens.n_documents,
                    "text_bytes": tokens.text_bytes,
                    "unknown_tokens": costs[side].tokens,
                    "lost_bytes": costs[side].bytes,
                }
                for side, tokens in written.items()
            }
        )
        return
    for side, tokens in written.items():
        say(
            f"wrote {tokens.path}: {tokens.n_tokens:,} tokens of {tokens.n_documents:,} documents, "
            f"{format_bytes(tokens.text_bytes)}, {tokens.text_bytes / tokens.n_tokens:.3f} bytes per token"
        )
        if costs[side].tokens:
            say(f"words that the tokenizer does not know: {describe_unknown_words(costs[side])}")
    say(f"encoded in {format_seconds(time.perf_counter() - start)}")


def _unknown_cost(tokens: "TokenFile", tokenizer: Tokenizer) -> UnknownRate:
    import numpy as np

    counts: Counter[int] = Counter()
    for start in range(0, tokens.n_tokens if tokenizer.unknown_id is not None else 0, CHUNK_TOKENS):
        ids, n = np.unique(tokens.tokens[start : start + CHUNK_TOKENS], return_counts=True)
        counts.update(dict(zip(ids.tolist(), n.tolist(), strict=True)))
    del counts[tokens.separator]
    return unknown_rate(tokenizer, counts, tokens.text_bytes)
