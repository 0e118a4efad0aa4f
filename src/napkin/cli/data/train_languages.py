"""`napkin data train-languages`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from napkin.cli.options import JsonOption, parse
from napkin.cli.output_files import folder_for, refuse_existing
from napkin.cli.progress import progress_line
from napkin.cli.terminal import print_json, say
from napkin.units import format_bytes, format_seconds


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
    """Of the order of texts: the same seed and texts make the same file."""


def main(arguments: list[str]) -> None:
    """Train and write the file."""
    options = parse(TrainLanguagesOptions, "data train-languages", arguments)
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
