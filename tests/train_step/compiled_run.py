"""Learners and runs with compiled blocks, in a process of its own, and what they came to as JSON.

The compiler cannot read what checks of types are wrapped around, which is everything while tests run.

    python compiled_run.py FOLDER             # of tiny_run.write_tiny_text's files: one model, compiled once
    python compiled_run.py FOLDER CASE        # one of CASES, beside the same uncompiled
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from napkin.accounting.metering import meter_step
from napkin.checkpoint.folder import read_checkpoint
from napkin.errors import NapkinError
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.metrics import read_metrics
from napkin.runs.run_folder import RunFolder
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from napkin.training.run import create_run, open_run, train_run
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.tiny_run import tiny_recipe

STEPS, STOPPED_AT, N_STEPS_ALONE = 12, 5, 6

# Answers what it is asked as g++ does, and compiles nothing.
REFUSING_COMPILER = """#!/bin/sh
case " $* " in
*" -o "*) echo 'x.cpp:1:1: error: there is no room' >&2; exit 1 ;;
*) exec g++ "$@" ;;
esac
"""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bf16": ("bf16", {}, {}),
    "bf16-pure": ("bf16-pure", {}, {}),
    "fp8": ("fp8", {}, {}),
    "fully recomputed": ("fp32", {}, {"recompute": "full", "recompute_every": 2}),
    "documents": ("fp32", {"attention": "plain"}, {}),
    "dropout": ("fp32", {"dropout": 0.2}, {}),
    "dropout, fully recomputed": ("fp32", {"dropout": 0.2}, {"recompute": "full"}),
    "GPT-2's blocks": ("fp32", {"positions": "learned", "norm": "layer", "feed_forward": "gelu", "biases": "all"}, {}),
    "capped scores": ("fp32", {"attention_softcap": 30.0, "attention": "plain"}, {}),
}


def main(folder: Path) -> dict[str, Any]:
    """The usual recipe, in fp32, two micro-batches a step."""
    recipe = tiny_recipe(
        folder, steps=STEPS, evaluate_every=4, checkpoint_every=100, precision="fp32", micro_batch_size=2, compile="on"
    )
    precision = Precision("fp32", "cpu")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, n_layers=3))
    recipe_of_learners = choose_kernels(with_vocabulary(recipe), precision)
    # As before a run: einops keeps a table of the types of tensors, and a new one would have all compiled again.
    counted = count_step(ResolvedRecipe(recipe_of_learners, precision), compiled=True)
    train_states = [
        build_train_state(ResolvedRecipe(recipe_of_learners, precision), compiled=compiled)
        for compiled in (False, True)
    ]
    found: dict[str, Any] = {"eager": steps(train_states[0]), "compiled": steps(train_states[1])}
    tokens = torch.zeros(4, recipe.model.context_length, dtype=torch.int64)
    metered = meter_step(
        train_states[1].model, lambda: train_states[1].step(9, tokens, tokens), resident=train_states[1].resident()
    )
    found |= {
        "flops": [metered.ledger.flops, counted.flops],
        "peak_bytes": [metered.peak_bytes, counted.peak_bytes],
    }
    state = torch.get_rng_state()
    whole, stopped = folder / "whole", folder / "stopped"
    train_run(*create_run(recipe, whole))
    found["random state kept"] = torch.equal(state, torch.get_rng_state())
    preparation, run = create_run(recipe, stopped)
    train_run(
        preparation, run, on_step=lambda m: os.kill(os.getpid(), signal.SIGTERM) if m.step == STOPPED_AT else None
    )
    found["stopped at"] = max(metrics.step for metrics in read_metrics(stopped / "metrics.jsonl"))
    train_run(*open_run(stopped))
    for name, path in (("whole", whole), ("stopped", stopped)):
        checkpoint = read_checkpoint(path / "checkpoints" / f"step-{STEPS:08d}")
        lines = read_metrics(path / "metrics.jsonl")
        found[name] = {
            "weights": (checkpoint.path / "SHA256SUMS").read_text().splitlines()[:2],
            "losses": [(metrics.loss, metrics.gradient_norm, metrics.validation_loss) for metrics in lines],
        }
    found["measurement"] = RunFolder(whole).read_json("measurement.json")
    found["graphs"] = graphs()
    found["kept"] = sorted(
        {path.suffix for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*") if path.is_file()}
    )
    found["kept in"] = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    found["failure"] = failure(recipe, folder / "failed")
    return found


def case(name: str) -> dict[str, Any]:
    """One of CASES."""
    format_name, model, training = CASES[name]
    precision = Precision(format_name, "cpu")  # pyright: ignore[reportArgumentType]
    recipe = tiny_recipe("nowhere", precision=format_name, micro_batch_size=2, **training)
    recipe = with_vocabulary(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, n_layers=3, **model)))
    recipe = choose_kernels(recipe, precision)
    apart = name == "documents"
    resolved = ResolvedRecipe(recipe, precision)
    counted = count_step(resolved, compiled=True).peak_bytes
    eager, compiled = (steps(build_train_state(resolved, compiled=flag), apart=apart) for flag in (False, True))
    train_state = build_train_state(resolved, compiled=True)
    again, taken = steps(train_state, apart=apart), allocated(train_state)
    return {
        "eager": eager,
        "compiled": compiled,
        "again": again,
        "graphs": graphs(),
        "peak_bytes": [taken, counted],
    }


def allocated(train_state: TrainState) -> int:
    """The most bytes of a step, by the allocator's own events."""
    tokens = torch.zeros(4, train_state.recipe.model.context_length, dtype=torch.int64)
    targets, resident = tokens.clone(), train_state.resident()
    assert resident is not None
    held = storage_bytes([*resident, tokens, targets])
    return held + growth_at_peak(lambda: train_state.step(N_STEPS_ALONE, tokens, targets))[1]


def steps(train_state: TrainState, *, apart: bool = False) -> list[tuple[float, float]]:
    """Losses and gradient norms, and an evaluation of another size between."""
    length, found = train_state.recipe.model.context_length, []
    for number in range(N_STEPS_ALONE):
        tokens = torch.randint(256, (4, length + 1), generator=torch.Generator().manual_seed(number))
        documents = (torch.arange(length) > 5 * number).long().expand(4, length) if apart else None
        loss, norm = train_state.step(number, tokens[:, :-1], tokens[:, 1:], documents)
        found.append((float(loss), float(norm)))
        with torch.no_grad():
            train_state.model.loss(tokens[: 1 + number % 3, :-1], tokens[: 1 + number % 3, 1:])
    return found


def graphs() -> int:
    """How many the compiler has made, recompilations counted."""
    from torch._dynamo.utils import counters

    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def failure(recipe: Recipe, folder: Path) -> str:
    """What is said where the compiler fails although it is there."""
    from torch._inductor import config

    model = dataclasses.replace(recipe.model, context_length=24)
    preparation, run = create_run(dataclasses.replace(recipe, model=model), folder / "run")
    compiler = folder / "g++"
    compiler.write_text(REFUSING_COMPILER)
    compiler.chmod(0o755)
    with config.patch({"cpp.cxx": (str(compiler),)}):
        try:
            train_run(preparation, run)
        except NapkinError as error:
            return str(error)
    return ""


def with_vocabulary(recipe: Recipe) -> Recipe:
    """As if a tokenizer of bytes had been read."""
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=257))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(case(sys.argv[2]) if len(sys.argv) > 2 else main(Path(sys.argv[1]))))
