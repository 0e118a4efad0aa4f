import doctest
import math

import pytest

from napkin.errors import NapkinError
from napkin.optim import schedule
from napkin.optim.schedule import warmup_cosine


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
    assert doctest.testmod(schedule).failed == 0
