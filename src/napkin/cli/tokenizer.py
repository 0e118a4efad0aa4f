"""`napkin tokenizer`: its commands and their options. What they do is in the modules named in ACTIONS."""

import difflib
import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from napkin.cli.options import Switch, parse
from napkin.errors import NapkinError

Texts = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")]

Kind = Literal["bpe", "words", "characters", "bytes"]
"""Kinds that can be trained, or made."""

HELP = """\
usage: napkin tokenizer {train,encode,compare,show,import,export} ...

  train    train a tokenizer: byte-level BPE, words, characters or bytes
  encode   encode text into token files
  compare  show what each kind of tokenizer makes of a text
  show     look into a tokenizer: longest tokens, merges, how a word is built up
  import   read a BPE vocabulary of Hugging Face, tiktoken or GPT-2
  export   write a BPE tokenizer for one of these

`napkin tokenizer train --help` tells more."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a tokenizer. TEXT is a file, a folder, or stdlib: for Python's own library."""

    texts: Texts = ()
    """Where the text is; at least one."""
    out: str = "data/tokenizer.json"
    """File to write."""
    kind: Kind = "bpe"
    """What a token is: bpe, byte-level BPE; words, the most frequent ones, all others are <|unk|> and lost;
    characters; bytes."""
    vocab_size: int | None = None
    """Number of token ids, <|endoftext|> included; None is 4096 for bpe and words, and for characters and bytes what
    they need."""
    pattern: str | None = None
    """How text is cut before merging, and into words: gpt2, gpt4, cl100k (gpt4 as tiktoken cuts now), o200k, whole, or
    a regular expression; None is gpt2."""
    suffixes: tuple[str, ...] = ()
    """Of a folder, only files that end so: --suffixes .py .md; none is all files."""
    validation_fraction: float = 0.05
    """Share of the documents, 0 to 1, that training does not see; give `encode` the same."""
    json: Switch = False
    """Print the result for programs."""


@dataclass(frozen=True)
class EncodeOptions:
    """Encode text into two token files, train.tokens and validation.tokens. TEXT is a file, a folder, or stdlib: for
    Python's own library. Texts may be larger than the memory; after a kill the same command goes on."""

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
    of one larger than 8 MB, the last part of each 8 MB; 0 makes no validation.tokens."""
    json: Switch = False
    """Print the result for programs."""


@dataclass(frozen=True)
class CompareOptions:
    """Show what each kind of tokenizer makes of a text. Characters, words and byte-level BPE learn their vocabulary
    first: from the text itself if it is in files, from Python's own library if it is given on the command line."""

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """A file, a folder, stdlib: for Python's own library, or else the text itself. Its first million characters are
    used."""
    with_: Annotated[tuple[str, ...], tyro.conf.arg(name="with")] = ()
    """Files of tokenizers to compare with."""
    learn_from: tuple[str, ...] = ()
    """Files, folders or stdlib: to learn the vocabularies from instead."""
    vocab_size: int = 4096
    """Number of token ids of words and of byte-level BPE."""
    show: int = 240
    """Characters of the text that are shown cut into tokens."""
    json: Switch = False
    """Print the result for programs."""


@dataclass(frozen=True)
class ShowOptions:
    """Look into a tokenizer: its longest tokens, its merges in order, or how a word is built up, merge by merge."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """File of the tokenizer."""
    longest: int = 10
    """How many of the longest tokens to print."""
    merges: int = 10
    """How many of the first merges to print, and of the last."""
    word: str | None = None
    """Text to build up instead; in the middle of a sentence a word begins with its space: --word " word"."""
    json: Switch = False
    """Print the result for programs."""


@dataclass(frozen=True)
class ImportOptions:
    """Read a BPE vocabulary of another library and write it as a tokenizer of napkin that gives the same ids. What
    would not be exact is refused."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")] = ()
    """A tokenizer.json; a .tiktoken file; vocab.json and merges.txt, or the folder that holds them."""
    out: str = "data/tokenizer.json"
    """File to write."""
    format: Literal["auto", "huggingface", "tiktoken", "gpt2"] = "auto"
    """What the files are; auto looks at them."""
    pattern: str | None = None
    """How text is cut, of a .tiktoken file, which does not say: gpt2, cl100k, o200k, whole, or a regular expression.
    GPT-2's files have gpt2."""
    special: tuple[str, ...] = ()
    """Special tokens: of a .tiktoken file, which does not name them, as TOKEN=ID or TOKEN for the next free id; of
    GPT-2's files those that are special; added to a tokenizer.json."""
    drop_template: Switch = False
    """Leave out the tokens that a tokenizer.json puts around every text, which napkin does not add."""
    json: Switch = False
    """Print the result for programs."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a byte-level BPE tokenizer in another library's format; there it gives the same ids."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """File of the tokenizer."""
    out: str = ""
    """File to write, which has to be named; for gpt2 the folder for vocab.json and merges.txt."""
    format: Literal["huggingface", "tiktoken", "gpt2"] = "huggingface"
    """huggingface is tokenizer.json; tiktoken leaves the pattern and the special tokens out; gpt2 is for the pattern
    gpt2 alone."""
    json: Switch = False
    """Print the result for programs."""


# Options, and what does it: imported when the options are known to be right.
ACTIONS: dict[str, tuple[type, str, str]] = {
    "train": (TrainOptions, "napkin.cli.tokenizing", "train"),
    "encode": (EncodeOptions, "napkin.cli.tokenizing", "encode"),
    "compare": (CompareOptions, "napkin.cli.comparing", "compare"),
    "show": (ShowOptions, "napkin.cli.showing", "show"),
    "import": (ImportOptions, "napkin.cli.interchanging", "import_"),
    "export": (ExportOptions, "napkin.cli.interchanging", "export"),
}


def main(arguments: list[str]) -> None:
    """Do one of the things that can be done with tokenizers."""
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print(HELP)
        return
    if action not in ACTIONS:
        near = difflib.get_close_matches(action, ACTIONS, n=1)
        way_out = f"did you mean `napkin tokenizer {near[0]}`?" if near else f"use one of {', '.join(ACTIONS)}"
        raise NapkinError(f"there is no '{action}': {way_out}")
    kind, module, function = ACTIONS[action]
    options = parse(kind, f"tokenizer {action}", rest)
    if isinstance(options, TrainOptions | EncodeOptions) and not options.texts:
        raise NapkinError(
            f"no TEXT is given: name a file, a folder, or stdlib: as in `napkin tokenizer {action} stdlib:`"
        )
    getattr(importlib.import_module(module), function)(options)
