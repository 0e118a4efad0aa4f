"""`napkin data train-classifier` and `napkin data train-languages`."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_seconds

Paths = Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT ...")]


@dataclass(frozen=True)
class TrainClassifierOptions(JsonOption):
    """Train a classifier that tells texts like your positives from texts like your negatives, for `classifier`."""

    positive: Paths = ()
    """Files, folders and patterns with texts that are wanted; for toxicity, toxic ones."""
    negative: Paths = ()
    """Files, folders and patterns with texts that are not, such as a sample of the raw corpus."""
    out: str = "quality.model"
    """File to write."""
    text_field: str = "text"
    """The field of JSON lines, or column of Parquet, that is the text."""
    max_texts: int = 100_000
    """Texts of each side that are read at most; all are kept in memory, some 4 kB each."""
    columns: int = 2**20
    """Columns for hashed n-grams, a power of two; 4 bytes of the file each."""
    max_n: int = 2
    """Words of the longest n-gram, 1 to 5."""
    penalty: float = 1e-4
    """Penalty on the squared weights; larger is smoother."""


@command("data train-classifier", TrainClassifierOptions)
def train_classifier_command(options: TrainClassifierOptions) -> None:
    from napkin.curation.filters.quality_model import MAX_COLUMNS, MAX_N, train_quality_model, write_quality_model

    for side, paths in (("--positive", options.positive), ("--negative", options.negative)):
        if not paths:
            raise NapkinError(f"{side} is missing: name files or folders with texts")
    if options.max_texts < 1:
        raise NapkinError(f"--max-texts is {options.max_texts}: use at least 1")
    if not 1 <= options.max_n <= MAX_N:
        raise NapkinError(f"--max-n is {options.max_n}: use 1 to {MAX_N}")
    if not 2 <= options.columns <= MAX_COLUMNS or options.columns & (options.columns - 1):
        raise NapkinError(f"--columns is {options.columns}: use a power of two up to {MAX_COLUMNS}")
    if not 0 <= options.penalty < float("inf"):
        raise NapkinError(f"--penalty is {options.penalty}: use 0 or more")
    path = Path(options.out)
    refuse_existing(path)
    begin = time.perf_counter()
    with progress_line("reading positives") as line:
        positives = _read(options.positive, options, line)
        line.retitle("reading negatives")
        negatives = _read(options.negative, options, line)
        line.retitle(f"training on {len(positives) + len(negatives):,} texts")
        model, held_out = train_quality_model(
            positives, negatives, columns=options.columns, max_n=options.max_n, penalty=options.penalty
        )
    with folder_for(path):
        write_quality_model(path, model)
    if options.json:
        print_json({"model": path, "positives": len(positives), "negatives": len(negatives), "held_out": held_out})
        return
    rows = [[f"{mean:.3f}", f"{fraction:.1%}", f"{count:,}"] for mean, fraction, count in held_out.bins]
    print_table(["mean score", "are positives", "held-out texts"], rows, align="rrr")
    say(
        f"of {held_out.positives:,} positives and {held_out.negatives:,} negatives held out, both sides "
        f"weighted alike: accuracy {held_out.accuracy:.1%}, area under the ROC curve "
        f"{held_out.area_under_curve:.4f}, scores off by {held_out.calibration_error:.3f} in the mean"
    )
    say(f"wrote {path} in {format_seconds(time.perf_counter() - begin)}")


def _read(paths: tuple[str, ...], options: TrainClassifierOptions, line: ProgressLine) -> list[str]:
    from napkin.curation.filters.quality_model import MAX_CHARACTERS

    texts: list[str] = []
    for text in itertools.islice(_texts_of(paths, options.text_field), options.max_texts):
        texts.append(text[:MAX_CHARACTERS])
        line(len(texts), None, f"{len(texts):,} texts")
    return texts


def _texts_of(paths: tuple[str, ...], text_field: str) -> Iterator[str]:
    """Texts that are not empty; files that cannot be read are named in a message and left out."""
    from napkin.curation.reading.bounded_stream import ReadLimits, SetAside
    from napkin.curation.reading.documents import read_file
    from napkin.curation.reading.input_file import InputFile, find_files

    for file in find_files(paths):
        for record in read_file(file, ReadLimits(), text_field) if isinstance(file, InputFile) else (file,):
            if isinstance(record, SetAside):
                why = f"{record.reason} {record.detail}".rstrip()
                notify(f"data train-classifier: warning: '{record.identity}' is left out: {why}")
            elif record.text.strip():
                yield record.text


@dataclass(frozen=True)
class TrainLanguagesOptions(JsonOption):
    """Train a language classifier on texts of your own, for `napkin data language --classifier`."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder with a file CODE.txt, or a folder CODE of such files, per language: en.txt, de/. A line is a paragraph.
    Texts under the code zxx are of no language: code and numbers. A file SOURCES says where the texts are from."""
    out: str = "languages.safetensors"
    """File to write."""
    row_bits: int = 18
    """n-grams are hashed to 2^ROW_BITS rows of 16 bytes: 18 makes a file of 4 MB."""
    examples: int = 30_000
    """Pieces of text that are learned from, per language: 1 to 40 words each."""
    characters: int = 1_000_000
    """Characters of each language that are read at most."""
    rate: float = 0.5
    """Learning rate at the start."""
    seed: int = 0
    """Seed of the order of texts: the same seed and texts make the same file."""


@command("data train-languages", TrainLanguagesOptions)
def train_languages_command(options: TrainLanguagesOptions) -> None:
    path = Path(options.out)
    refuse_existing(path)
    from napkin.languages.training import LanguageTraining, train_languages

    training = LanguageTraining(options.row_bits, options.examples, options.characters, options.rate, options.seed)
    start = time.perf_counter()
    with progress_line("training the language classifier") as line:
        classifier = train_languages(options.folder, training, line)
    with folder_for(path):
        classifier.save(path)
    if options.json:
        print_json({"classifier": path, "languages": classifier.languages, "sources": classifier.sources})
        return
    say(f"{len(classifier.languages)} languages: {' '.join(classifier.languages)}")
    size = format_bytes(path.stat().st_size)
    say(f"wrote {path}, {size}, in {format_seconds(time.perf_counter() - start)}")
