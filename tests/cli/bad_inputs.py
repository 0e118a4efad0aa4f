"""Bad inputs for every command: each option and each positional argument, with values that are wrong in every way."""

import functools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from napkin.cli import COMMANDS
from napkin.cli.completion import words_of_commands

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\u2066"
VALUES = {
    "text": "abc",
    "empty": "",
    "space": " ",
    "missing file": "missing/file",
    "folder": "docs",
    "empty file": "empty.txt",
    "binary file": "binary.bin",
    "text file": "one.txt",
    "huge integer": "9" * 40,
    "large integer": "1000000000000",
    "negative": "-7",
    "zero": "0",
    "fraction": "0.5",
    "nan": "nan",
    "infinity": "inf",
    "exponent": "1e999",
    "long": "x" * 100_000,
    "escapes": ESCAPES,
    "line breaks": "a\nb\r\nc",
    "unicode": "日本語 🦊 Ⅷ ²",
    "digits of another script": "١٢٣",
    "braces": "{0} %s %(x)s [red]x[/red] :smile: $(touch made) `touch made`",
    "path outside": "../../../../etc/passwd",
    "device": "/dev/null",
    "lone surrogate": "\udce9",
    "null": "a\0b",
    "none": "None",
    "comma": "1,2",
    "underscore": "1_000",
}
# A command line that is right, to which one wrong thing is done. Words in capitals are its positional arguments.
BASES = {
    "recipe": "",
    "plan": "tiny.toml",
    "fit": "--on T4 --context-length 64 --vocab-size 256",
    "count": "tiny.toml",
    # An empty file is a recipe of defaults, which would train for minutes.
    "train": "tiny.toml --run new --training.steps 2 --training.batch-size 4 --model.d-model 16 --model.n-layers 1 "
    "--model.n-heads 2 --model.context-length 16",
    "sweep": "tiny.toml --optimizer.learning-rate 1e-3,3e-3 --plan",
    "ladder": "tiny.toml --seconds 30 --on T4 --levels 2 --sizes 1",
    "mup": "tiny.toml --widths 16,32 --plan",
    "budget": "tiny.toml --flops 1e12 --on T4 --law missing.json",
    "resume": "runs/tiny",
    "launch": "tiny.toml --run new --nodes 1 --gpus-per-node 2",
    "evaluate": "runs/tiny",
    "generate": "runs/tiny --tokens 2",
    "export": "runs/tiny --out new",
    "report": "runs/tiny",
    "runs": "runs",
    "contamination": "task.jsonl --texts one.txt",
    "law fit": "example --flops 1e23",
    "law predict": "example --flops 1e23",
    "law compare": "example",
    "stacks": "megatron",
    "hardware": "H100",
    "formats": "1",
    "notes check": "one.txt",
    "diff": "tiny.toml tiny.toml --on H100",
    "check": "missing.py --ranks 1",
    "mcp": "--wrong",
    "rehearse": "missing.py --wrong",
    "completion": "bash",
    "tokenizer train": "one.txt --out new.json --vocab-size 280",
    "tokenizer encode": "one.txt --tokenizer one/tokenizer.json --out new",
    "tokenizer compare": "one.txt --vocab-size 280",
    "tokenizer show": "one/tokenizer.json",
    "tokenizer import": "missing.json --out new.json",
    "tokenizer export": "one/tokenizer.json --out new.json",
    "data why": "one.txt#1 --in missing",
    "data plan": "one.txt",
    "data banding": "--threshold 0.8",
    "data reconcile": "missing --plan one.txt",
    "data samples": "missing --out new.html",
    "data chat": "chats.jsonl --tokenizer one/tokenizer.json",
    "data train-classifier": "--positive one.txt --negative one.txt --out new.model",
    # These measure or train where the input is right: each has a wrong option beside.
    "demo": "--folder one.txt/x --wrong",
    "speedrun": "--out one.txt/x --wrong",
    "data run": "tiny.toml --out new --wrong",
    "data train-languages": "missing --out new",
    "data language": "one.txt --out new --wrong",
    "data length": "one.txt --out new --wrong",
    "data near-duplicates": "one.txt --out new --wrong",
    "doctor": "--wrong",
    "calibrate": "--device tpu",
    "profile": "tiny.toml --wrong",
    # Without a key, nothing is listened on that others reach.
    "serve": "runs/tiny --host 0.0.0.0",
    "chat": "runs/tiny --wrong",
    "studio": "--wrong",
    "bench": "swiglu --shapes tokens=8,d_ff=8 --seconds 0.001",
    "autotune": "tiny.toml --wrong",
    "tune preference": "--tuning.start runs/tiny --data.train missing.jsonl --run new --wrong",
    "tune reward-model": "--tuning.start runs/tiny --data.train missing.jsonl --run new --wrong",
    "tune demo": "--folder one.txt/x --wrong",
    "tune distill": "--tuning.start runs/tiny --data.train missing.jsonl --distillation.teacher runs/tiny --run new "
    "--wrong",
    "tune teach": "new.teacher --teacher runs/tiny --start runs/tiny --data.train missing.jsonl --wrong",
    "tune rl": "--tuning.start runs/tiny --run new --wrong",
    "tune sft": "--tuning.start runs/tiny --data.train missing.jsonl --run new --wrong",
    "bench-serve": "--wrong",
    "quantize": "runs/tiny --wrong",
    "prune": "runs/tiny --wrong",
}
TRIES = 60
assert {name.partition(" ")[0] for name in BASES} == set(COMMANDS)


