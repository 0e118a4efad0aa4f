"""`napkin tokenizer`, a group of commands."""

from napkin.cli.commands import Command, Group

COMMANDS = {
    "train": Command("train a tokenizer: byte-level BPE, words, characters or bytes", "train"),
    "encode": Command("encode text into token files", "encode"),
    "compare": Command("show how each kind of tokenizer encodes a text", "compare"),
    "show": Command("inspect a tokenizer: longest tokens, merges, how a word is built up", "show"),
    "import": Command("read a BPE vocabulary of Hugging Face, tiktoken or GPT-2", "exchange:import_command"),
    "export": Command("write a BPE tokenizer for one of these", "exchange:export_command"),
}

main = Group(__name__, COMMANDS)
