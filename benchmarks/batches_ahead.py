"""What a run waits for its batches, with and without a thread that prepares them while all cores train.

Two models, three token files mixed 3 : 2 : 1, steps with and without the thread in turns of six, the first of each
turn left out; figures are medians. On a GPU the batches are copied to it, too.

    python benchmarks/batches_ahead.py
"""

import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from napkin.data.batches import Batches
from napkin.data.curated_corpus import Document
from napkin.data.mixing import TokenMixture
from napkin.data.prefetch import BatchFetcher, Prefetcher
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.data.token_writer import write_token_file
from napkin.model.config import ModelConfig
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.train_step.step import build_train_state

TURNS, STEPS_A_TURN = 4, 6
MODELS = {
    "64 × 8, d 64, 2 layers": ModelConfig(8192, 64, d_model=64, n_layers=2),
    "256 × 8, d 192, 4 layers": ModelConfig(8192, 256, d_model=192, n_layers=4),
}


def measure(tokens: TokenMixture, model: ModelConfig) -> dict[str, tuple[float, float]]:
    """Seconds of waiting and of the whole step, without the thread and with it."""
    resolved = resolve(Recipe(model=model, training=TrainingConfig(batch_size=8)), ThisMachine())
    assert resolved.recipe.training.threads is not None
    torch.set_num_threads(resolved.recipe.training.threads)
    train_state = build_train_state(resolved)
    batches = Batches(tokens, context_length=model.context_length, batch_size=8, seed=0)
    device_type = resolved.precision.device_type
    feeds = {"fetched": BatchFetcher(batches, device_type), "ahead": Prefetcher(batches, device_type)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in feeds}
    number = 0
    for _ in range(TURNS):
        for name, feed in feeds.items():
            for place in range(STEPS_A_TURN):
                begin = time.perf_counter()
                batch = feed[number]
                waited = time.perf_counter() - begin
                loss, _ = train_state.step(number, *batch)
                loss.item()
                number += 1
                if place:
                    taken[name].append((waited, time.perf_counter() - begin))
            feed.close()
    return {name: (_median(found, 0), _median(found, 1)) for name, found in taken.items()}


def main() -> None:
    """Print a line a model and way."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        files = [_tokens(Path(folder) / str(number), draw) for number in range(3)]
        print(f"{'model':28}{'batches':>10}{'waiting':>12}{'step':>12}{'share':>9}")
        for name, model in MODELS.items():
            for way, (waited, step) in measure(TokenMixture(files, [3, 2, 1]), model).items():
                print(f"{name:28}{way:>10}{1e6 * waited:>9.0f} µs{1e3 * step:>9.1f} ms{waited / step:>9.3%}")


def _tokens(path: Path, draw: random.Random) -> TokenFile:
    text = "".join(draw.choices("abcdefgh \n", k=1_000_000))
    return write_token_file(path, [Document(path.name, text)], ByteTokenizer([SEPARATOR]))


def _median(found: list[tuple[float, float]], which: int) -> float:
    return statistics.median(each[which] for each in found)


if __name__ == "__main__":
    main()