class Try(NamedTuple):
    """A command line, and what is wrong with it."""

    arguments: list[str]
    what: str


def bad_inputs(command: str, n: int = TRIES, seed: int = 0) -> list[Try]:
    """`n` wrong command lines, the same for the same seed: positional arguments first, then options in turn."""
    words, base = command.split(), BASES[command].split()
    named = [name for name in _words()[command] if name.startswith("--")]
    options = [name for name in named if name not in ("--help", "--json") and "no-" not in name]
    random.Random(seed).shuffle(options)
    found = {
        str(tried.arguments): tried
        for tried in (*_without_a_value(words, base, options), *_of_positionals(words, base))
    }
    values = list(VALUES.items())
    # Each option gets other values, and each value other options.
    for number in range(2 * len(options) * len(values)):
        if len(found) >= n:
            break
        option = options[number % len(options)]
        kind, value = values[(number * 7 + number // len(options)) % len(values)]
        form = [f"{option}={value}"] if number % 3 == 0 or value.startswith("-") else [option, value]
        tried = Try([*words, *base, *form], f"{option}: {kind}")
        found.setdefault(str(tried.arguments), tried)
    # A command with few options.
    for kind, value in values:
        for tried in (
            Try([*words, *base, f"--{value}"], f"unknown option: {kind}"),
            Try([*words, *base, value, value], f"too many: {kind}"),
            Try([*words, *base, f"--json={value}"], f"a switch with a value: {kind}"),
        ):
            found.setdefault(str(tried.arguments), tried)
    return list(found.values())[:n]


@functools.cache
def _words() -> dict[str, dict[str, tuple[str, ...]]]:
    return words_of_commands()


def _without_a_value(words: list[str], base: list[str], options: list[str]) -> Iterator[Try]:
    yield Try([*words, *base, "--no-such-option"], "unknown option")
    yield Try([*words, *base, "--no-such-option=3"], "unknown option with a value")
    yield Try([*words, *base, "-z"], "unknown letter")
    yield Try([*words, *base, "one", "two", "three"], "too many arguments")
    for option in options[:2]:
        yield Try([*words, *base, option], f"{option} without a value")


def _of_positionals(words: list[str], base: list[str]) -> Iterator[Try]:
    if not base or base[0].startswith("-"):
        return
    for kind, value in VALUES.items():
        yield Try([*words, value, *base[1:]], f"argument: {kind}")


def make_files(folder: Path) -> None:
    """The files that the values name."""
    (folder / "empty.txt").write_bytes(b"")
    (folder / "binary.bin").write_bytes(bytes(random.Random(1).randbytes(4096)))
    sys.stdout.flush()
