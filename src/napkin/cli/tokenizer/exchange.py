"""`napkin tokenizer import` and `napkin tokenizer export`: BPE vocabularies of other libraries."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import merges_of, pattern_of, printable
from napkin.tokenizer.interchange.huggingface import read_bytes, read_huggingface, write_huggingface
from napkin.tokenizer.interchange.huggingface_fields import expression_of, known_pattern
from napkin.tokenizer.interchange.tiktoken import (
    MERGES_NAME,
    VOCABULARY_NAME,
    read_gpt2,
    read_tiktoken,
    write_gpt2,
    write_tiktoken,
)
from napkin.tokenizer.tokenizer_file import load_tokenizer

TOKENIZER_NAME = "tokenizer.json"

Format = Literal["huggingface", "tiktoken", "gpt2"]


@dataclass(frozen=True)
class ImportOptions(JsonOption):
    """Read a BPE vocabulary of another library and write it as a tokenizer of napkin that gives the same ids. A
    vocabulary that cannot be represented exactly is refused."""

    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")] = ()
    """A tokenizer.json; a .tiktoken file; vocab.json and merges.txt; or a folder that contains one of these."""
    out: str = "data/tokenizer.json"
    """File to write."""
    format: Literal["auto", "huggingface", "tiktoken", "gpt2"] = "auto"
    """Format of the files; auto detects it."""
    pattern: str | None = None
    """How text is split, for a .tiktoken file, which does not say: gpt2, cl100k, o200k, whole, or a regular
    expression. For GPT-2's files None is gpt2."""
    special: tuple[str, ...] = ()
    """Special tokens: of a .tiktoken file, which does not name them, as TOKEN=ID or TOKEN for the next free id; of
    GPT-2's files those that are special; added to a tokenizer.json."""
    drop_template: Switch = False
    """Leave out the tokens that a tokenizer.json puts around every text, which napkin does not add."""


@command("tokenizer import", ImportOptions)
def import_command(options: ImportOptions) -> None:
    files, path = _files(options.files), Path(options.out)
    refuse_existing(path)
    kind = _format(files) if options.format == "auto" else options.format
    with progress_line("reading the vocabulary"):
        tokenizer = _read(files, kind, options)
    with folder_for(path):
        tokenizer.save(path)
    if options.json:
        described = {"vocab_size": tokenizer.vocab_size, "special_tokens": tokenizer.special_tokens}
        print_json({"tokenizer": path, "fingerprint": tokenizer.fingerprint, "format": kind, **described})
        return
    names = [printable(token.encode()) for token in tokenizer.special_tokens]
    special = ", ".join(names[:5]) + f" and {len(names) - 5:,} more" * (len(names) > 5)
    say(
        f"wrote {path}, read as {kind}: {tokenizer.vocab_size:,} ids, {len(merges_of(tokenizer)):,} merges, pattern "
        f"{pattern_of(tokenizer)}, special tokens: {special or 'none'}"
    )
    from napkin.data.token_file import SEPARATOR

    if SEPARATOR not in tokenizer.special_tokens:
        say(f"`napkin tokenizer encode` needs {SEPARATOR} between documents: add it with --special '{SEPARATOR}'")


def _files(given: Sequence[str]) -> list[str]:
    """The files given; of a folder GPT-2's two if it has both, else its tokenizer.json or its one .tiktoken file."""
    if len(given) != 1 or not Path(given[0]).is_dir():
        if not 1 <= len(given) <= 2:
            raise NapkinError(
                f"{len(given) or 'no'} files are given: name a tokenizer.json, a .tiktoken file, or {VOCABULARY_NAME} "
                f"and {MERGES_NAME}"
            )
        return list(given)
    folder = Path(given[0])
    pair = [folder / VOCABULARY_NAME, folder / MERGES_NAME]
    if all(path.is_file() for path in pair):
        return list(map(str, pair))
    one = [path for path in (folder / TOKENIZER_NAME, *sorted(folder.glob("*.tiktoken"))) if path.is_file()]
    if one and (one[0].name == TOKENIZER_NAME or len(one) == 1):
        return [str(one[0])]
    if one:
        raise NapkinError(f"'{folder}' holds several .tiktoken files: name one, such as {one[0]}")
    missing = next(path for path in pair if not path.is_file())
    raise NapkinError(
        f"'{missing}' cannot be read (No such file or directory), and '{folder}' holds neither {TOKENIZER_NAME} nor a "
        f".tiktoken file: name a folder with one of these, or with both {VOCABULARY_NAME} and {MERGES_NAME}"
    )


