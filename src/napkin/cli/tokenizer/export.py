"""`napkin tokenizer export`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from napkin.cli.options import JsonOption, parse
from napkin.cli.output_files import folder_for
from napkin.cli.progress import progress_line
from napkin.cli.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.tokenizer.inspection import pattern_of
from napkin.tokenizer.interchange.huggingface import write_huggingface
from napkin.tokenizer.interchange.huggingface_fields import expression_of
from napkin.tokenizer.interchange.tiktoken import MERGES_NAME, VOCABULARY_NAME, write_gpt2, write_tiktoken
from napkin.tokenizer.tokenizer_file import load_tokenizer


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


def main(arguments: list[str]) -> None:
    """Write a tokenizer of napkin as another library's files."""
    options = parse(ExportOptions, "tokenizer export", arguments)
    if not options.out:
        raise NapkinError("no file to write is named: give --out PATH")
    tokenizer, out = load_tokenizer(options.path), Path(options.out)
    write = {"huggingface": write_huggingface, "tiktoken": write_tiktoken, "gpt2": write_gpt2}[options.format]
    paths = [out / VOCABULARY_NAME, out / MERGES_NAME] if options.format == "gpt2" else [out]
    with progress_line("writing the vocabulary"), folder_for(paths[0]):
        write(tokenizer, out)
    # A .tiktoken file has neither; its reader has to be told.
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
