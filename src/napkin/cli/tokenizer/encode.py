"""`napkin tokenizer encode`."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from napkin.cli.common.files import PART_BYTES, folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import notify, print_json, say
from napkin.cli.tokenizer.texts import TextOptions, describe_unknown_words, read_sides, require_texts
from napkin.data.corpus import Side
from napkin.data.curated_corpus import Document
from napkin.hardware.host import usable_cores
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import UnknownRate, unknown_rate
from napkin.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from napkin.data.token_file import TokenFile

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
    from napkin.data.resumable_writing import take_back_unfinished, write_token_files_together

    take_back_unfinished(list(paths.values()))
    for path in paths.values():
        refuse_existing(path)
        refuse_existing(path.with_name(f"{path.name}.json"))
    start = time.perf_counter()
    with progress_line("reading the text") as line:
        inline: set[Path] = set()
        documents = partial(_documents, options, tokenizer, paths, inline.add)
        with folder_for(paths["training"]):
            files = write_token_files_together(
                list(paths.values()), documents, tokenizer, partial(_show_progress, line, {}), threads=usable_cores()
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
        print_json({side: _as_dict(tokens, costs[side]) for side, tokens in written.items()})
        return
    for side, tokens in written.items():
        say(
            f"wrote {tokens.path}: {tokens.n_tokens:,} tokens of {tokens.n_documents:,} documents, "
            f"{format_bytes(tokens.text_bytes)}, {tokens.text_bytes / tokens.n_tokens:.3f} bytes per token"
        )
        if costs[side].tokens:
            say(f"words that the tokenizer does not know: {describe_unknown_words(costs[side])}")
    say(f"encoded in {format_seconds(time.perf_counter() - start)}")


def _documents(
    options: EncodeOptions, tokenizer: Tokenizer, paths: Mapping[Side, Path], on_inline: Callable[[Path], None]
) -> Iterator[tuple[Path, Document]]:
    part_bytes = PART_BYTES if tokenizer.is_splittable else None
    divided = options.inline_boundaries
    documents = read_sides(options, list(paths), part_bytes, inline_boundaries=divided, on_inline=on_inline)
    return ((paths[side], document) for side, document in documents)


def _show_progress(
    line: ProgressLine, totals: dict[Path, tuple[int, int]], path: Path, text_bytes: int, n_tokens: int
) -> None:
    totals[path] = text_bytes, n_tokens
    text_bytes, n_tokens = (sum(each) for each in zip(*totals.values(), strict=True))
    line.retitle("encoding")
    line(text_bytes, None, f"{format_bytes(text_bytes)}, {format_count(n_tokens)} tokens")


def _unknown_cost(tokens: "TokenFile", tokenizer: Tokenizer) -> UnknownRate:
    import numpy as np

    counts: Counter[int] = Counter()
    for start in range(0, tokens.n_tokens if tokenizer.unknown_id is not None else 0, CHUNK_TOKENS):
        ids, n = np.unique(tokens.tokens[start : start + CHUNK_TOKENS], return_counts=True)
        counts.update(dict(zip(ids.tolist(), n.tolist(), strict=True)))
    del counts[tokens.separator]
    return unknown_rate(tokenizer, counts, tokens.text_bytes)


def _as_dict(tokens: "TokenFile", cost: UnknownRate) -> dict[str, object]:
    return {
        "path": tokens.path,
        "tokens": tokens.n_tokens,
        "documents": tokens.n_documents,
        "text_bytes": tokens.text_bytes,
        "unknown_tokens": cost.tokens,
        "lost_bytes": cost.bytes,
    }
