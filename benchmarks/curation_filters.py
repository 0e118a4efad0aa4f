"""Rules of quality on real text, one core: MB/s beside datatrove's filters, and where the two decide differently.

    python benchmarks/curation_filters.py /usr/share/doc articles/ --megabytes 20 --peer-megabytes 2

datatrove (pip install datatrove spacy nltk) is used as it is installed, with its default options and its default word
splitter for English, spaCy's blank model; it is left out, and named, where it is missing. For the agreement rule by
rule, datatrove's filters run once per rule with all others switched off, and its words of a text are kept between those
runs. Seconds are the processor's, of this one thread.
"""

import argparse
import contextlib
import functools
import gzip
import importlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from napkin.curation import Dropped, Record
from napkin.curation.filters import C4, FineWeb, Gopher, GopherRepetition, PersonalData
from napkin.curation.filters.compiled import FILTERS
from napkin.curation.filters.document_counts import MODULES
from result_files import existing, heading
from turns import BRACKETS, ratio_spread, seconds_of, spread

MAX_CHARACTERS = 100_000
RUNS = 6
"""Longer files are cut into documents of this size."""
TOGETHER = ("gopher", "gopher-repetition", "c4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=existing)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--peer-megabytes", type=float, default=2.0, help="for datatrove, spread over the documents")
    options = parser.parse_args()
    heading("Rules of quality beside datatrove's, one core", BRACKETS)
    texts = gather(options.paths, options.megabytes * 1e6)
    every = max(1, round(options.megabytes / options.peer_megabytes))
    sample = texts[::every]
    print(f"{len(texts):,} documents, {size(texts):.1f} MB; datatrove gets {len(sample):,}, {size(sample):.2f} MB\n")
    FILTERS.load(*MODULES)
    peers = datatrove_filters()
    print("| rules | napkin MB/s | datatrove MB/s | ratio |\n|---|---|---|---|")
    stages = {stage.name: stage for stage in (Gopher(), GopherRepetition(), C4(), FineWeb(), PersonalData())}
    for name in (*stages, " + ".join(TOGETHER)):
        parts = name.split(" + ")
        ours = rates(lambda text, parts=parts: apply(text, [stages[part] for part in parts]), texts)
        if all(part in peers for part in parts):
            made = [peers[part]() for part in parts]
            theirs = rates(lambda text, made=made: [each.filter(document(text)) for each in made], sample)
            cells = [spread(theirs), ratio_spread(ours, theirs, "{:.0f}".format)]
        else:
            cells = ["–", "–"]
        print(f"| {name} | {spread(ours, '{:.0f}'.format)} | {' | '.join(cells)} |", flush=True)
    if peers:
        agreement(sample)


def gather(paths: list[Path], n_bytes: float) -> list[str]:
    """Documents of the files in paths that are UTF-8, gzipped ones too; what looks like HTML loses its tags."""
    texts: list[str] = []
    total = 0
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file() or total >= n_bytes:
                continue
            with contextlib.suppress(OSError, UnicodeDecodeError, EOFError):
                data = file.read_bytes()
                text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
                if "\0" in text:
                    continue
                if "<p" in text[:MAX_CHARACTERS]:
                    text = re.sub(r"<(script|style).{0,100000}?</\1>|<[^>]{1,5000}>", "", text, flags=re.DOTALL)
                parts = [text[i : i + MAX_CHARACTERS] for i in range(0, len(text), MAX_CHARACTERS)]
                texts += [part for part in parts if part.strip()]
                total += sum(len(part.encode()) for part in parts)
    return texts


def size(texts: list[str]) -> float:
    """In MB."""
    return sum(len(text.encode()) for text in texts) / 1e6


def rates(function: Callable[[str], Any], texts: list[str]) -> list[float]:
    """MB per second of some runs, after one on the first text."""
    function(texts[0])
    return [
        size(texts) / seconds_of(lambda: [function(text) for text in texts], time.process_time) for _ in range(RUNS)
    ]


def apply(text: str, stages: list[Any]) -> None:
    """Each stage on the text itself, whatever the others say: what none of them drops costs most."""
    for stage in stages:
        stage.apply(Record("x", text))


def document(text: str) -> Any:
    return importlib.import_module("datatrove.data").Document(text=text, id="x")


def datatrove_filters() -> dict[str, Callable[..., Any]]:
    """datatrove's filters by our names; none, with a message, where it is missing."""
    try:
        for library in ("datatrove", "spacy"):
            importlib.import_module(library)
    except ImportError as error:
        print(f"datatrove is left out: {error}\n")
        return {}
    package = "datatrove.pipeline.filters"
    return {
        "gopher": importlib.import_module(f"{package}.gopher_quality_filter").GopherQualityFilter,
        "gopher-repetition": importlib.import_module(f"{package}.gopher_repetition_filter").GopherRepetitionFilter,
        "c4": importlib.import_module(f"{package}.c4_filters").C4QualityFilter,
        "fineweb": importlib.import_module(f"{package}.fineweb_quality_filter").FineWebQualityFilter,
    }


