"""`napkin tokenizer train` and `napkin tokenizer encode`."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from napkin.cli.terminal import ProgressLine, out, parse, print_json, progress_line
from napkin.cli.texts import open_documents
from napkin.data.corpus import Document
from napkin.data.split import split_documents
from napkin.data.token_file import SEPARATOR, TokenFile, write_token_file
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.byte_level import ByteTokenizer
from napkin.tokenizer.characters import CharacterTokenizer
from napkin.tokenizer.storage import load_tokenizer
from napkin.units import format_bytes, format_count, format_seconds

Texts = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")]

SAMPLE_DOCUMENTS = 100


@dataclass(frozen=True)
class TrainOptions:
    """Train a byte-level BPE tokenizer. TEXT is a file, a folder, or stdlib: for Python's own library."""

    texts: Texts
    """Where the text is."""
    out: str = "data/tokenizer.json"
    """File to write."""
    vocab_size: int = 4096
    """Number of token ids: 256 bytes, the merges, the special token <|endoftext|>."""
    pattern: str = "gpt2"
    """How text is cut before merging: gpt2, gpt4, whole, or a regular expression."""
    suffixes: tuple[str, ...] = ()
    """Of a folder, only files that end so: --suffixes .py .md"""
    validation_fraction: float = 0.05
    """Share of the documents that training does not see; give `encode` the same."""
    json: bool = False
    """Print the result for programs."""


@dataclass(frozen=True)
class EncodeOptions:
    """Encode text into two token files, train.tokens and validation.tokens."""

    texts: Texts
    """Where the text is: a file, a folder, or stdlib: for Python's own library."""
    tokenizer: str = "data/tokenizer.json"
    """The tokenizer to use."""
    out: str = "data"
    """Folder to write to."""
    suffixes: tuple[str, ...] = ()
    """Of a folder, only files that end so: --suffixes .py .md"""
    validation_fraction: float = 0.05
    """Share of the documents that is held out, chosen by a hash of each; 0 makes no validation.tokens."""
    json: bool = False
    """Print the result for programs."""


def main(arguments: list[str]) -> None:
    """Train a tokenizer, or encode text with one."""
    actions = {"train": (_train, TrainOptions), "encode": (_encode, EncodeOptions)}
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print("usage: napkin tokenizer {train,encode} ...\n")
        print("  train   train a byte-level BPE tokenizer\n  encode  encode text into token files\n")
        print("`napkin tokenizer train --help` tells more.")
        return
    if action not in actions:
        raise NapkinError(f"there is no '{action}': use `napkin tokenizer train` or `napkin tokenizer encode`")
    run, options = actions[action]
    run(parse(options, f"tokenizer {action}", rest))


def _train(options: TrainOptions) -> None:
    if Path(options.out).exists():
        raise NapkinError(f"'{options.out}' exists and is not overwritten: remove it or choose another --out")
    start = time.perf_counter()
    with progress_line("training the tokenizer") as line:
        documents = _side(options, "training")
        tokenizer = train_bpe(
            (document.text for document in documents),
            options.vocab_size,
            special_tokens=[SEPARATOR],
            pattern=options.pattern,
            progress=lambda stage, done, total: _show(line, stage, done, total),
        )
        seconds = time.perf_counter() - start
        line.retitle("comparing tokenizers")
        comparison = _compare(tokenizer, options)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(options.out)
    if options.json:
        print_json({"tokenizer": options.out, "fingerprint": tokenizer.fingerprint, "kinds": comparison})
        return
    table = Table("tokenizer", "vocabulary", "bytes a token", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, (vocab_size, ratio) in comparison.items():
        table.add_row(kind, f"{vocab_size:,}", f"{ratio:.3f}")
    out.print(table)
    if tokenizer.vocab_size < options.vocab_size:
        out.print(f"the text has no more pairs to merge: the vocabulary ends at {tokenizer.vocab_size:,}")
    out.print(f"wrote {options.out} in {format_seconds(seconds)}", soft_wrap=True)


def _encode(options: EncodeOptions) -> None:
    tokenizer = load_tokenizer(options.tokenizer)
    folder = Path(options.out)
    sides = ["training", "validation"] if options.validation_fraction else ["training"]
    paths = {side: folder / ("train.tokens" if side == "training" else "validation.tokens") for side in sides}
    for path in paths.values():
        if path.exists():
            raise NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    written: dict[str, TokenFile] = {}
    with progress_line("encoding") as line:
        for side, path in paths.items():
            line.retitle(f"encoding {path}")
            documents = _not_empty(_side(options, side), side, options.validation_fraction)
            written[side] = write_token_file(
                path,
                documents,
                tokenizer,
                progress=lambda text_bytes, n_tokens: line(
                    text_bytes, None, f"{format_bytes(text_bytes)}, {format_count(n_tokens)} tokens"
                ),
            )
    if options.json:
        print_json({side: _describe(tokens) for side, tokens in written.items()})
        return
    for tokens in written.values():
        out.print(
            f"wrote {tokens.path}: {tokens.n_tokens:,} tokens of {tokens.n_documents:,} documents, "
            f"{format_bytes(tokens.text_bytes)}, {tokens.text_bytes / tokens.n_tokens:.3f} bytes a token",
            soft_wrap=True,
        )
    out.print(f"in {format_seconds(time.perf_counter() - start)}")


def _side(options: TrainOptions | EncodeOptions, side: str) -> Iterator[Document]:
    documents = open_documents(options.texts, options.suffixes)
    wanted = "validation" if side == "validation" else "training"
    return split_documents(documents, float(options.validation_fraction), wanted)


def _not_empty(documents: Iterator[Document], side: str, fraction: float) -> Iterator[Document]:
    first = next(documents, None)
    if first is None:
        raise NapkinError(
            f"a validation fraction of {fraction} leaves no document for {side}: "
            "use more documents, another --validation-fraction, or 0 to hold nothing out"
        )
    return itertools.chain([first], documents)


def _compare(tokenizer: Tokenizer, options: TrainOptions) -> dict[str, tuple[int, float]]:
    """Vocabulary and compression ratio of three kinds, on text that the tokenizer was not trained on if there is."""
    texts = _sample(_side(options, "validation")) or _sample(_side(options, "training"))
    sample = "".join(texts)
    kinds = {
        "byte-level BPE": tokenizer,
        "characters": CharacterTokenizer.train([sample]),
        "bytes": ByteTokenizer(),
    }
    return {kind: (each.vocab_size, each.compression_ratio(sample)) for kind, each in kinds.items()}


def _sample(documents: Iterable[Document]) -> list[str]:
    return [document.text for document in itertools.islice(documents, SAMPLE_DOCUMENTS)]


def _show(line: ProgressLine, stage: str, done: int, total: int) -> None:
    line.retitle("counting pre-tokens" if stage == "counting" else "merging")
    line(done, total, f"{done:,} documents" if stage == "counting" else f"{done:,} merges")


def _describe(tokens: TokenFile) -> dict[str, object]:
    return {
        "path": str(tokens.path),
        "tokens": tokens.n_tokens,
        "documents": tokens.n_documents,
        "text_bytes": tokens.text_bytes,
    }
