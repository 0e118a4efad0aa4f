"""What metering adds to a run: the demo's model, metered and not, in turns in one process."""

from functools import partial

import psutil
import torch

from napkin.accounting.metering import Stopwatch, meter_step
from napkin.model.config import ModelConfig
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_train_state
from turns import Samples, in_turns, seconds_of

STEPS_OF_A_RUN = 800
TURNS = 40


def measure() -> Samples:
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

    def metered() -> None:
        meter_step(train_state.model, plain)

    for _ in range(3):
        watched()
    contestants = {"plain": plain, "watched": watched, "watch alone": watch_alone, "metered step": metered}
    return in_turns({name: partial(seconds_of, work) for name, work in contestants.items()}, TURNS)
