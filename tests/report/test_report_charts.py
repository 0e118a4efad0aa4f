"""The data that the charts of a page are drawn from, and the bars, which need no script."""

import json
from pathlib import Path
from typing import Any

import pytest

from napkin.report.charts import as_data, curves_of, run_charts
from napkin.report.headline import bits_bars, stacked_bar
from napkin.report.page import write_report
from napkin.runs.accounting_files import Evaluation
from napkin.runs.metrics import StepMetrics, parse_metrics
from napkin.runs.run_record import RunRecord


def logged(step: int, **figures: Any) -> StepMetrics:
    return parse_metrics(json.dumps({"step": step, "tokens": 100 * step, "seconds": float(step), **figures}))


def data_of(metrics: list[StepMetrics]) -> dict[str, Any]:
    charts = run_charts(RunRecord("run", "", None, tuple(metrics), None, None, None), curves_of(metrics))
    assert charts is not None
    return json.loads(charts.data)


def test_the_parts_of_a_stacked_bar_are_as_long_as_their_shares():
    bar = stacked_bar({"parameters": 1.0, "gradients": 1.0, "activations": 6.0}, "memory")
    assert [segment.percent for segment in bar.segments] == pytest.approx([12.5, 12.5, 75])
    assert not bar.outlined


def test_a_stacked_bar_leaves_room_up_to_its_limit():
    bar = stacked_bar({"parameters": 1.0, "activations": 3.0}, "memory", limit=8.0)
    assert [segment.percent for segment in bar.segments] == pytest.approx([12.5, 37.5])
    assert bar.outlined


def test_a_limit_that_would_dwarf_the_bar_is_not_drawn():
    bar = stacked_bar({"parameters": 1.0, "activations": 3.0}, "memory", limit=8000.0)
    assert [segment.percent for segment in bar.segments] == pytest.approx([25, 75])
    assert not bar.outlined


def test_a_part_below_zero_has_no_length():
    assert [segment.percent for segment in stacked_bar({"forward": 2.0, "other": -0.1}, "time").segments] == [100, 0]
    assert stacked_bar({}, "time").segments == []


def test_bars_of_bits_are_in_proportion_and_labelled():
    model, xz, gzip = bits_bars(Evaluation(3, 10, 20, 2.2, 9.0, 1.5, 3.0, 2.25))
    assert (model.percent / gzip.percent, xz.percent / gzip.percent) == pytest.approx((0.5, 0.75), abs=0.001)
    assert [(bar.name, bar.figure) for bar in (model, xz, gzip)] == [
        ("this model", "1.50"),
        ("xz -9", "2.25"),
        ("gzip -9", "3.00"),
    ]


def test_every_figure_of_a_step_has_a_chart():
    figures = {
        "loss": 3.0,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "tokens_per_second": 9.0,
        "mfu": 0.3,
        "bytes": 7,
    }
    data = data_of([logged(1, **figures), logged(2, validation_loss=3.5, **figures)])
    columns = {name: [line["column"] for line in chart["lines"]] for name, chart in data["charts"].items()}
    assert columns == {
        "loss": ["loss", "validation_loss"],
        "learning-rate": ["learning_rate"],
        "gradient-norm": ["gradient_norm"],
        "throughput": ["tokens_per_second", "mfu"],
        "memory": ["bytes"],
    }
    [table] = data["tables"]
    assert table["curves"]["validation_loss"] == [None, 3.5]
    assert table["curves"]["loss"] == [3, 3]
    assert table["positions"] == {"steps": [1, 2], "tokens": 100, "seconds": 1}
    assert data["axis"] == "tokens"


@pytest.mark.thorough
def test_however_long_a_run_is_its_page_is_small_and_keeps_a_spike(full_run: Path):
    with (full_run / "metrics.jsonl").open("w") as file:
        for step in range(1, 40_001):
            noise = step * 7919 % 1000 / 1000
            loss = 99.5 if step == 28_001 else 3 + noise
            # Every figure is noisy, so that each keeps points of its own.
            file.write(
                f'{{"step": {step}, "tokens": {4096 * step}, "seconds": {step + noise}, "loss": {loss}, '
                f'"learning_rate": {1e-3 * (1 - step / 4e5)}, "gradient_norm": {step * 31 % 997 / 100}, '
                f'"tokens_per_second": {6000 + step * 17 % 991}, "mfu": {0.4 + step * 13 % 983 / 9830}, '
                f'"bytes": {403_000_000 + step * 11 % 977}'
                + (f', "validation_loss": {3.1 + noise}}}\n' if step % 100 == 0 else "}\n")
            )
    page = write_report(full_run)
    assert page.stat().st_size < 600_000
    assert "99.5," in page.read_text()


@pytest.mark.parametrize(
    "metrics",
    [
        [logged(1, loss=5.0, tokens_per_second=10.0, mfu=0.2)],
        [logged(0, loss=5.0, tokens_per_second=0.0, mfu=0.0)],
        [logged(1), logged(2), logged(3)],
        [logged(1, loss=5.0), logged(2), logged(3, loss=1e30)],
        [logged(1, loss=0.0), logged(2, loss=-3.0)],
        [logged(1, loss=2.0, validation_loss=2.0), logged(2, loss=2.0)],
        [logged(1, tokens_per_second=10.0), logged(2, tokens_per_second=None, mfu=0.3)],
    ],
    ids=["one step", "nothing done", "no figures", "a gap and a blow-up", "not positive", "flat", "patchy"],
)
def test_odd_runs_have_data_in_which_what_is_not_known_is_null(metrics):
    data = data_of(metrics)
    [table] = data["tables"]
    for name, curve in table["curves"].items():
        expected = [getattr(each, name) for each in metrics]
        assert curve == [value if isinstance(value, int | float) and value == value else None for value in expected]
    for chart in data["charts"].values():
        assert all(line["column"] in table["curves"] for line in chart["lines"])


def test_equal_runs_give_equal_data():
    metrics = [logged(step, loss=3.0 + step % 7, validation_loss=3.1, tokens_per_second=1.0) for step in range(1, 20)]
    assert json.dumps(data_of(metrics)) == json.dumps(data_of(metrics))


def test_no_string_ends_the_element_that_holds_the_data():
    content = {"</script><script>alert(1)</script>": ["<!--", "&lt;", "\u2028"]}
    text = str(as_data(content))
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text) == content
