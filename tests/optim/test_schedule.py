import doctest
import math
from collections.abc import Callable

import pytest

from napkin.errors import NapkinError
from napkin.optim import registry
from napkin.optim.registry import (
    SCHEDULES,
    Constant,
    Cosine,
    InverseSquareRoot,
    Linear,
    Schedule,
    WarmupStableDecay,
    warmup_cosine,
)


def rates(total_steps: int, warmup_steps: int, *, peak: float = 2.0, final_fraction: float = 0.1) -> list[float]:
    return [
        warmup_cosine(
            step, peak=peak, warmup_steps=warmup_steps, total_steps=total_steps, final_fraction=final_fraction
        )
        for step in range(total_steps)
    ]


def test_warm_up_climbs_in_equal_stairs_from_above_zero_to_the_peak() -> None:
    assert rates(20, 4)[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_the_cosine_passes_its_quarter_points_and_ends_at_the_final_fraction() -> None:
    curve = rates(111, 10)
    assert curve[10] == 2.0
    assert curve[60] == pytest.approx(2.0 * (1 + 0.1) / 2)
    assert curve[35] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2))
    assert curve[110] == pytest.approx(0.2)
    assert curve[10:] == sorted(curve[10:], reverse=True)


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    assert rates(5, 0)[0] == 2.0


@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(1, 0), (8, 7)])
def test_a_run_with_no_step_left_for_the_cosine_ends_at_the_peak(total_steps: int, warmup_steps: int) -> None:
    assert rates(total_steps, warmup_steps)[-1] == 2.0


def test_beyond_the_last_step_the_rate_stays() -> None:
    settings = {"peak": 2.0, "warmup_steps": 2, "total_steps": 10, "final_fraction": 0.25}
    assert warmup_cosine(9, **settings) == warmup_cosine(1000, **settings) == pytest.approx(0.5)


def test_a_final_fraction_of_one_is_a_constant_rate() -> None:
    assert rates(7, 0, final_fraction=1.0) == pytest.approx([2.0] * 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"warmup_steps": 10}, "warmup_steps 10 of total_steps 10: use 0 to 9"),
        ({"warmup_steps": -1}, "warmup_steps -1"),
        ({"total_steps": 0, "warmup_steps": 0}, "total_steps 0"),
        ({"final_fraction": 1.5}, "final_fraction is 1.5"),
    ],
)
def test_impossible_shapes_are_refused(settings: dict[str, float], message: str) -> None:
    usual = {"step": 0, "peak": 1.0, "warmup_steps": 2, "total_steps": 10, "final_fraction": 0.1}
    with pytest.raises(NapkinError, match=message):
        warmup_cosine(**{**usual, **settings})  # pyright: ignore[reportArgumentType]


def test_the_example_in_the_docstring_holds() -> None:
    assert doctest.testmod(registry).failed == 0


TOTAL, WARMUP = 101, 20
# Share of the peak at a step of the 81 that follow the warm-up, in closed form.
CLOSED_FORMS: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (Constant(WARMUP, TOTAL), lambda step: 1.0),
    "linear": (Linear(WARMUP, TOTAL, 0.2), lambda step: 1 - 0.8 * (step - 20) / 80),
    "cosine": (Cosine(WARMUP, TOTAL, 0.2), lambda step: 0.6 + 0.4 * math.cos(math.pi * (step - 20) / 80)),
    "warmup-stable-decay": (
        WarmupStableDecay(WARMUP, TOTAL, 0.2, 30),
        lambda step: 1.0 if step <= 70 else 1 - 0.8 * (step - 70) / 30,
    ),
    "inverse-square-root": (InverseSquareRoot(WARMUP, TOTAL), lambda step: (21 / (step + 1)) ** 0.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_its_closed_form(name: str) -> None:
    registry, closed_form = CLOSED_FORMS[name]
    assert type(registry) is SCHEDULES[name]
    assert [registry(step) for step in range(WARMUP)] == pytest.approx([(step + 1) / 21 for step in range(WARMUP)])
    after = range(WARMUP, TOTAL)
    assert [registry(step) for step in after] == pytest.approx([closed_form(step) for step in after], rel=1e-12)
    assert [registry(step, 3.0) for step in range(TOTAL)] == pytest.approx([3 * registry(s) for s in range(TOTAL)])


def test_inverse_square_root_is_the_transformers_own_up_to_scale() -> None:
    """d^-0.5 · min(t^-0.5, t · warmup^-1.5), Vaswani et al. 2017, equation 3, steps counted from 1."""
    registry = InverseSquareRoot(39, 10**6)
    for t in (1, 17, 40, 41, 1000, 400_000):
        assert registry(t - 1) == pytest.approx(min(t**-0.5, t * 40**-1.5) / 40**-0.5)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 2), (7, 8), (3, 1000)])
def test_every_schedule_fits_into_runs_of_any_length(name: str, warmup_steps: int, total_steps: int) -> None:
    rates = [SCHEDULES[name](warmup_steps, total_steps)(step) for step in range(total_steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[warmup_steps] == max(rates) == 1
    assert rates[:warmup_steps] == sorted(rates[:warmup_steps])
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)


def test_the_decay_is_a_fifth_of_the_run_where_nothing_is_said() -> None:
    rates = [WarmupStableDecay(10, 100, 0.0)(step) for step in range(100)]
    assert rates[10:80] == [1.0] * 70
    assert rates[79:] == pytest.approx([1 - k / 20 for k in range(21)])
    assert WarmupStableDecay(10, 100, 0.3, 0)(99) == 1.0


@pytest.mark.parametrize("decay_steps", [-1, 90])
def test_a_decay_that_the_warm_up_leaves_no_room_for_is_refused(decay_steps: int) -> None:
    with pytest.raises(NapkinError, match=f"decay_steps.*{decay_steps}.*leaves 0.*89"):
        WarmupStableDecay(10, 100, 0.1, decay_steps)
