"""Deduplication beside what a user would pick instead: signatures, near-duplicates end to end, growth, in one run.

    pip install datasketch rensa datatrove text-dedup
    python benchmarks/curation_deduplication.py FOLDER ...
    python benchmarks/curation_deduplication.py --growth 100 1000

The text is that of the files below the folders (by default this machine's documentation, manuals and Python's library),
with planted copies in which words are replaced. Each peer runs in a process of its own on one core, on the same
documents, and peers that are not installed are named and left out. datatrove is given words split at white space,
because its own tokenizers need downloads; it would be slower with them. datatrove and text-dedup read and write files,
as they are used; napkin is measured on a file of JSON lines too.
"""

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from result_files import heading
from turns import BRACKETS, ratio_spread, spread

FOLDERS = ("/usr/share/doc", "/usr/share/man", str(Path(os.__file__).parent))
THRESHOLD, BANDS, ROWS, HASHES = 0.8, 9, 13, 128
PLANTED = 400


def texts_below(folders: list[str], limit: int) -> Iterator[str]:
    """Files of text of 500 to 100,000 characters, up to a number of characters in all."""
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    random.Random(0).shuffle(paths)
    size = 0
    for path in paths:
        try:
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        except (OSError, EOFError, UnicodeDecodeError):
            continue
        if 500 <= len(text) <= 100_000 and "\0" not in text:
            yield text
            size += len(text)
            if size >= limit:
                return


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.lower())
    return set(zip(*(words[i:] for i in range(5)), strict=False))


def planted(texts: list[str]) -> tuple[list[str], list[tuple[int, int, float]]]:
    """The texts and edited copies of some; and pairs (text, copy, true similarity)."""
    draw = random.Random(1)
    every, pairs = list(texts), []
    long = [number for number, text in enumerate(texts) if text.isascii() and len(text.split()) > 400]
    for number in draw.sample(long, min(PLANTED, len(long))):
        parts = re.split(r"(\s+)", texts[number])
        rate = draw.uniform(0.002, 0.08)
        copy = "".join("changed" if part.strip() and draw.random() < rate else part for part in parts)
        a, b = shingles(texts[number]), shingles(copy)
        pairs.append((number, len(every), len(a & b) / len(a | b)))
        every.append(copy)
    return every, pairs


# Each runs in a process of its own: reads documents from a file of JSON lines, prints a line of JSON.


