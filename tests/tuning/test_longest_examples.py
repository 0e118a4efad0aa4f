"""The longest step of a run on examples is found before the first one, to the bytes that it really takes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from napkin.accounting.metering import meter_step
from napkin.chats.token_sequence import Example, TokenSequence
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.train_step.step import build_train_state
from napkin.training.run import prepare
from napkin.tuning.example_method import ExampleMethod, SupervisedObjective
from napkin.tuning.longest_examples import LongestExamples
from napkin.tuning.packing import Packing, micro_batches_of, shapes_of
from napkin.tuning.sequence_step import train_on_examples
from oracles.tiny_tuning import make_start, tuning_recipe

MODEL = ModelConfig(vocab_size=64, context_length=256, d_model=16, n_layers=1, n_heads=2)
STEPS, PLANTED = 4, 2


def sequence(length: int, seed: int) -> TokenSequence:
    generator = np.random.default_rng(seed)
    return TokenSequence(generator.integers(0, 64, length), np.arange(length) >= length // 3)


def batches(planted: int = 230) -> list[list[Example]]:
    """Batches of sequences of 16 to 60 tokens; a longer one is planted in one of the steps."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(16, 60, (STEPS, 4))
    if planted:
        lengths[PLANTED, 2] = planted
    return [[(sequence(int(n), 9 * step + k),) for k, n in enumerate(row)] for step, row in enumerate(lengths)]


def longest_of(found: Sequence[Sequence[Example]], packing: Packing, max_tokens: int = 128) -> LongestExamples:
    training = TrainingConfig(batch_size=4, steps=STEPS)
    resolved = ResolvedRecipe(TuningRecipe(model=MODEL, training=training), Precision("fp32", "cpu"))
    return LongestExamples(
        resolved, SupervisedObjective(), lambda step: found[step], max_tokens=max_tokens, packing=packing
    )


def metered_peaks(found: Sequence[Sequence[Example]], packing: Packing, max_tokens: int = 128) -> list[int]:
    """The peak of every real step, by the meter."""
    train_state = build_train_state(longest_of(found, packing).resolved)

    def step(number: int, batch: Sequence[Example]) -> None:
        train_on_examples(train_state, number, batch, SupervisedObjective(), max_tokens=max_tokens, packing=packing)

    # The first two bear the optimizer's state.
    step(0, found[0])
    step(1, found[1])
    return [
        meter_step(train_state.model, lambda number=number, batch=batch: step(2 + number, batch)).peak_bytes
        for number, batch in enumerate(found)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["packed", pytest.param("padded", marks=pytest.mark.torture)])
def test_counted_peaks_are_those_of_the_real_steps(packing: Packing) -> None:
    found = batches(planted=120)
    metered = metered_peaks(found, packing)
    longest = longest_of(found, packing)
    steps = (0, PLANTED, STEPS - 1)
    counted = {step: longest.peak_bytes(step) for step in steps}
    # Of the sequences themselves, the count has only those of the micro-batches that are counted.
    assert [*counted.values()] == pytest.approx([metered[step] for step in steps], rel=0.02)
    # Where a step that was counted bounds all others, none is counted, and the bound is one.
    told = longest.find(10**12, {0: counted[0]})
    assert told is not None
    assert (told.is_counted, told.first_beyond) == (False, None)
    assert told.peak_bytes >= max(metered)


@pytest.mark.torture
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_planted_long_example_is_found_at_just_its_step(packing: Packing) -> None:
    found = batches()
    metered = metered_peaks(found, packing)
    others = max(peak for step, peak in enumerate(metered) if step != PLANTED)
    limit = (others + metered[PLANTED]) // 2
    told = longest_of(found, packing).find(limit)
    assert told is not None
    assert told.first_beyond is not None
    assert (told.number, told.first_beyond.number) == (PLANTED + 1, PLANTED + 1)
    assert told.peak_bytes == pytest.approx(metered[PLANTED], rel=0.02)
    assert f"memory runs out at step {PLANTED + 1} (1 × 229 tokens)" in told.sentence()


@pytest.mark.torture
def test_the_first_step_beyond_any_limit_is_that_of_a_count_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = longest_of(batches(planted=0), "padded", 64)
    counted = [longest.peak_bytes(step) for step in range(STEPS)]
    # Each is counted once.
    monkeypatch.setattr(longest, "peak_bytes", counted.__getitem__)
    monkeypatch.setattr(longest, "_way_out", lambda number, step_bytes: "")
    for limit in sorted({peak + more for peak in counted for more in (-1, 0)}):
        told = longest.find(limit, dict(enumerate(counted[:1])))
        assert told is not None
        expected = next((step for step, peak in enumerate(counted) if peak > limit), None)
        assert (told.first_beyond and told.first_beyond.number - 1) == expected, (limit, counted)


@pytest.mark.torture
def test_what_is_proposed_would_fit() -> None:
    found = batches()
    longest = longest_of(found, "padded", max_tokens=1024)
    limit = longest.peak_bytes(PLANTED) // 2
    told = longest.find(limit)
    assert told is not None
    assert told.first_beyond is not None
    words = told.first_beyond.way_out.split()
    tokens = int(words[words.index("--tuning.micro-batch-tokens") + 1])
    length = int(words[words.index("--tuning.max-length") + 1]) if "--tuning.max-length" in words else 10**6
    shorter = [[(sequence(min(len(each.tokens), length), 0),) for (each,) in batch] for batch in found]
    step = told.first_beyond.number - 1
    assert longest_of(shorter, "padded", tokens).peak_bytes(step) <= limit * 1.01


@pytest.mark.parametrize("packing", ["packed", "padded", "padded left"])
def test_shapes_are_those_of_the_micro_batches(packing: Packing) -> None:
    for batch in batches(planted=120):
        settings = {"max_tokens": 128, "row_length": 256}
        parts = micro_batches_of(batch, **settings, packing=packing)
        found = [(*part.rows.inputs.shape, len(part.rows.targets), part.rows.documents is not None) for part in parts]
        assert [tuple(shape) for shape in shapes_of(batch, **settings, packing=packing)] == found


@pytest.mark.thorough
def test_a_run_says_which_step_is_longest_and_refuses_one_that_would_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_start(tmp_path)
    lines = [f'{{"prompt": "a", "completion": "{"b" * (5 if n == 9 else 1)}"}}\n' for n in range(16)]
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    method = prepare(tuning_recipe(tmp_path))
    assert isinstance(method, ExampleMethod)
    longest = method.plan.longest  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    lengths = [max(len(each.tokens) for (each,) in method.batch(step)) for step in range(6)]
    assert longest.number == 1 + lengths.index(max(lengths))
    planned = method.plan.ledger.peak_bytes  # pyright: ignore[reportOptionalMemberAccess]
    peak = method.longest_examples.peak_bytes(longest.number - 1)
    assert planned < peak <= longest.peak_bytes
    between = (planned + peak) // 2
    monkeypatch.setattr("napkin.tuning.example_method.step_memory", lambda memory: between)
    with pytest.raises(NapkinError, match=f"memory runs out at step {longest.number}"):
        prepare(tuning_recipe(tmp_path))
