"""`napkin tokenizer`: a group of commands, one file each."""

from napkin.cli.commands import run_group

COMMANDS = {
    "train": "train a tokenizer: byte-level BPE, words, characters or bytes",
    "encode": "encode text into token files",
    "compare": "show how each kind of tokenizer encodes a text",
    "show": "inspect a tokenizer: longest tokens, merges, how a word is built up",
    "import": "read a BPE vocabulary of Hugging Face, tiktoken or GPT-2",
    "export": "write a BPE tokenizer for one of these",
}


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    return run_group(__name__, COMMANDS, arguments)
