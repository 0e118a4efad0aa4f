import pytest

from napkin.report.page import STEPS, expert_balance, render_report
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_record import RunRecord


def logged(step: int, visits: list[list[int]] | None, dropped: list[int] | None) -> StepMetrics:
    return StepMetrics(
        step=step,
        tokens=step,
        seconds=1.0,
        loss=1.0,
        learning_rate=1e-3,
        gradient_norm=1.0,
        step_seconds=1.0,
        tokens_per_second=1.0,
        mfu=0.5,
        bytes=1,
        expert_tokens=visits,
        dropped_tokens=dropped,
    )


def test_balance_is_of_the_last_steps_and_of_each_layer_alone() -> None:
    early = [logged(step, [[100, 0], [0, 100]], [50, 50]) for step in range(1, 9)]
    late = [logged(step, [[6, 2], [4, 4]], [2, 0]) for step in range(9, 9 + STEPS)]
    first, second = expert_balance([*early, *late])
    assert first[:2] == (1, 2)
    assert first[2:] == pytest.approx((1.5, 0.5, 0.25))
    assert second[2:] == pytest.approx((1.0, 1.0, 0.0))


def test_a_dense_run_has_no_balance_and_an_unused_layer_an_even_one() -> None:
    assert expert_balance([logged(1, None, None)]) == expert_balance([]) == []
    (unused,) = expert_balance([logged(1, [[0, 0]], [0])])
    assert unused[2:] == (0.0, 0.0, 0.0)


def test_the_report_shows_the_balance_where_there_are_experts() -> None:
    def page(*metrics: StepMetrics) -> str:
        return render_report(RunRecord("run", "", None, metrics, None, None, None))

    found = page(logged(1, [[6, 2]], [2]))
    assert "Expert balance" in found
    assert "<td>1.50</td><td>0.500</td><td>25.0%</td>" in found
    assert "Expert balance" not in page(logged(1, None, None))