def _format(files: list[str]) -> Format:
    if len(files) == 2:
        return "gpt2"
    content = read_bytes(files[0]).lstrip()
    if not content.startswith(b"{"):
        return "tiktoken"
    if b'"napkin-tokenizer"' in content[:100]:
        raise NapkinError(
            f"'{files[0]}' is a tokenizer of napkin already, missing required field `model` of others: use it unchanged"
        )
    return "huggingface"


def _read(files: list[str], kind: Format, options: ImportOptions) -> Tokenizer:
    if (kind == "gpt2") != (len(files) == 2):
        raise NapkinError(
            f"--format {kind} reads {'two files' if kind == 'gpt2' else 'one file'}, {len(files)} given: GPT-2's are "
            f"{VOCABULARY_NAME} and {MERGES_NAME}, the others are one each"
        )
    if options.drop_template and kind != "huggingface":
        raise NapkinError(f"--drop-template is for tokenizer.json, the files are read as {kind}: leave it out")
    if kind == "huggingface":
        if options.pattern is not None:
            raise NapkinError("--pattern is not for tokenizer.json, which has its own: leave it out")
        names = list(_special_tokens(options.special, with_ids=False))
        return read_huggingface(files[0], drop_template=options.drop_template, special_tokens=names)
    if kind == "gpt2":
        # The vocabulary is the one that is JSON.
        vocabulary, merges = sorted(files, key=lambda path: not read_bytes(path).lstrip().startswith(b"{"))
        names = list(_special_tokens(options.special, with_ids=False))
        pattern = known_pattern(options.pattern or "gpt2") or options.pattern or "gpt2"
        return read_gpt2(vocabulary, merges, pattern=pattern, special_tokens=names or None)
    if options.pattern is None:
        raise NapkinError(
            "a .tiktoken file does not say how text is split: "
            "name its --pattern (gpt2, cl100k, o200k or a regular expression)"
        )
    specials = _special_tokens(options.special, with_ids=True)
    return read_tiktoken(files[0], pattern=known_pattern(options.pattern) or options.pattern, special_tokens=specials)


def _special_tokens(given: Sequence[str], *, with_ids: bool) -> dict[str, int | None]:
    """Special tokens as written on the command line: TOKEN, or TOKEN=ID."""
    tokens: dict[str, int | None] = {}
    for each in given:
        token, equals, number = each.rpartition("=")
        has_id = bool(with_ids and equals and token and number.isascii() and number.isdigit() and len(number) <= 18)
        name = token if has_id else each
        if name in tokens:
            raise NapkinError(f"--special names {name!r} twice: each needs one id")
        tokens[name] = int(number) if has_id else None
    return tokens


@dataclass(frozen=True)
class ExportOptions(JsonOption):
    """Write a byte-level BPE tokenizer in another library's format; it gives the same ids there."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """File of the tokenizer."""
    out: str = ""
    """File to write; required. For gpt2 it is the folder for vocab.json and merges.txt."""
    format: Literal["huggingface", "tiktoken", "gpt2"] = "huggingface"
    """huggingface is tokenizer.json; tiktoken leaves out the pattern and the special tokens; gpt2 is only for the
    pattern gpt2."""


@command("tokenizer export", ExportOptions)
def export_command(options: ExportOptions) -> None:
    if not options.out:
        raise NapkinError("no file to write is named: give --out PATH")
    tokenizer, out = load_tokenizer(options.path), Path(options.out)
    write = {"huggingface": write_huggingface, "tiktoken": write_tiktoken, "gpt2": write_gpt2}[options.format]
    paths = [out / VOCABULARY_NAME, out / MERGES_NAME] if options.format == "gpt2" else [out]
    with progress_line("writing the vocabulary"), folder_for(paths[0]):
        write(tokenizer, out)
    # A .tiktoken file has neither; its reader has to be given both.
    said = {"pattern": expression_of(pattern_of(tokenizer)), "special_tokens": tokenizer.special_tokens}
    if options.json:
        print_json({"files": paths, "format": options.format, **said})
        return
    say(f"wrote {' and '.join(map(str, paths))}: {tokenizer.vocab_size:,} ids, the same as napkin's")
    if options.format == "tiktoken":
        say(f"tiktoken.Encoding needs two more arguments: pat_str={said['pattern']!r}")
        say(f"and special_tokens={said['special_tokens']!r}")
        specials = [f"{name}={number}" for name, number in tokenizer.special_tokens.items()]
        again = ["napkin", "tokenizer", "import", str(out), "--pattern", pattern_of(tokenizer)]
        again += ["--special", *specials] if specials else []
        say(f"napkin reads it again with: {shlex.join(again)}", wrap=False)
