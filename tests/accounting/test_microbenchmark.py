import time

import torch
from torch import nn

from napkin import Ledger, count
from napkin.accounting.microbenchmark import Call, call_of, time_operators
from napkin.accounting.pricing import price, roofline_seconds
from napkin.hardware.calibration import ArrayMeasurement, Calibration, Machine, MatmulMeasurement
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step

CALIBRATION = Calibration(
    machine=Machine("cpu", "a CPU", 1, 1, False, "2"),
    measured_at="2026-11-20T00:00:00+00:00",
    matmuls=tuple(MatmulMeasurement(name, 256, 256, 256, 1e9) for name in ("fp32", "bf16")),
    arrays=(ArrayMeasurement(2**20, 1e9, 1e9), ArrayMeasurement(2**26, 1e9, 1e9)),
    seconds_per_operator=1e-6,
    seconds_per_fresh_byte=0.0,
)


def expected(row) -> float:
    return roofline_seconds(row, CALIBRATION)


def transformer_ledger() -> Ledger:
    model = ModelConfig(vocab_size=64, context_length=16, d_model=16, n_layers=1, n_heads=2)
    return count_step(
        ResolvedRecipe(Recipe(model=model, training=TrainingConfig(batch_size=2)), Precision("bf16", "cpu"))
    )


def test_every_operator_of_a_training_step_can_be_timed() -> None:
    ledger = transformer_ledger()
    working = {row.call for row in ledger.rows if row.bytes_read + row.bytes_written}
    assert None not in working
    assert time_operators(ledger, expected).keys() == working


def test_a_timed_call_takes_the_place_of_its_roofline_and_nothing_else_does() -> None:
    ledger = transformer_ledger()
    timed = {row.call: 0.25 for row in ledger.rows if row.operator == "mm"}
    products = sum(row.operator == "mm" for row in ledger.rows)
    others = sum(expected(row) for row in ledger.rows if row.operator != "mm")
    assert abs(price(ledger, CALIBRATION, timed).seconds - (0.25 * products + others)) < 1e-9


def test_a_call_is_repeated_with_the_same_forms_and_values() -> None:
    seen = []

    def operator(*args, **kwargs):
        seen.append((args, kwargs))

    operator.tags = ()  # pyright: ignore[reportFunctionMemberAccess]
    wide = torch.zeros(4, 6, dtype=torch.bfloat16).T
    same = torch.zeros(3, 1).expand(3, 5)
    call = call_of(operator, (wide, [same, torch.ones(2, dtype=torch.int64)], 3), {"alpha": 0.5})  # pyright: ignore[reportArgumentType]
    module = nn.Linear(1, 1)
    row = count(module, torch.zeros(1, 1)).rows[0]
    ledger = Ledger((type(row)(**{**_fields(row), "call": call, "bytes_read": 1}),), 0, 0, 0, {}, (), {})
    time_operators(ledger, lambda row: 1.0)
    (got, (got_same, got_ids), three), keywords = seen[-1]
    assert (got.shape, got.stride(), got.dtype) == (wide.shape, wide.stride(), wide.dtype)
    assert (got_same.shape, got_same.stride()) == (same.shape, same.stride())
    assert got_ids.tolist() == [0, 0]
    assert (three, keywords) == (3, {"alpha": 0.5})


def test_a_call_that_draws_from_a_generator_of_its_own_is_not_repeated() -> None:
    add, rand = torch.ops.aten.add.Tensor, torch.ops.aten.rand.generator
    assert isinstance(call_of(add, (torch.zeros(2), torch.zeros(2)), {}), Call)
    assert call_of(rand, ([2],), {"generator": torch.Generator()}) is None


def test_what_is_larger_than_allowed_is_left_to_its_roofline() -> None:
    ledger = transformer_ledger()
    largest = max(row.bytes_read + row.bytes_written for row in ledger.rows)
    timed = time_operators(ledger, expected, max_bytes=largest - 1)
    left_out = {row.call for row in ledger.rows if row.bytes_read + row.bytes_written == largest}
    assert timed
    assert not left_out & timed.keys()


def test_timing_operators_leaves_the_global_random_state_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    before = torch.random.get_rng_state()
    ledger = count(model, torch.zeros(2, 8))
    assert any(row.operator == "bernoulli_" for row in ledger.rows if row.call in time_operators(ledger, expected))
    assert torch.equal(torch.random.get_rng_state(), before)


def _fields(row) -> dict:
    return {name: getattr(row, name) for name in type(row).__dataclass_fields__}


def test_a_first_call_that_compiles_takes_no_time_from_the_others() -> None:
    """The limit is of samples: a first call that takes longer than all of it leaves the other calls to be timed."""
    ledger, compiled = transformer_ledger(), []

    def slow_at_first(*args, **kwargs) -> None:
        if not compiled:
            end = time.thread_time() + 0.3
            while time.thread_time() < end:
                pass
        compiled.append(None)

    row = max(ledger.rows, key=lambda row: row.bytes_read + row.bytes_written)
    slow = call_of(slow_at_first, (1,), {})
    first = type(row)(**{**_fields(row), "call": slow})
    working = {row.call for row in ledger.rows if row.bytes_read + row.bytes_written}
    whole = Ledger((first, *ledger.rows), 0, 0, 0, {}, (), {})
    timed = time_operators(whole, lambda row: 1e9 if row.call == slow else expected(row), max_seconds=0.25)
    # One of the others at least: without a limit of their own, the first would have been the only one.
    assert slow in timed
    assert working & timed.keys()
