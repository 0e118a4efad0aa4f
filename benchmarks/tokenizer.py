"""Byte-level BPE beside what a user would pick instead: encoding, training, prompts and hostile text, in one run.

    pip install tiktoken tokenizers gigatoken rustbpe sentencepiece
    python benchmarks/tokenizer.py

Peers that are not installed are left out. All have the same vocabulary of 50,000 merges, trained here, and GPT-2's
pattern; the text is assembled from this machine (tokenizer_text.py). Peers take turns, and the best of the rounds
counts: `wall` by the clock, `CPU` by the processor time of all threads, which a busy machine disturbs less. A first
pass is that of a new encoder, whose cache is empty. Figures are for comparison within a run. For `--sections files`, a
text of any size may be given with `--text`.
"""

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.interchange.gguf import read_gguf_tokenizer
from napkin.tokenizer.interchange.huggingface import write_huggingface
from napkin.tokenizer.numba.encoding import Encoder
from napkin.tokenizer.pre_tokenization import PATTERNS
from result_files import existing, heading, write_result
from tokenizer_text import many_scripts_text, mixed_text
from turns import BRACKETS, ratio_spread, spread

PROMPT = "Write a short story about a robot that can't dance."[:50]
PACKAGES = ("numba", "tiktoken", "tokenizers", "datasets", "gigatoken", "rustbpe", "sentencepiece")
Measured = dict[str, list[tuple[float, float]]]
"""Wall and processor seconds of each round."""

# Each is run in a process of its own, to be told its peak memory and, of prompts, the first call.
TRAIN = {
    "napkin": "from napkin.tokenizer import read_chunks, train_bpe\n"
    "train_bpe(read_chunks([path], ['<|endoftext|>']), 32000, ['<|endoftext|>'], threads=2)",
    "gigatoken": "import gigatoken\ngigatoken.train_bpe(path, 32000, ['<|endoftext|>'])",
    "rustbpe": "import rustbpe\nfrom napkin.tokenizer import PATTERNS\n"
    "texts = open(path).read().split('<|endoftext|>')\n"
    "rustbpe.Tokenizer().train_from_iterator(texts, 32000, pattern=PATTERNS['gpt2'])",
}
# From a file of documents, or a folder of files, to token ids in a file.
FROM_FILES = {
    "napkin tokenizer encode": "import napkin.cli\n"
    "napkin.cli.main(['tokenizer', 'encode', path, '--tokenizer', tokenizer, '--out', out])",
    "tiktoken and NumPy, as nanoGPT": "import json, os, glob\nimport numpy\nfrom tokenizer import tiktoken_encode\n"
    "encode = tiktoken_encode(json.load(open(tokenizer))['merges'])\n"
    "files = sorted(glob.glob(path + '/*')) if os.path.isdir(path) else [path]\n"
    "with open(out, 'wb') as file:\n"
    "    for text in (part for name in files for part in open(name).read().split('<|endoftext|>')):\n"
    "        numpy.array([0, *encode(text)], 'uint16').tofile(file)",
    "datasets and tiktoken": "import json, os, glob\nimport datasets, numpy\nfrom tokenizer import tiktoken_encode\n"
    "merges = json.load(open(tokenizer))['merges']\n"
    "files = sorted(glob.glob(path + '/*')) if os.path.isdir(path) else [path]\n"
    # A function, not a generator: datasets makes the name of its cache from a pickle of what it is given.
    "def rows():\n"
    "    for name in files:\n"
    "        for part in open(name).read().split('<|endoftext|>'):\n"
    "            yield {'text': part}\n"
    "data = datasets.Dataset.from_generator(rows, cache_dir=out + '.cache')\n"
    "encode = tiktoken_encode(merges)\n"
    "data = data.map(lambda row: {'ids': encode(row['text'])}, remove_columns=['text'])\n"
    "with open(out, 'wb') as file:\n"
    "    for row in data:\n"
    "        numpy.array([0, *row['ids']], 'uint16').tofile(file)",
}
NEEDED = {"tiktoken and NumPy, as nanoGPT": ["tiktoken"], "datasets and tiktoken": ["datasets", "tiktoken"]}
SMALL_FILE_CHARACTERS, SMALL_FILES = 2500, 100_000
# Of a longer text, what tokenizers are trained on, and what slower peers encode.
PART_CHARACTERS = 10**8
SECTIONS = ("encoding", "patterns", "characters", "hostile", "prompt", "training", "files")
FIRST_CALL = {
    "napkin": "from napkin.tokenizer.bpe import BPETokenizer\nencode = BPETokenizer(merges).encode",
    "napkin, once it has encoded a long text": "from napkin.tokenizer.bpe import BPETokenizer\n"
    "encode = BPETokenizer(merges).encode\nencode('a long text ' * 10**6)",
    "tiktoken": "from tokenizer import tiktoken_encode\nencode = tiktoken_encode(merges)",
    "gigatoken": "from tokenizer import gigatoken_tokenizer\nencode = gigatoken_tokenizer(merges).encode",
}


