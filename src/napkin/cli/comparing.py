"""What `napkin tokenizer compare` does."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from napkin.cli.terminal import ProgressLine, out, print_json, progress_line, say
from napkin.cli.texts import STANDARD_LIBRARY, open_documents
from napkin.cli.token_text import show_tokens
from napkin.cli.tokenizer import CompareOptions
from napkin.cli.tokenizing import describe_loss
from napkin.data.token_file import SEPARATOR
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.byte_level import ByteTokenizer
from napkin.tokenizer.character_level import CharacterTokenizer
from napkin.tokenizer.printable import printable
from napkin.tokenizer.text_input import utf8
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import UnknownRate, WordTokenizer, unknown_rate
from napkin.units import format_bytes

MOST_CHARACTERS = 10**6
SECONDS_OF_TIMING = 0.1
MOST_SHOWN = 10_000


@dataclass(frozen=True)
class Result:
    """What a tokenizer makes of the text."""

    name: str
    tokenizer: Tokenizer
    ids: list[int]
    seconds: float
    lost: UnknownRate


def compare(options: CompareOptions) -> None:
    """Encode a text with tokenizers of each kind, and show what they make of it."""
    if not 0 <= options.show <= MOST_SHOWN:
        raise NapkinError(f"--show is {options.show}: use 0 to {MOST_SHOWN:,} characters")
    saved = [(path, load_tokenizer(path)) for path in options.with_]
    with progress_line("reading the text") as line:
        text, source = _text(options.text)
        learned_from = options.learn_from or ((source,) if source else (STANDARD_LIBRARY,))
        learned = text if learned_from == (source,) else _beginning(learned_from)
        kinds = _kinds(text, learned, options.vocab_size, line)
        line.retitle("encoding")
        results, refused = _encode_all([*kinds, *saved], text)
    text_bytes, excerpt = len(utf8(text)), _excerpt(text, options.show)
    if options.json:
        described = {"text": source or None, "characters": len(text), "bytes": text_bytes, "learned_from": learned_from}
        rows = [_row(result, text_bytes, excerpt) for result in results]
        print_json({**described, "tokenizers": rows, "refused": refused})
        return
    name = source or "given on the command line"
    learned_name = "itself" if learned is text else f"{format_bytes(len(utf8(learned)))} of {', '.join(learned_from)}"
    say(f"text: {name}, {format_bytes(text_bytes)}, {len(text):,} characters; vocabularies learned from {learned_name}")
    out.print(_table(results, text_bytes))
    _say_what_is_lost(results, refused)
    for result in results if excerpt else []:
        say(f"\n{result.name}", style="bold")
        show_tokens(result.tokenizer, result.tokenizer.encode(excerpt), more=len(excerpt) < len(text))


def _text(given: str) -> tuple[str, str]:
    """The text, and where it is from: a name, or nothing where it was given itself."""
    if given == STANDARD_LIBRARY or _exists(given):
        return _beginning([given]), given
    if not given:
        raise NapkinError("TEXT is empty: name a file, a folder or stdlib:, or give a text")
    return given[:MOST_CHARACTERS], ""


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        # A text may be too long for a name, or hold what none can.
        return False


def _beginning(texts: Sequence[str]) -> str:
    parts: list[str] = []
    left = MOST_CHARACTERS
    for document in open_documents(texts):
        parts.append(document.text[:left])
        left -= len(parts[-1])
        if not left:
            break
    return "".join(parts)


def _kinds(text: str, learned: str, vocab_size: int, line: ProgressLine) -> Iterator[tuple[str, Tokenizer]]:
    yield "characters", CharacterTokenizer.train([learned, text], [SEPARATOR])
    yield "bytes", ByteTokenizer([SEPARATOR])
    line.retitle("learning words")
    yield "words", WordTokenizer.train([learned], vocab_size, [SEPARATOR])
    line.retitle("learning merges")
    yield (
        "byte-level BPE",
        train_bpe(
            [learned],
            vocab_size,
            [SEPARATOR],
            progress=lambda stage, done, total: line(done, total),
            threads=usable_cores(),
        ),
    )


def _encode_all(tokenizers: Sequence[tuple[str, Tokenizer]], text: str) -> tuple[list[Result], dict[str, str]]:
    """Results, and why the others could not encode the text."""
    results: list[Result] = []
    refused: dict[str, str] = {}
    for name, tokenizer in tokenizers:
        try:
            ids, seconds = _timed(lambda tokenizer=tokenizer: tokenizer.encode(text))
        except NapkinError as error:
            refused[name] = str(error)
            continue
        lost = unknown_rate(tokenizer, Counter(ids), len(utf8(text)))
        results.append(Result(name, tokenizer, ids, seconds, lost))
    return results, refused


def _timed(encode: Callable[[], list[int]]) -> tuple[list[int], float]:
    """The ids, and the seconds of the quickest of several tries."""
    best, begin = float("inf"), time.perf_counter()
    for _ in itertools.count():
        start = time.perf_counter()
        ids = encode()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - begin > SECONDS_OF_TIMING:
            return ids, best
    raise AssertionError


def _table(results: list[Result], text_bytes: int) -> Table:
    headings = ("tokenizer", "vocabulary", "tokens", "bytes per token", "bytes per second")
    table = Table(*headings, box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        ratio = f"{text_bytes / len(result.ids):.3f}"
        speed = f"{format_bytes(text_bytes / result.seconds)}/s"
        table.add_row(result.name, f"{result.tokenizer.vocab_size:,}", f"{len(result.ids):,}", ratio, speed)
    return table


def _say_what_is_lost(results: list[Result], refused: dict[str, str]) -> None:
    for result in results:
        if result.lost.tokens:
            say(f"{result.name}: {describe_loss(result.lost)}, so the ratio does not compare with the others")
    for name, reason in refused.items():
        say(f"{name}: {reason}")


def _excerpt(text: str, n_characters: int) -> str:
    """The beginning of the text, to the end of a word where there is one."""
    if len(text) <= n_characters:
        return text
    beginning = text[:n_characters]
    words = beginning.rstrip().rpartition(" ")[0]
    return words if len(words) > n_characters // 2 else beginning


def _row(result: Result, text_bytes: int, excerpt: str) -> dict[str, Any]:
    shown = result.tokenizer.encode(excerpt)
    return {
        "name": result.name,
        "kind": result.tokenizer.kind,
        "vocab_size": result.tokenizer.vocab_size,
        "tokens": len(result.ids),
        "bytes_per_token": text_bytes / len(result.ids),
        "bytes_per_second": text_bytes / result.seconds,
        "unknown_tokens": result.lost.tokens,
        "lost_bytes": result.lost.bytes,
        "first_tokens": [printable(result.tokenizer.vocabulary[i]) for i in shown],
    }
