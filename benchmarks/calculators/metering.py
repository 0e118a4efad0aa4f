"""What metering adds to a run: the demo's model, metered and not, in turns in one process."""

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from napkin.accounting.metering import Stopwatch, meter_step
from napkin.model.config import ModelConfig
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_train_state

STEPS_OF_A_RUN = 800
TURNS = 40


def measure() -> dict[str, float]:
    """Seconds: of a step, of one with its parts timed and memory read, of that alone, and of the one metered step."""
    recipe = Recipe(
        model=ModelConfig(vocab_size=4096, context_length=256, d_model=192, n_layers=4, n_heads=3),
        training=TrainingConfig(batch_size=8, steps=STEPS_OF_A_RUN),
    )
    resolved = resolve(recipe, ThisMachine())
    assert resolved.recipe.training.threads is not None
    torch.set_num_threads(resolved.recipe.training.threads)
    train_state = build_train_state(resolved)
    tokens = torch.randint(4096, (recipe.training.batch_size, recipe.model.context_length))
    watch, process = Stopwatch(), psutil.Process()

    def plain() -> None:
        train_state.step(0, tokens, tokens)

    def watched() -> None:
        with watch("data"):
            pass
        train_state.step(0, tokens, tokens, watch=watch)
        process.memory_info()

    def watch_alone() -> None:
        for part in ("data", "forward", "backward", "optimizer"):
            with watch(part):
                pass
        process.memory_info()

    for _ in range(3):
        watched()
    pairs = [(_seconds(plain), _seconds(watched)) for _ in range(TURNS)]
    alone, metered = zip(*pairs, strict=True)
    whole = [_seconds(lambda: meter_step(train_state.model, plain)) for _ in range(5)]
    return {
        "plain": statistics.median(alone),
        "plain, best": min(alone),
        "watched": statistics.median(metered),
        "watched, best": min(metered),
        "watch alone": min(_seconds(lambda: [watch_alone() for _ in range(100)]) / 100 for _ in range(20)),
        "metered step": statistics.median(whole),
        "metered step, best": min(whole),
    }


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