def main() -> None:
    """Print the tables, and write them where results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=existing, help="a file of documents to use instead of this machine's mixed text")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    options = parser.parse_args()
    lines = heading("Tokenizers beside their peers", BRACKETS, packages=PACKAGES)
    text = options.text.read_bytes().decode() if options.text else mixed_text(options.megabytes * 10**6)
    scripts = many_scripts_text(options.megabytes * 10**5)
    tokenizer = distinct(train_bpe([text[:PART_CHARACTERS]], 50257, ["<|endoftext|>"], threads=2))
    tables: dict[str, Callable[[], list[str]]] = {
        "encoding": lambda: [
            *encoding_table("mixed text", text, tokenizer, options.rounds),
            *encoding_table("many scripts", scripts, tokenizer, options.rounds),
        ],
        "patterns": lambda: patterns_table(text + scripts),
        "characters": lambda: characters_table(text, scripts, options.rounds),
        "hostile": lambda: hostile_table(tokenizer, options.rounds),
        "prompt": lambda: prompt_table(tokenizer),
        "training": lambda: training_table(text[:PART_CHARACTERS], options.rounds),
        "files": lambda: files_table(text, tokenizer, options.rounds),
    }
    for section in options.sections:
        lines += tables[section]()
    write_result("tokenizer", lines)


def encoding_table(name: str, text: str, tokenizer: BPETokenizer, rounds: int) -> list[str]:
    """Bytes per second; napkin's ids are compared with those of all others."""
    data = text.encode()
    documents = [document.encode() for document in text.split("<|endoftext|>")]
    measured: Measured = {}
    expected = tokenizer.encode_to_numpy(text)
    for number in range(rounds):
        # All from bytes, as they come from a file.
        encode = fresh_encoder(tokenizer)
        ids = note(measured, "napkin, 1 thread, first pass", lambda encode=encode: encode(data))
        assert (ids == expected).all()
        note(measured, "napkin, 1 thread, again", lambda encode=encode: encode(data))
        encode = fresh_encoder(tokenizer, threads=2)
        ids = note(measured, "napkin, 2 threads, first pass", lambda encode=encode: encode(data))
        assert (ids == expected).all()
        if installed("gigatoken"):
            peer = gigatoken_tokenizer(tokenizer.merges)
            ids = note(measured, "gigatoken, 1 thread, first pass", lambda peer=peer: peer.backend.encode(data))
            assert (ids == expected).all()
            note(measured, "gigatoken, 1 thread, again", lambda peer=peer: peer.backend.encode(data))
            peer = gigatoken_tokenizer(tokenizer.merges)
            note(measured, "gigatoken, all threads, first pass", lambda peer=peer: peer.encode_batch(documents))
        if installed("tiktoken") and number == 0:
            encode = tiktoken_encode(tokenizer.merges)
            # All of it at once would need more memory than there may be.
            ids = note(measured, "tiktoken, 1 thread", lambda encode=encode: encode(text))
            assert ids == expected.tolist()
        if installed("tokenizers") and number == 0:
            peer = hugging_face_tokenizer(tokenizer.merges)
            part = text[: len(text) // 20]
            wall, cpu = timed(lambda peer=peer, part=part: peer.encode(part))
            measured["Hugging Face, 1 thread"] = [(20 * wall, 20 * cpu)]
    beyond = sum(byte >= 0x80 for byte in data[:: max(len(data) // 10**6, 1)]) / len(
        data[:: max(len(data) // 10**6, 1)]
    )
    title = f"{name}, {len(data) / 1e6:.0f} MB, {beyond:.1%} of it beyond ASCII; napkin's ids equal to all others'"
    rows = [
        f"| {what} | {speed(data, measured, what, 0)} | {speed(data, measured, what, 1)} | "
        f"{ratio(measured, what, 0)} | {ratio(measured, what, 1)} |"
        for what in measured
    ]
    head = ["| encode | MB/s wall | MB/s CPU | napkin / it, wall | CPU |", "|---|---|---|---|---|"]
    return show("", f"## {title}", "", *head, *rows)


def ratio(measured: Measured, what: str, clock: int) -> str:
    """Its time over napkin's for the same kind of pass."""
    if "again" in what:
        ours = "napkin, 1 thread, again"
    else:
        ours = "napkin, 2 threads, first pass" if "threads" in what else "napkin, 1 thread, first pass"
    theirs = seconds_by(measured, what, clock)
    # Slow peers take part in the first round alone.
    return ratio_spread(theirs, seconds_by(measured, ours, clock)[: len(theirs)])


def seconds_by(measured: Measured, what: str, clock: int) -> list[float]:
    """Seconds of each round, by the wall's clock (0) or the processor's (1)."""
    return [each[clock] for each in measured[what]]


def speed(data: bytes, measured: Measured, what: str, clock: int) -> str:
    """MB/s with its interval."""
    return spread([len(data) / 1e6 / each for each in seconds_by(measured, what, clock)], "{:.1f}".format)


def patterns_table(text: str) -> list[str]:
    """Whether all the text has tiktoken's ids by each of its patterns, by a small vocabulary, and how fast."""
    if not installed("tiktoken"):
        return []
    import tiktoken

    rows = [
        "| pattern | tokens of all the text | equal to tiktoken's | MB/s CPU, 1 thread, first pass | again |",
        "|---|---|---|---|---|",
    ]
    data = text.encode()
    documents = text.split("<|endoftext|>")
    for pattern in ("gpt2", "cl100k", "o200k"):
        tokenizer = distinct(train_bpe([text[: 10**7]], 2000, [], pattern=pattern))
        ranks = {token: i for i, token in enumerate(tokenizer.vocabulary)}
        peer = tiktoken.Encoding("same", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={})
        ids, counts = tokenizer.encode_documents(documents, threads=2)
        ends = counts.cumsum().tolist()
        equal = all(
            ids[end - count : end].tolist() == peer.encode_ordinary(document)
            for document, count, end in zip(documents, counts.tolist(), ends, strict=True)
        )
        encode = fresh_encoder(tokenizer)
        first, again = (len(data) / 1e6 / timed(lambda encode=encode: encode(data))[1] for _ in range(2))
        rows.append(f"| {pattern} | {len(ids):,} | {'yes' if equal else 'NO'} | {first:.1f} | {again:.1f} |")
    return show("", "## The same ids", "", *rows)


def characters_table(text: str, scripts: str, rounds: int) -> list[str]:
    """Bytes per second with a vocabulary of 32,000 tokens on characters that SentencePiece has learned, and its ids."""
    if not installed("sentencepiece"):
        return []
    library = import_module("sentencepiece")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text(text[: 6 * 10**6] + scripts[: 2 * 10**6])
        library.SentencePieceTrainer.train(
            input=f"{folder}/text",
            model_prefix=f"{folder}/model",
            model_type="bpe",
            vocab_size=32000,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=2**14,
            minloglevel=2,
        )
        peer = library.SentencePieceProcessor(model_file=f"{folder}/model.model")
    numbers = range(peer.vocab_size())
    kinds = [(peer.is_unknown, 2), (peer.is_control, 3), (peer.is_byte, 6)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [peer.id_to_piece(i) for i in numbers],
        "tokenizer.ggml.scores": [peer.get_score(i) for i in numbers],
        "tokenizer.ggml.token_type": [next((kind for known, kind in kinds if known(i)), 1) for i in numbers],
    }
    tokenizer = read_gguf_tokenizer(metadata)
    rows = [
        "| on characters, MB/s CPU | napkin, first pass | again | sentencepiece | Hugging Face | napkin / them | ids |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, whole in (("mixed text", text[: 2 * 10**7]), ("many scripts", scripts)):
        documents, measured = whole.split("<|endoftext|>"), Measured()
        ids = tokenizer.encode_documents([])[0]
        for _ in range(rounds):
            # A copy has tables of its own, and an empty cache.
            ours = copy.deepcopy(tokenizer)
            ours.encode_documents(["x" * 2**20])
            ids, _ = note(measured, "first", lambda ours=ours, some=documents: ours.encode_documents(some))
            note(measured, "again", lambda ours=ours, some=documents: ours.encode_documents(some))
        theirs = note(measured, "sentencepiece", lambda some=documents: peer.encode(some, num_threads=1))
        equal = [i for each in theirs for i in each] == ids.tolist()
        size = len(whole.encode()) / 1e6
        other = hugging_face_on_characters(tokenizer)
        part = documents[: max(len(documents) // 20, 1)]
        _, cpu = timed(lambda other=other, part=part: [other.encode(each).ids for each in part])
        speeds = [
            size / statistics.median(seconds_by(measured, what, 1)) for what in ("first", "again", "sentencepiece")
        ]
        speeds.append(len("".join(part).encode()) / 1e6 / cpu)
        faster = " · ".join(f"{speeds[0] / each:.0f} ×" for each in speeds[2:])
        own = [speed(whole.encode(), measured, what, 1) for what in ("first", "again")]
        cells = " | ".join([*own, *(f"{each:.1f}" for each in speeds[2:])])
        rows.append(f"| {name}, {size:.0f} MB | {cells} | {faster} | {'equal' if equal else 'DIFFER'} |")
    return show("", "## Characters with bytes as fallback, as in Llama 2 and Gemma", "", *rows)


def hostile_table(tokenizer: BPETokenizer, rounds: int) -> list[str]:
    """Seconds for a megabyte of what tokenizers dislike, and for four."""
    draw = random.Random(0)
    ascii_ = [chr(i) for i in range(32, 127)]
    kinds: dict[str, Callable[[int], str]] = {
        "one letter": lambda n: "a" * n,
        "spaces": lambda n: " " * n,
        "newlines": lambda n: "\n" * n,
        "English without spaces": lambda n: ("".join(filter(str.isalpha, str(__doc__))) * (n // 100))[:n],
        "random ASCII": lambda n: "".join(draw.choices(ascii_, k=n)),
        "random bytes": lambda n: draw.randbytes(n).decode("utf-8", "replace")[: n // 2],
        "CJK": lambda n: "".join(map(chr, (draw.randint(0x4E00, 0x9FFF) for _ in range(n // 3)))),
    }
    rows = [
        "| hostile text | napkin 1 MB | 4 MB | 4 MB / 1 MB | gigatoken 1 MB | napkin / it |",
        "|---|---|---|---|---|---|",
    ]
    for name, make in kinds.items():
        small, large = make(10**6), make(4 * 10**6)
        measured: Measured = {}
        for _ in range(rounds):
            for which, text in (("small", small), ("large", large)):
                encode = fresh_encoder(tokenizer)
                note(measured, which, lambda encode=encode, text=text: encode(text.encode()))
            if installed("gigatoken"):
                peer = gigatoken_tokenizer(tokenizer.merges)
                note(measured, "peer", lambda peer=peer, small=small: peer.backend.encode(small.encode()))
        # Processor time: these are short, and what else the machine does would decide.
        found = {which: seconds_by(measured, which, 1) for which in measured}
        cells = [*(spread(found[which], "{:.4f}".format) for which in ("small", "large"))]
        cells.append(ratio_spread(found["large"], found["small"], "{:.1f}".format))
        peer = found.get("peer")
        cells += [spread(peer, "{:.4f}".format), ratio_spread(peer, found["small"])] if peer else ["-", "-"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return show("", "## Hostile text, first pass, CPU seconds", "", *rows)


def prompt_table(tokenizer: BPETokenizer) -> list[str]:
    """A prompt of 50 bytes: microseconds once warm, milliseconds for the first in a new process."""
    script = (
        "import json, sys, time, timeit\nmerges = [tuple(pair) for pair in json.load(open(sys.argv[1]))]\n{make}\n"
        f"start = time.perf_counter(); encode({PROMPT!r}); first = time.perf_counter() - start\n"
        f"print(first, min(timeit.repeat(lambda: encode({PROMPT!r}), number=2000, repeat=20)) / 2000)"
    )
    rows = ["| 50-byte prompt | first call | warm |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "merges.json"
        path.write_text(json.dumps(tokenizer.merges))
        for name, make in FIRST_CALL.items():
            if name.startswith("napkin") or installed(name):
                runs = [in_new_process(script.format(make=make), str(path)).split() for _ in range(6)]
                first, warm = ([scale * float(run[i]) for run in runs] for i, scale in ((0, 1e3), (1, 1e6)))
                rows.append(f"| {name} | {spread(first)} ms | {spread(warm)} µs |")
    return show("", "## A prompt", "", *rows)


def training_table(text: str, rounds: int) -> list[str]:
    """Seconds and peak memory of learning 32,000 tokens, each in a new process."""
    script = (
        "import resource, sys, time\npath = sys.argv[1]\nstart = time.perf_counter()\n{train}\n"
        "print(time.perf_counter() - start, time.process_time(), "
        "next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    measured: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text)
        for number in range(rounds):
            for name, train in TRAIN.items():
                if name == "napkin" or (installed(name) and (number == 0 or name == "gigatoken")):
                    output = in_new_process(script.format(train=train), str(path)).split()[-3:]
                    measured.setdefault(name, []).append([float(value) for value in output])
    rows = ["| train 32,000 | wall | CPU | peak memory | wall / napkin | CPU / napkin |", "|---|---|---|---|---|---|"]
    ours = list(zip(*measured["napkin"], strict=True))
    for name, runs in measured.items():
        theirs = list(zip(*runs, strict=True))
        cells = [f"{spread(each, '{:.1f}'.format)} s" for each in theirs[:2]]
        cells.append(f"{min(theirs[2]) / 1e3:.0f} MB")
        cells += [ratio_spread(theirs[i], ours[i][: len(runs)]) for i in range(2)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return show("", "## Training, imports included", "", *rows)


def files_table(text: str, tokenizer: BPETokenizer, rounds: int) -> list[str]:
    """Bytes per second and peak memory from files to tokens in a file, each in a new process."""
    script = (
        "import resource, sys, time\npath, tokenizer, out = sys.argv[1:]\nstart = time.perf_counter()\n{encode}\n"
        "print(time.perf_counter() - start, time.process_time(), "
        "next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    rows = [
        "| from files to tokens | MB | MB/s wall | MB/s CPU | peak memory | napkin / it, wall |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_separator = BPETokenizer(tokenizer.merges, ["<|endoftext|>"], tokenizer.pattern)
        with_separator.save(folder / "tokenizer.json")
        for kind, make in (("one file", as_one_file), ("files", as_small_files)):
            ours: list[float] = []
            for encoder, encode in FROM_FILES.items():
                if not all(map(installed, NEEDED.get(encoder, []))):
                    continue
                path = folder / f"{kind} {encoder}"
                n_files, size = make(text if encoder not in NEEDED else text[:PART_CHARACTERS], path)
                runs: list[list[float]] = []
                for turn in range(rounds if encoder not in NEEDED else 1):
                    out = folder / f"{len(rows)}-{turn}"
                    arguments = [str(each) for each in (path, folder / "tokenizer.json", out)]
                    output = in_new_process(script.format(encode=encode), *arguments).split()[-3:]
                    runs.append([float(value) for value in output])
                walls, cpus = ([run[i] / size * 1e6 for run in runs] for i in range(2))
                ours = ours or walls
                cells = [spread([1 / each for each in taken], "{:.1f}".format) for taken in (walls, cpus)]
                cells += [f"{min(run[2] for run in runs) / 1e3:.0f} MB", ratio_spread(walls, ours[: len(walls)])]
                named = f"{encoder}, {n_files:,} file{'s'[: n_files - 1]}"
                rows.append(f"| {named} | {size / 1e6:.0f} | {' | '.join(cells)} |")
    return show("", "## From files to tokens, imports included", "", *rows)


def as_one_file(text: str, path: Path) -> tuple[int, int]:
    """Write a file; returns that it is one, and its bytes."""
    return 1, path.write_bytes(text.encode())


def as_small_files(text: str, folder: Path) -> tuple[int, int]:
    """Write a folder of files; returns their number and bytes."""
    folder.mkdir()
    starts = range(0, len(text), SMALL_FILE_CHARACTERS)[:SMALL_FILES]
    sizes = [
        (folder / f"{number:07}.txt").write_bytes(text[start : start + SMALL_FILE_CHARACTERS].encode())
        for number, start in enumerate(starts)
    ]
    return len(sizes), sum(sizes)


def fresh_encoder(tokenizer: BPETokenizer, threads: int = 1) -> Callable[[bytes], Any]:
    """napkin's encoder with its tables made and its cache empty."""
    encoder = Encoder(tokenizer.merges, tokenizer.pattern)
    encoder.encode(b"")
    return lambda data: encoder.encode(data, dtype="uint16", threads=threads)[0]


def note(measured: Measured, what: str, work: Callable[[], Any]) -> Any:
    """Do the work and keep its time."""
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    taken = time.perf_counter() - start, time.process_time() - cpu
    measured.setdefault(what, []).append(taken)
    return result


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds."""
    measured: Measured = {}
    note(measured, "", work)
    return measured[""][0]


def in_new_process(script: str, *arguments: str) -> str:
    """What a script prints."""
    paths = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def show(*lines: str) -> list[str]:
    """Print lines now."""
    print("\n".join(lines), flush=True)
    return list(lines)


def installed(name: str) -> str:
    """The version of a package; empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


# The peers, with the vocabulary of napkin's merges.


def distinct(tokenizer: BPETokenizer) -> BPETokenizer:
    """The tokenizer up to the first token whose bytes another has: what the peers' formats can hold."""
    seen: set[bytes] = set()
    for number, token in enumerate(tokenizer.vocabulary[: 256 + len(tokenizer.merges)]):
        if token in seen:
            return BPETokenizer(tokenizer.merges[: number - 256], pattern=tokenizer.pattern)
        seen.add(token)
    return BPETokenizer(tokenizer.merges, pattern=tokenizer.pattern)


def tiktoken_encode(merges: list[tuple[int, int]]) -> Callable[[str], list[int]]:
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {token: i for i, token in enumerate(BPETokenizer(merges).vocabulary)}
    return tiktoken.Encoding("same", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


def hugging_face_tokenizer(merges: list[tuple[int, int]]) -> Any:
    hugging_face = import_module("tokenizers")

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    names = ["".join(letter[byte] for byte in token) for token in BPETokenizer(merges).vocabulary]
    model = hugging_face.models.BPE(
        {name: i for i, name in enumerate(names)}, [(names[a], names[b]) for a, b in merges]
    )
    tokenizer = hugging_face.Tokenizer(model)
    tokenizer.pre_tokenizer = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def hugging_face_on_characters(tokenizer: Tokenizer) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(tokenizer, f"{folder}/tokenizer.json")
        return import_module("tokenizers").Tokenizer.from_file(f"{folder}/tokenizer.json")


def gigatoken_tokenizer(merges: list[tuple[int, int]]) -> Any:
    return import_module("gigatoken").Tokenizer.from_json(hugging_face_tokenizer(merges).to_str())


if __name__ == "__main__":
    main()
