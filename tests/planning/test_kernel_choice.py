import dataclasses
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from napkin.hardware.form_timing import Forms
from napkin.kernels import operator_forms
from napkin.kernels.loss.cross_entropy import HEAD, takes_head_rows
from napkin.kernels.operator_forms import Choice, ShapeClass
from napkin.model.config import ModelConfig
from napkin.planning.step import block_timing
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.planning.step.machine import Machine, ThisMachine, machine_of
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig

MODEL = ModelConfig(vocab_size=300, context_length=256)
LONG = TrainingConfig(steps=1_000_000, batch_size=8, threads=1)
BF16, FP32 = Precision("bf16", "cpu"), Precision("fp32", "cpu")


class Timing:
    """In place of clocks: forms in the order of their speed, and what was to be timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fastest: str) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.classes: list[ShapeClass] = []
        self.heads: list[ShapeClass] = []

        def time_forms(operator: str, shape_class: ShapeClass, forms: Forms, *, default: str, **_: Any) -> Choice:
            for passes in forms.values():
                passes()
            if operator == HEAD:
                self.heads.append(shape_class)
            else:
                assert operator == "blocks"
                self.asked.append(tuple(forms))
                self.classes.append(shape_class)
            form = next(name for name in (*fastest, default) if name in forms)
            return Choice(operator, shape_class, form, default, 1.0, dict.fromkeys(forms, 1.0))

        monkeypatch.setattr("napkin.hardware.form_timing.time_forms", time_forms)


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Machine code stays where it is kept.
    monkeypatch.setattr(operator_forms, "cache_path", lambda kind, _: tmp_path / f"{kind}.json")
    monkeypatch.setenv("NAPKIN_FORMS", "measured")
    monkeypatch.setattr(block_timing, "MOST_NUMBERS", 2**12)
    operator_forms._forms.cache_clear()
    yield
    operator_forms._forms.cache_clear()


def chosen(
    precision: Precision = BF16,
    machine: Machine | None = None,
    training: TrainingConfig = LONG,
    kernels: Literal["auto", "plain", "compiled"] = "auto",
    **changes: Any,
) -> str:
    """Kernels and attention of a small model, for a long run on this machine unless another one is named."""
    model, training = dataclasses.replace(MODEL, **changes), dataclasses.replace(training, kernels=kernels)
    recipe = Recipe(model=model, training=training)
    recipe = dataclasses.replace(recipe, optimizer=recipe.optimizer.resolved)
    found = choose_kernels(recipe, precision, machine or ThisMachine(device="cpu"))
    return f"{found.training.kernels} {found.model.attention}"


@pytest.mark.usefixtures("own_table")
def test_the_forms_that_suit_a_recipe_are_timed_once_and_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, "compiled plain", "plain plain", "compiled compiled", "compiled flex")
    assert chosen() == chosen() == "compiled plain"
    # Equal blocks of another number of layers and another vocabulary, and more of the same micro-batches.
    assert chosen(n_layers=12, vocab_size=5000) == "compiled plain"
    assert timing.asked == [("plain sdpa", "plain plain", "compiled sdpa", "compiled plain", "compiled compiled")]
    # torch.compile is there for fp32.
    assert chosen(FP32) == "plain plain"
    # Scores of all pairs would take more memory than all else.
    assert chosen(context_length=2048) == "compiled compiled"
    # The fused operator has no caps, the compiled one no biases of distance.
    assert chosen(attention_softcap=30.0) == "compiled plain"
    assert chosen(positions="alibi") == "compiled plain"
    # What the recipe names stays.
    assert chosen(kernels="plain") == "plain plain"
    assert chosen(attention="compiled", kernels="compiled") == "compiled compiled"
    assert timing.asked[1:] == [
        ("plain sdpa", "plain plain"),
        ("plain sdpa", "compiled sdpa", "compiled compiled"),
        ("plain plain", "compiled plain", "compiled compiled"),
        ("plain sdpa", "plain plain", "compiled sdpa", "compiled plain"),
        ("plain sdpa", "plain plain"),
    ]


@pytest.mark.usefixtures("own_table")
def test_blocks_of_any_model_are_timed_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, "compiled sdpa", "compiled plain")
    models: list[dict[str, Any]] = [
        {"d_model": 1024, "n_heads": 32, "n_kv_heads": 8, "context_length": 64},
        {"d_model": 768, "n_heads": 12, "norm": "layer", "feed_forward": "gelu_tanh", "positions": "learned"},
        {"n_experts": 4, "n_dense_layers": 1, "n_layers": 8},
        {"mixers": "mamba2, attention", "n_layers": 8},
        {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        {"attention_window": 32, "full_attention_every": 2, "qk_norm": "head"},
        {"mup_base_d_model": 64, "kv_sharing": 2},
    ]
    for model in models:
        assert chosen(**model).startswith("compiled"), model
    assert len(timing.classes) == len(set(timing.classes)) == len(models)
    widest = timing.classes[0]
    assert {"n_heads 8", "n_kv_heads 2", "head_dim 32"} <= set(widest)


@pytest.mark.usefixtures("own_table")
def test_torchs_operators_are_taken_where_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(monkeypatch, "compiled plain")
    short = TrainingConfig(steps=2, batch_size=2, threads=1)
    assert chosen(training=short) == chosen(machine=machine_of("H100", device="cpu")) == "plain sdpa"
    assert chosen(Precision("bf16", "cuda")) == "plain sdpa"
    assert chosen(training=short, kernels="compiled") == "compiled sdpa"
    monkeypatch.setenv("NAPKIN_FORMS", "default")
    operator_forms._forms.cache_clear()
    assert chosen() == "plain sdpa"
    assert timing.asked == []


@pytest.mark.usefixtures("own_table")
def test_a_form_that_is_made_slow_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real clock, and blocks of one form that do everything ten times."""
    passes = block_timing.passes_of_blocks

    def slowed(recipe: Recipe, precision: Precision) -> Callable[[], object]:
        call = passes(recipe, precision)
        return call if recipe.model.attention == "plain" else lambda: [call() for _ in range(10)]

    monkeypatch.setattr(block_timing, "passes_of_blocks", slowed)
    small: dict[str, Any] = {"d_model": 32, "n_heads": 2, "context_length": 32, "kernels": "plain"}
    long = dataclasses.replace(LONG, steps=10**9, batch_size=2)
    assert chosen(training=long, **small) == "plain plain"
    monkeypatch.setattr(block_timing, "passes_of_blocks", passes)
    assert chosen(training=long, **small) == "plain plain"


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("lion", False)])
def test_the_update_is_fused_where_there_is_a_kernel_and_nobody_said_no(name: str, fused: bool) -> None:
    for chosen, expected in ((None, fused), (False, False)):
        recipe = Recipe(model=MODEL, optimizer=OptimizerConfig(name=name, fused=chosen))
        assert choose_kernels(recipe, Precision("fp32", "cpu")).optimizer.fused is expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left as it is")
