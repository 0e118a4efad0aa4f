"""`napkin tokenizer train` and `napkin tokenizer encode`: their options. What they do is in tokenizing.py."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.options import Switch, parse
from napkin.errors import NapkinError

Texts = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")]

HELP = """\
usage: napkin tokenizer {train,encode} ...

  train   train a byte-level BPE tokenizer
  encode  encode text into token files

`napkin tokenizer train --help` tells more."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a byte-level BPE tokenizer. TEXT is a file, a folder, or stdlib: for Python's own library."""

    texts: Texts = ()
    """Where the text is; at least one."""
    out: str = "data/tokenizer.json"
    """File to write."""
    vocab_size: int = 4096
    """Number of token ids: 256 bytes, the merges, the special token <|endoftext|>."""
    pattern: str = "gpt2"
    """How text is cut before merging: gpt2, gpt4, whole, or a regular expression."""
    suffixes: tuple[str, ...] = ()
    """Of a folder, only files that end so: --suffixes .py .md; none is all files."""
    validation_fraction: float = 0.05
    """Share of the documents, 0 to 1, that training does not see; give `encode` the same."""
    json: Switch = False
    """Print the result for programs."""


@dataclass(frozen=True)
class EncodeOptions:
    """Encode text into two token files, train.tokens and validation.tokens. TEXT is a file, a folder, or stdlib: for
    Python's own library."""

    texts: Texts = ()
    """Where the text is; at least one."""
    tokenizer: str = "data/tokenizer.json"
    """The tokenizer to use."""
    out: str = "data"
    """Folder to write to."""
    suffixes: tuple[str, ...] = ()
    """Of a folder, only files that end so: --suffixes .py .md; none is all files."""
    validation_fraction: float = 0.05
    """Share of the documents, 0 to 1, that is held out, chosen by a hash of each; of a single document, its last part;
    0 makes no validation.tokens."""
    json: Switch = False
    """Print the result for programs."""


def main(arguments: list[str]) -> None:
    """Train a tokenizer, or encode text with one."""
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print(HELP)
        return
    if action not in ("train", "encode"):
        raise NapkinError(f"there is no '{action}': use `napkin tokenizer train` or `napkin tokenizer encode`")
    options = parse(TrainOptions if action == "train" else EncodeOptions, f"tokenizer {action}", rest)
    if not options.texts:
        raise NapkinError(
            f"no TEXT is given: name a file, a folder, or stdlib: as in `napkin tokenizer {action} stdlib:`"
        )
    from napkin.cli.tokenizing import encode, train

    train(options) if isinstance(options, TrainOptions) else encode(options)