def documents(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def sign_napkin(path: str) -> Any:
    from napkin.curation.deduplication import MinHash

    texts = documents(path)
    MinHash().signatures(texts[:2])
    return timed(lambda: MinHash(HASHES).signatures(texts))


def sign_datasketch(path: str) -> Any:
    sketch = import_module("datasketch").MinHash

    def sign(text: str) -> None:
        words = text.lower().split()
        sketch(num_perm=HASHES).update_batch([" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)])

    texts = documents(path)
    return timed(lambda: [sign(text) for text in texts])


def sign_rensa(path: str) -> Any:
    sketch = import_module("rensa").RMinHash

    def sign(text: str) -> None:
        words = text.lower().split()
        sketch(num_perm=HASHES, seed=1).update([" ".join(words[i : i + 5]) for i in range(len(words) - 4)])

    texts = documents(path)
    return timed(lambda: [sign(text) for text in texts])


def clusters_napkin(path: str) -> Any:
    from napkin.curation.deduplication import MinHash, near_duplicates

    def texts() -> Iterator[str]:
        with open(path, "rb") as file:
            for line in file:
                yield decoder.decode(line)["text"]

    import msgspec

    decoder = msgspec.json.Decoder(dict[str, str])
    MinHash().signatures(["compiled code is loaded first"])
    near_duplicates(["and here", "and here"])
    found: list[list[int]] = []
    seconds = timed(lambda: found.extend(near_duplicates(texts(), THRESHOLD, memory=2**26)))
    return {**seconds, "clusters": found}


def clusters_datatrove(path: str) -> Any:
    executor = import_module("datatrove.executor").LocalPipelineExecutor
    dedup = import_module("datatrove.pipeline.dedup.minhash")
    read = import_module("datatrove.pipeline.readers").JsonlReader
    write = import_module("datatrove.pipeline.writers.jsonl").JsonlWriter

    class Words:
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

    # Its own tokenizers need downloads, and are asked for when a stage is made.
    vars(dedup)["load_word_tokenizer"] = lambda language: Words()
    folder = Path(path).parent / "datatrove"
    config = dedup.MinhashConfig(n_grams=5, num_buckets=BANDS, hashes_per_bucket=ROWS)

    def run() -> None:
        reader = read(str(Path(path).parent), glob_pattern=Path(path).name)
        signing = dedup.MinhashDedupSignature(str(folder / "signatures"), config)
        stages = [
            ([reader, signing], 1),
            ([dedup.MinhashDedupBuckets(str(folder / "signatures"), str(folder / "buckets"), config=config)], BANDS),
            ([dedup.MinhashDedupCluster(str(folder / "buckets"), str(folder / "remove"), config=config)], 1),
            ([reader, dedup.MinhashDedupFilter(str(folder / "remove")), write(str(folder / "kept"))], 1),
        ]
        for number, (stage, tasks) in enumerate(stages):
            logs = str(folder / f"logs{number}")
            executor(stage, tasks=tasks, workers=1, logging_dir=logs).run()

    result = timed(run)
    kept = sum(gzip.decompress(each.read_bytes()).count(b"\n") for each in (folder / "kept").glob("*.gz"))
    return {**result, "kept": kept}


def clusters_text_dedup(path: str) -> Any:
    import_module("text_dedup")
    folder = Path(path).parent / "text-dedup"
    command = [sys.executable, "-m", "text_dedup.minhash", "--path", "json", "--data_files", path, "--split", "train"]
    command += ["--column", "text", "--output", str(folder), "--cache_dir", str(folder) + "-cache", "--num_perm"]
    command += [str(HASHES), "--ngram", "5", "--b", str(BANDS), "--r", str(ROWS), "--threshold", str(THRESHOLD)]
    command += ["--num_proc", "1", "--min_length", "1", "--batch_size", "1000"]
    result = timed(lambda: subprocess.run(command, check=True, capture_output=True, env=os.environ))
    return {**result, "kept": len(import_module("datasets").load_from_disk(str(folder)))}


def stages_napkin(path: str) -> Any:
    """Seconds of each stage on one shard, in 64 MiB: summarize, decide and apply."""
    from napkin.curation import CorpusStage, Record, make_stage

    records = [Record(f"in#{number}", text) for number, text in enumerate(documents(path))]

    def run(stage: Any, folder: Path) -> None:
        folder.mkdir()
        stage.summarize(records, folder / "summary")
        stage.decide([folder / "summary"], [folder / "decisions"], folder, 2**26)
        for _ in stage.apply([Record(each.identity, each.text) for each in records], folder / "decisions"):
            pass

    found = {}
    for name in ("duplicates", "near-duplicates", "duplicate-lines", "duplicate-substrings"):
        stage = make_stage(name, {})
        assert isinstance(stage, CorpusStage)
        # Once for the compiled code.
        run(stage, Path(path).parent / f"first {name}")
        found[name] = timed(lambda stage=stage, name=name: run(stage, Path(path).parent / name))["seconds"]
    return found


def grow(megabytes: str) -> Any:
    """Generated documents of 8 KB, one in ten an edited copy."""
    from napkin.curation.deduplication import near_duplicates

    draw = random.Random(2)
    sentences = [" ".join(f"w{draw.randrange(50_000)}" for _ in range(25)) for _ in range(20_000)]

    def texts() -> Iterator[str]:
        text, size = "", 0
        while size < int(megabytes) * 10**6:
            copied = text and draw.random() < 0.1
            text = text.replace(" w1", " w2", 3) if copied else " ".join(draw.choices(sentences, k=50))
            size += len(text)
            yield text

    near_duplicates(["loaded", "first"])
    return timed(lambda: near_duplicates(texts(), THRESHOLD, memory=2**26))


def timed(run: Callable[[], Any]) -> dict[str, Any]:
    import resource

    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"seconds": seconds, "peak": peak * 1024}


def measured(function: str, argument: str) -> dict[str, Any] | None:
    """What a function prints in a process of its own; None, with a line, where its package is missing or fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", function, argument]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if child.returncode:
        print(f"{function}: left out: {child.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(child.stdout.splitlines()[-1])


def rounds_of(function: str, argument: str, rounds: int) -> list[dict[str, Any]]:
    """The same several times; nothing where it is left out."""
    found: list[dict[str, Any]] = []
    while len(found) < rounds and (each := measured(function, argument)) is not None:
        found.append(each)
    return found


def seconds_in(found: list[dict[str, Any]]) -> list[float]:
    return [each["seconds"] for each in found]


def most_in(found: list[dict[str, Any]]) -> int:
    """The most bytes of memory of all rounds."""
    return max(each["peak"] for each in found)


def planned_and_found(clusters: list[list[int]], pairs: list[tuple[int, int, float]]) -> Iterator[str]:
    """Planted pairs by their true similarity: how many should be found by the curve, and how many are."""
    from napkin.curation.deduplication import Banding

    banding = Banding(BANDS, ROWS)
    cluster_of = {member: number for number, cluster in enumerate(clusters) for member in cluster}
    found = np.array([cluster_of.get(a, -1) == cluster_of.get(b, -2) for a, b, _ in pairs])
    truth = np.array([similarity for _, _, similarity in pairs])
    planned = np.asarray(banding.probability(truth))
    yield "\n| true similarity | pairs | found | planned, 95% |\n|---|---:|---:|---:|"
    for low, high in ((0, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.01), (0, 1.01)):
        inside = (truth >= low) & (truth < high)
        spread = 1.96 * np.sqrt((planned * (1 - planned))[inside].sum())
        row = [f"{low} to {min(high, 1)}", inside.sum(), found[inside].sum()]
        yield f"| {' | '.join(map(str, row))} | {planned[inside].sum():.1f} ± {spread:.1f} |"
    right = truth >= THRESHOLD
    yield f"\nrecall {found[right].mean():.3f} (planned {planned[right].mean():.3f})"
    yield f"precision {(found & right).sum() / found.sum():.3f} (planned {planned[right].sum() / planned.sum():.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--megabytes", type=float, default=10, help="of real text for the comparison")
    parser.add_argument("--growth", nargs="*", default=[], help="megabytes of generated text instead: 100 1000 10000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(globals()[options.child[0]](options.child[1])))
        return
    heading("Deduplication beside its peers, one core", BRACKETS)
    if options.growth:
        print("| generated MB | s | MB/s | peak MB |\n|---:|---:|---:|---:|")
        for megabytes in options.growth:
            found = rounds_of("grow", megabytes, options.rounds)
            if found:
                speeds = [float(megabytes) / each["seconds"] for each in found]
                print(
                    f"| {megabytes} | {spread(seconds_in(found))} | {spread(speeds, '{:.0f}'.format)} | "
                    f"{most_in(found) / 1e6:.0f} |",
                    flush=True,
                )
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(list(options.folders), int(options.megabytes * 1e6), Path(folder), options.rounds)


def compare(folders: list[str], size: int, folder: Path, rounds: int) -> None:
    texts, pairs = planted(list(texts_below(folders, size)))
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": t, "id": str(n)}) + "\n" for n, t in enumerate(texts)), "utf-8")
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {megabytes:.1f} MB; {HASHES} hashes, 5-grams of words, {BANDS} bands of {ROWS}\n")
    print("| what | who | s | MB/s | peak MB | napkin is |\n|---|---|---:|---:|---:|---:|")
    clusters: list[list[int]] = []
    for what, names in (
        ("sign", ("napkin", "datasketch", "rensa")),
        ("clusters", ("napkin", "datatrove", "text_dedup")),
    ):
        own: list[float] = []
        for name in names:
            found = rounds_of(f"{what}_{name}", str(path), rounds)
            if not found:
                continue
            result, seconds = found[0], seconds_in(found)
            own = own or seconds
            clusters = result.get("clusters", clusters)
            row = [what, name, spread(seconds), spread([megabytes / each for each in seconds], "{:.1f}".format)]
            row += [f"{most_in(found) / 1e6:.0f}", f"{ratio_spread(seconds, own, '{:.1f}'.format)} ×"]
            print(f"| {' | '.join(row)} |", flush=True)
            if "kept" in result:
                gone = len(texts) - result["kept"]
                print(f"  ({name} drops {gone} documents, napkin {sum(len(each) - 1 for each in clusters)})")
    for line in planned_and_found(clusters, pairs):
        print(line)
    print("\n| stage | s | MB/s |\n|---|---:|---:|")
    stages = rounds_of("stages_napkin", str(path), rounds)
    for stage in stages[0] if stages else ():
        seconds = [each[stage] for each in stages]
        print(f"| {stage} | {spread(seconds)} | {spread([megabytes / each for each in seconds], '{:.0f}'.format)} |")


if __name__ == "__main__":
    main()
