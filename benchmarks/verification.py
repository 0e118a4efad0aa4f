"""What verifying tokens costs: the start of a run on 1 MB and on 1 TB, and steps with and without verification.

The terabyte is a sparse file of zeros. Steps are those of a small model on 256 MB of random bytes that nothing has
verified yet, so nearly every window needs another block, the worst case; in turns of six, medians over the turns.

    python benchmarks/verification.py
"""

import os
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from napkin.data.batches import Batches, BatchFetcher, Prefetcher
from napkin.data.token_file import BLOCK_BYTES, SEPARATOR, BlockChecksums, Sidecar, TokenFile, sidecar_path
from napkin.model.config import ModelConfig
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.train_step.step import TrainState, build_train_state
from result_files import heading, no_options
from turns import BRACKETS, ratio_spread, spread

TURNS, STEPS_PER_TURN = 4, 6
MODEL = ModelConfig(8192, 128, d_model=128, n_layers=2)


def main() -> None:
    """Print the seconds of a start, and of the steps."""
    no_options(__doc__)
    heading("What verifying tokens costs", BRACKETS)
    with tempfile.TemporaryDirectory() as folder:
        for name, size_bytes in (("1 MB", 10**6), ("1 TB", 10**12)):
            path = zeros(Path(folder) / name, size_bytes)
            seconds = spread([start_seconds(path) for _ in range(6)], "{:.3f}".format)
            print(f"start on {name}: {seconds} s, sidecar {sidecar_path(path).stat().st_size / 1e6:.3f} MB")
        found = step_seconds(random_bytes(Path(folder) / "random", 2**28))
        print("| batches | waiting, µs | step, ms | of the step |\n|---|---|---|---|")
        for name, steps in found.items():
            waited, whole = zip(*steps, strict=True)
            cells = [spread([1e6 * each for each in waited], "{:.0f}".format)]
            cells += [
                spread([1e3 * each for each in whole], "{:.1f}".format),
                ratio_spread(waited, whole, "{:.2%}".format),
            ]
            print(f"| {name} | {' | '.join(cells)} |")


def start_seconds(path: Path) -> float:
    """Seconds until the first batch is there."""
    begin = time.perf_counter()
    token_file = TokenFile.open(path)
    assert token_file.verify_on_read()
    _ = Batches(token_file, context_length=1024, batch_size=8, seed=0)[0]
    return time.perf_counter() - begin


def step_seconds(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds of waiting for the batch and of the whole step, of each step."""
    resolved = resolve(Recipe(model=MODEL, training=TrainingConfig(batch_size=8)), ThisMachine())
    assert resolved.recipe.training.threads is not None
    torch.set_num_threads(resolved.recipe.training.threads)
    train_state, device_type = build_train_state(resolved), resolved.precision.device_type
    fetchers: dict[str, BatchFetcher] = {}
    for verifies in (False, True):
        for kind in (BatchFetcher, Prefetcher):
            token_file = TokenFile.open(path)
            if verifies:
                token_file.verify_on_read()
            batches = Batches(token_file, context_length=MODEL.context_length, batch_size=8, seed=0)
            name = f"{'verified' if verifies else 'not verified'}{', ahead' if kind is Prefetcher else ''}"
            fetchers[name] = kind(batches, device_type)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in fetchers}
    for turn in range(TURNS):
        for name, fetcher in fetchers.items():
            steps = [one_step(train_state, fetcher, turn * STEPS_PER_TURN + n) for n in range(STEPS_PER_TURN)]
            fetcher.close()
            # The first of a turn fills the queue; the first turn reads the file from the disk.
            taken[name] += steps[1:] if turn else []
    return taken


def one_step(train_state: TrainState, fetcher: BatchFetcher, number: int) -> tuple[float, float]:
    """Take a step; returns its seconds of waiting, and all."""
    begin = time.perf_counter()
    batch = fetcher[number]
    waited = time.perf_counter() - begin
    loss, _ = train_state.step(number, *batch)
    loss.item()
    return waited, time.perf_counter() - begin


def zeros(path: Path, size_bytes: int) -> Path:
    """A sparse token file of zeros."""
    path.touch()
    os.truncate(path, size_bytes)
    n_whole, rest = divmod(size_bytes, BLOCK_BYTES)
    whole, last = (sha256(bytes(n)).hexdigest()[:16] for n in (BLOCK_BYTES, rest))
    return describe(path, n_whole * whole + (last if rest else ""))


def random_bytes(path: Path, size_bytes: int) -> Path:
    """A token file of random bytes."""
    ids = np.random.default_rng(0).integers(0, 256, size_bytes // 2, np.uint16)
    ids.tofile(path)
    checksums = BlockChecksums()
    checksums.update(ids.data)
    return describe(path, checksums.hexdigest())


def describe(path: Path, blocks: str) -> Path:
    """Write the sidecar of a token file."""
    tokenizer = ByteTokenizer([SEPARATOR])
    n_tokens = path.stat().st_size // 2
    sidecar = Sidecar(
        format="napkin-tokens",
        version=2,
        dtype="uint16",
        tokens=n_tokens,
        documents=1,
        text_bytes=n_tokens,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        separator=tokenizer.special_tokens[SEPARATOR],
        sha256="0" * 64,
        block_bytes=BLOCK_BYTES,
        blocks=blocks,
    )
    sidecar_path(path).write_bytes(sidecar.to_json())
    return path


if __name__ == "__main__":
    main()