def test_freed_memory_is_kept_from_then_on() -> None:
    program = """
import psutil
from napkin.hardware.host import keep_freed_memory

def kept_of_a_freed_block():
    before = psutil.Process().memory_info().rss
    block = b"x" * 2**26
    del block
    return psutil.Process().memory_info().rss - before

print(kept_of_a_freed_block(), keep_freed_memory(), kept_of_a_freed_block())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, agreed, after = done.stdout.split()
    assert agreed == "True"
    assert int(before) < 2**25 < int(after)


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize("form", ["tiles", "chunks"])
def test_the_head_of_evaluations_is_timed_with_the_compiled_blocks_where_there_are_two_forms(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(block_timing, "multiplies_pairs", lambda: True)
    timing = Timing(monkeypatch, "compiled sdpa", form)
    threads = torch.get_num_threads()
    try:
        assert chosen() == chosen(vocab_size=300, n_layers=3) == "compiled sdpa"
        assert timing.heads == [(512, MODEL.d_model, 300)]
        head, vectors = (torch.zeros(n, MODEL.d_model, dtype=torch.bfloat16) for n in (300, 600))
        assert takes_head_rows(vectors, head) == (form == "tiles")
        # Fewer rows are not timed: packing the matrix does not pay.
        assert not takes_head_rows(vectors[:100], head)
        monkeypatch.setattr(block_timing, "multiplies_pairs", lambda: False)
        chosen(vocab_size=400)
        assert len(timing.heads) == 1
    finally:
        torch.set_num_threads(threads)