def peer_rules() -> Iterator[tuple[str, str, Any]]:
    """Stage, our name of a rule, and datatrove's filter with nothing but it."""
    filters = datatrove_filters()
    off = dict.fromkeys(
        "min_doc_words max_doc_words min_avg_word_length max_avg_word_length max_symbol_word_ratio "
        "max_bullet_lines_ratio max_ellipsis_lines_ratio max_non_alpha_words_ratio min_stop_words".split()
    )
    for rule, option, value in (
        ("too few words", "min_doc_words", 50),
        ("too many words", "max_doc_words", 100_000),
        ("short words", "min_avg_word_length", 3),
        ("long words", "max_avg_word_length", 10),
        ("hash signs|ellipses", "max_symbol_word_ratio", 0.1),
        ("bullet points", "max_bullet_lines_ratio", 0.9),
        ("lines end in ellipses", "max_ellipsis_lines_ratio", 0.3),
        ("words without letters", "max_non_alpha_words_ratio", 0.8),
        ("few stop words", "min_stop_words", 2),
    ):
        yield "gopher", rule, filters["gopher"](**off | {option: value})
    off = {"dup_line_frac": None, "dup_para_frac": None, "dup_line_char_frac": None, "dup_para_char_frac": None}
    off |= {"top_n_grams": (), "dup_n_grams": ()}
    repetition: list[tuple[str, str, Any]] = [
        ("repeated lines", "dup_line_frac", 0.3),
        ("repeated paragraphs", "dup_para_frac", 0.3),
        ("characters of repeated lines", "dup_line_char_frac", 0.2),
        ("characters of repeated paragraphs", "dup_para_char_frac", 0.2),
    ]
    for n, value in ((2, 0.2), (3, 0.18), (4, 0.16)):
        repetition.append((f"most frequent {n}-gram", "top_n_grams", ((n, value),)))
    for n, value in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)):
        repetition.append((f"duplicate {n}-grams", "dup_n_grams", ((n, value),)))
    for rule, option, value in repetition:
        yield "gopher-repetition", rule, filters["gopher-repetition"](**off | {option: value})
    off = {"line_punct_thr": -1, "short_line_thr": 2, "char_duplicates_ratio": 2, "new_line_ratio": 1e9}
    for rule, option, value in (
        ("lines without punctuation", "line_punct_thr", 0.12),
        ("characters of repeated lines", "char_duplicates_ratio", 0.1),
        ("short lines", "short_line_thr", 0.67),
    ):
        yield "fineweb", rule, filters["fineweb"](**off | {option: value})
    off = {"min_num_sentences": -1, "filter_lorem_ipsum": False, "filter_curly_bracket": False}
    for rule, option, value in (
        ("lorem ipsum", "filter_lorem_ipsum", True),
        ("curly bracket", "filter_curly_bracket", True),
        ("too few sentences", "min_num_sentences", 5),
    ):
        yield "c4", rule, filters["c4"](**off | {option: value}, remove_citations=False)


def agreement(texts: list[str]) -> None:
    """Print how often both drop a document by a rule, and how often one of them only."""
    for module in ("gopher_quality_filter", "gopher_repetition_filter", "fineweb_quality_filter"):
        loaded: Any = importlib.import_module(f"datatrove.pipeline.filters.{module}")
        loaded.split_into_words = functools.cache(loaded.split_into_words)
    stages = {stage.name: stage for stage in (Gopher(), GopherRepetition(), FineWeb(), C4())}
    ours = {name: [set(stage.failing_rules(text)) for text in texts] for name, stage in stages.items()}
    print("\n| rule | both drop | napkin only | datatrove only | agree |\n|---|---|---|---|---|")
    all_theirs: dict[str, list[bool]] = {name: [False] * len(texts) for name in stages}
    for name, rules, peer in peer_rules():
        names = set(rules.split("|"))
        counts: Counter[tuple[bool, bool]] = Counter()
        for i, text in enumerate(texts):
            theirs = dropped_by(peer, text)
            all_theirs[name][i] |= theirs
            counts[bool(ours[name][i] & names), theirs] += 1
        print_agreement(f"{name}: {rules.replace('|', ', ')}", counts)
    for name in stages:
        pairs = [(bool(own), theirs) for own, theirs in zip(ours[name], all_theirs[name], strict=True)]
        print_agreement(f"**{name}**, all its rules", Counter(pairs))
    same = Counter()
    c4, peer = C4(), datatrove_filters()["c4"](remove_citations=False)
    for text in texts:
        kept, theirs = c4.apply(Record("x", text)), document(text)
        if peer.filter(theirs) is True and not isinstance(kept, Dropped):
            same[kept.text == theirs.text] += 1
    print(f"\nC4: of {same.total()} documents that both keep, {same[True]} have the same lines afterwards")


def dropped_by(peer: Any, text: str) -> bool:
    try:
        return peer.filter(document(text)) is not True
    except ZeroDivisionError:
        # It divides by the number of words or lines, of which this text has none for it.
        return True


def print_agreement(name: str, counts: Counter[tuple[bool, bool]]) -> None:
    both, own, other = counts[True, True], counts[True, False], counts[False, True]
    print(f"| {name} | {both} | {own} | {other} | {1 - (own + other) / counts.total():.1%} |", flush=True)


if __name__ == "__main__":
    main()
