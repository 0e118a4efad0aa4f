"""What `napkin tokenizer import` and `napkin tokenizer export` do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from napkin.cli.folders import folder_for
from napkin.cli.terminal import print_json, progress_line, say
from napkin.cli.tokenizer import ExportOptions, ImportOptions
from napkin.data.token_file import SEPARATOR
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import merges_of, pattern_of
from napkin.tokenizer.interchange.decoding import read_bytes
from napkin.tokenizer.interchange.expressions import expression_of, known_pattern
from napkin.tokenizer.interchange.gpt2 import MERGES_NAME, VOCABULARY_NAME, read_gpt2, write_gpt2
from napkin.tokenizer.interchange.huggingface import read_huggingface, write_huggingface
from napkin.tokenizer.interchange.tiktoken import read_tiktoken, write_tiktoken
from napkin.tokenizer.printable import printable
from napkin.tokenizer.tokenizer_file import load_tokenizer

Format = Literal["huggingface", "tiktoken", "gpt2"]


def import_(options: ImportOptions) -> None:
    """Read another library's vocabulary and write it as napkin's file."""
    files, path = _files(options.files), Path(options.out)
    if path.exists():
        raise NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another --out")
    form = _format(files) if options.format == "auto" else options.format
    with progress_line("reading the vocabulary"):
        tokenizer = _read(files, form, options)
    with folder_for(path):
        tokenizer.save(path)
    if options.json:
        described = {"vocab_size": tokenizer.vocab_size, "special_tokens": tokenizer.special_tokens}
        print_json({"tokenizer": path, "fingerprint": tokenizer.fingerprint, "format": form, **described})
        return
    say(
        f"wrote {path}, read as {form}: {tokenizer.vocab_size:,} ids, {len(merges_of(tokenizer)):,} merges, pattern "
        f"{pattern_of(tokenizer)}, special tokens: {_names(tokenizer)}"
    )
    if SEPARATOR not in tokenizer.special_tokens:
        say(f"`napkin tokenizer encode` needs {SEPARATOR} between documents: add it with --special '{SEPARATOR}'")


def export(options: ExportOptions) -> None:
    """Write napkin's tokenizer as another library's files."""
    if not options.out:
        raise NapkinError("no file to write is named: give --out PATH")
    tokenizer, out = load_tokenizer(options.path), Path(options.out)
    write = {"huggingface": write_huggingface, "tiktoken": write_tiktoken, "gpt2": write_gpt2}[options.format]
    paths = [out / VOCABULARY_NAME, out / MERGES_NAME] if options.format == "gpt2" else [out]
    with progress_line("writing the vocabulary"), folder_for(paths[0]):
        write(tokenizer, out)
    # A rank file says neither; who reads it has to.
    said = {"pattern": expression_of(pattern_of(tokenizer)), "special_tokens": tokenizer.special_tokens}
    if options.json:
        print_json({"files": paths, "format": options.format, **said})
        return
    say(f"wrote {' and '.join(map(str, paths))}: {tokenizer.vocab_size:,} ids, the same as napkin's")
    if options.format == "tiktoken":
        say(f"tiktoken.Encoding needs two things besides: pat_str={said['pattern']!r}")
        say(f"and special_tokens={said['special_tokens']!r}")


def _files(given: Sequence[str]) -> list[str]:
    if len(given) == 1 and Path(given[0]).is_dir():
        return [str(Path(given[0]) / name) for name in (VOCABULARY_NAME, MERGES_NAME)]
    if not 1 <= len(given) <= 2:
        raise NapkinError(
            f"{len(given) or 'no'} files are given: name a tokenizer.json, a .tiktoken file, or {VOCABULARY_NAME} and "
            f"{MERGES_NAME}"
        )
    return list(given)


def _format(files: list[str]) -> Format:
    if len(files) == 2:
        return "gpt2"
    content = read_bytes(files[0])
    if not content.lstrip().startswith(b"{"):
        return "tiktoken"
    return "huggingface"


def _read(files: list[str], form: Format, options: ImportOptions) -> Tokenizer:
    if (form == "gpt2") != (len(files) == 2):
        raise NapkinError(
            f"--format {form} reads {'two files' if form == 'gpt2' else 'one file'}, {len(files)} given: GPT-2's are "
            f"{VOCABULARY_NAME} and {MERGES_NAME}, the others are one each"
        )
    if options.drop_template and form != "huggingface":
        raise NapkinError(f"--drop-template is for tokenizer.json, the files are read as {form}: leave it out")
    if form == "huggingface":
        if options.pattern is not None:
            raise NapkinError("--pattern is not for tokenizer.json, which says its own: leave it out")
        names = list(_special_tokens(options.special, with_ids=False))
        return read_huggingface(files[0], drop_template=options.drop_template, special_tokens=names)
    if form == "gpt2":
        # Of the two the vocabulary is the JSON.
        vocabulary, merges = sorted(files, key=lambda path: not read_bytes(path).lstrip().startswith(b"{"))
        names = list(_special_tokens(options.special, with_ids=False))
        return read_gpt2(vocabulary, merges, pattern=_pattern(options.pattern or "gpt2"), special_tokens=names or None)
    if options.pattern is None:
        raise NapkinError(
            "a rank file does not say how text is cut: name its --pattern (gpt2, cl100k, o200k or a regular expression)"
        )
    specials = _special_tokens(options.special, with_ids=True)
    return read_tiktoken(files[0], pattern=_pattern(options.pattern), special_tokens=specials)


def _pattern(given: str) -> str:
    return known_pattern(given) or given


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


def _names(tokenizer: Tokenizer) -> str:
    names = [printable(token.encode()) for token in tokenizer.special_tokens]
    shown = ", ".join(names[:5]) + f" and {len(names) - 5:,} more" * (len(names) > 5)
    return shown or "none"
