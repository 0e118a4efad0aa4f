"""Memory and seconds of starting to tune on pairs, by how many there are: `python benchmarks/alignment_pairs.py`.

Pairs of a JSONL file become tokens, get log-probabilities of a reference (made up here: no model runs) and are read in
batches that are spread over the file. The first start encodes them; the second finds them in the cache; "in lists" is
the second with all examples held in memory, as a list of Python objects has them. Each is a process of its own. Memory
is the most that the process itself holds, over what it had when all was imported and the chat template's process had
started. Mapped pages of the files that were read are beside it: the system takes them back when memory is short.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from napkin.chats.chat_encoder import ChatEncoder
from napkin.chats.chat_format import Message
from napkin.files import cache_folder
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tuning.example_file import example_file_of
from napkin.tuning.packing import chunks_of
from napkin.tuning.preference_method import UnpairedExamples
from napkin.tuning.reference_scores import ReferencedExamples, ReferenceKey, read_reference_scores, reference_writer
from napkin.units import format_bytes, format_seconds
from result_files import heading, write_result
from turns import BRACKETS, spread

Start = Literal["first", "second", "second, in lists"]
KEY = ReferenceKey("0" * 64, "1" * 64, "fp32")
BATCHES, BATCH = 200, 32


def main() -> None:
    """Print the table, and write it to results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000, help="and ten times as many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objective", choices=["dpo", "kto"], default="dpo")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        path, start, objective = options.child
        print(json.dumps(started(Path(path), start, objective)))
        return
    head = heading("Starting to tune on pairs", f"{BRACKETS} Of memory, the most of all rounds.")
    lines = [f"| pairs, {options.objective} | start | seconds | memory | mapped | files |", "|--:|---|--:|--:|--:|--:|"]
    with tempfile.TemporaryDirectory() as folder:
        for n in (options.pairs, 10 * options.pairs):
            path = Path(folder) / f"{n}.jsonl"
            write_pairs(path, n)
            found: dict[str, list[list[float]]] = {start: [] for start in get_args(Start)}
            for turn in range(options.rounds):
                # Each round has a cache of its own: its first start encodes again.
                environment = {**os.environ, "NAPKIN_CACHE_DIR": f"{folder}/{n}-{turn}"}
                for start in get_args(Start):
                    command = [sys.executable, __file__, "--child", str(path), start, options.objective]
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
                    found[start].append(json.loads(done.stdout.splitlines()[-1]))
            for start, rounds in found.items():
                seconds, *sizes = zip(*rounds, strict=True)
                cells = f"{n:,}", start, spread(seconds, format_seconds), *(format_bytes(max(each)) for each in sizes)
                lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    write_result("alignment-pairs", [*head, *lines])


def write_pairs(path: Path, n: int) -> None:
    """Pairs of some 300 characters in the middle."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(500)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    with path.open("w") as file:
        for _ in range(n):
            file.write(json.dumps({"prompt": text(30), "chosen": text(40), "rejected": text(40)}) + "\n")


def started(path: Path, start: Start, objective: str) -> tuple[float, int, int, int]:
    """Seconds of a start; of it and some batches the most memory, and mapped pages; the bytes of the files."""
    encoder = ChatEncoder(ByteTokenizer(["<|endoftext|>"]))
    encoder.answers([([Message("user", "a")], ["b"])])
    reference = cache_folder() / f"{path.stem}.safetensors"
    memory = [resident("RssAnon")]
    mapped, began = resident("RssFile"), time.perf_counter()

    def look(n: int = 0) -> None:
        if n % 100 == 0:
            memory.append(resident("RssAnon"))

    kind = "judged answers" if objective == "kto" else "pairs"
    file = example_file_of(path, kind, encoder, max_length=4096, progress=look)
    examples = ReferencedExamples(UnpairedExamples(file) if objective == "kto" else file)
    if start == "first":
        with reference_writer(reference, KEY, examples.n_sequences) as writer:
            for chunk in chunks_of(examples):
                writer.add([np.zeros(sequence.n_trained, np.float32) for example in chunk for sequence in example])
                look()
    examples.scores, problem = read_reference_scores(reference, KEY, examples.n_sequences)
    assert not problem, problem
    seconds = time.perf_counter() - began
    held = list(examples) if start == "second, in lists" else examples
    draw = random.Random(1)
    for _ in range(BATCHES):
        batch = [held[draw.randrange(len(held))] for _ in range(BATCH)]
        assert all(sequence.n_trained for example in batch for sequence in example)
        look()
    size = sum(each.stat().st_size for each in (file.path, Path(f"{file.path}.mask"), reference))
    return seconds, max(memory) - memory[0], max(resident("RssFile") - mapped, 0), size


def resident(name: str) -> int:
    """A figure of this process in bytes."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
