"""Charts of further figures: which there are, and where a step has none."""

import math

import numpy as np

from napkin.report.charts import constant_figures, figure_charts, figure_curves
from napkin.report.headline import key_figures
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_record import RunRecord


def logged(step: int, **figures: float | None) -> StepMetrics:
    return StepMetrics(step, step, 1.0, 0.1, 1.0, 1.0, 1.0, 1.0, 0.5, 1, figures=figures or None)


def test_a_figure_and_its_evaluation_share_a_chart() -> None:
    metrics = [logged(1), logged(2, reward=0.25, kl=None), logged(3, **{"reward": 0.5, "held-out reward": 0.75})]
    curves = figure_curves(metrics)
    assert list(curves) == ["reward", "kl", "held-out reward"]
    np.testing.assert_equal(curves["reward"], [math.nan, 0.25, 0.5])
    np.testing.assert_equal(curves["held-out reward"], [math.nan, math.nan, 0.75])
    [chart] = figure_charts(curves)
    assert [(line.column, line.style) for line in chart.lines] == [("reward", "line"), ("held-out reward", "points")]


def test_a_run_of_pre_training_has_none() -> None:
    assert figure_charts(figure_curves([logged(1), logged(2)])) == []


def test_a_figure_that_never_changes_is_a_word_and_not_a_chart() -> None:
    metrics = [logged(1, turns=1.0, kl=0.1), logged(2, turns=1.0, kl=0.2), logged(3, turns=1.0, kl=None)]
    curves = figure_curves(metrics)
    assert [line.column for chart in figure_charts(curves) for line in chart.lines] == ["kl"]
    assert constant_figures(curves) == [("turns", 1.0)]


def test_a_run_of_rewards_is_judged_by_right_answers() -> None:
    metrics = (logged(1, **{"held-out correct": 0.25}), logged(2), logged(9, **{"held-out correct": 0.75}))
    figures = key_figures(RunRecord("run", "", None, metrics, None, None, None))
    assert figures[0] == ("right held-out answers", "75.0%", "at step 9; 25.0% at step 1")
    assert [figure.label for figure in figures].count("training loss") == 0
