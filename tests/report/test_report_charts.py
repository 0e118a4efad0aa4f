import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from napkin.report.charts import (
    bits_chart,
    loss_chart,
    mfu_is_in_proportion,
    smoothing_width,
    stacked_bar,
    throughput_chart,
)
from napkin.runs.evaluation_file import Evaluation
from napkin.runs.metrics import StepMetrics, parse_metrics


def logged(step: int, **figures: Any) -> StepMetrics:
    return parse_metrics(json.dumps({"step": step, "tokens": 100 * step, "seconds": float(step), **figures}))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def widths_of_bars(svg: str) -> list[float]:
    """Widths of the filled rectangles, in the order in which they are drawn."""
    found = []
    for path in ElementTree.fromstring(svg).iter("path"):
        numbers = re.findall(r"[ML] ([\d.]+) [\d.]+", path.get("d", ""))
        if len(numbers) == 4 and "fill: var(" in path.get("style", ""):
            found.append(max(map(float, numbers)) - min(map(float, numbers)))
    return found


def test_the_parts_of_a_stacked_bar_are_as_long_as_their_shares():
    svg = stacked_bar("memory", {"parameters": 1.0, "gradients": 1.0, "activations": 6.0}, 802)
    assert widths_of_bars(svg) == pytest.approx([100, 100, 600], abs=0.05)


def test_a_stacked_bar_leaves_room_up_to_its_limit():
    svg = stacked_bar("memory", {"parameters": 1.0, "activations": 3.0}, 802, limit=8.0)
    assert widths_of_bars(svg) == pytest.approx([100, 300], abs=0.05)
    assert "stroke: currentColor" in svg


def test_a_limit_that_would_dwarf_the_bar_is_not_drawn():
    svg = stacked_bar("memory", {"parameters": 1.0, "activations": 3.0}, 802, limit=8000.0)
    assert widths_of_bars(svg) == pytest.approx([200, 600], abs=0.05)
    assert "stroke: currentColor" not in svg


def test_bars_of_bits_are_in_proportion_and_labelled():
    svg = bits_chart(Evaluation(3, 10, 20, 2.2, 9.0, 1.5, 3.0, 2.25), 700)
    model, xz, gzip = widths_of_bars(svg)
    assert (model / gzip, xz / gzip) == pytest.approx((0.5, 0.75), abs=0.001)
    assert [text for text in texts(svg) if text] == ["this model", "xz -9", "gzip -9", "1.50", "2.25", "3.00"]


def test_a_hundred_thousand_steps_make_a_small_drawing_that_keeps_a_spike():
    calm = [logged(step, loss=3.0 + step % 11 / 100) for step in range(1, 100_001)]
    spike = [*calm[:70_000], logged(70_001, loss=9.0), *calm[70_001:]]
    svg = loss_chart(spike, 760)
    assert len(svg) < 40_000
    assert svg.count("\nL ") < 1500
    # The axes are 708 pixels wide and begin at 38; the spike is the only point in the upper half.
    points = [(float(x), float(y)) for x, y in re.findall(r"L ([\d.]+) ([\d.]+)\n", svg)]
    assert [round(x) for x, y in points if 38 < x < 746 and y < 100] == [round(38 + 0.7 * 708)]


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
def test_odd_runs_are_drawn_without_a_warning(metrics):
    for draw in (loss_chart, throughput_chart):
        ElementTree.fromstring(draw(metrics, 360))


def test_losses_over_more_than_a_factor_of_three_have_a_logarithmic_axis():
    def gaps(low: float, high: float) -> list[float]:
        svg = loss_chart([logged(1, loss=high), logged(2, loss=low)], 760)
        heights = [float(text.get("y", "")) for text in ElementTree.fromstring(svg).iter("text") if text.get("x") != ""]
        labels = dict(zip(texts(svg), heights, strict=True))
        return [labels["4"] - labels["6"], labels["6"] - labels["8"]]

    first, second = gaps(2.0, 10.0)
    assert first > 1.3 * second
    first, second = gaps(3.9, 8.1)
    assert first == pytest.approx(second, abs=0.05)


def test_equal_runs_give_equal_bytes_and_drawings_share_no_id():
    metrics = [logged(step, loss=3.0, validation_loss=3.1, tokens_per_second=1.0) for step in range(1, 20)]
    drawings = [draw(metrics, width) for draw in (loss_chart, throughput_chart) for width in (360, 760)]
    assert drawings == [draw(metrics, width) for draw in (loss_chart, throughput_chart) for width in (360, 760)]
    identifiers = [name for drawing in drawings for name in re.findall(r' id="([^"]+)"', drawing)]
    assert identifiers
    assert len(identifiers) == len(set(identifiers))


def test_a_readers_own_matplotlib_settings_change_nothing():
    import matplotlib

    metrics = [logged(step, loss=3.0) for step in range(1, 20)]
    plain = loss_chart(metrics, 360)
    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert loss_chart(metrics, 360) == plain
        assert matplotlib.rcParams["lines.linewidth"] == 9


def test_colours_are_the_pages_and_every_reference_has_its_target():
    metrics = [logged(step, loss=3.0, validation_loss=3.1) for step in range(1, 20)]
    svg = loss_chart(metrics, 360)
    outside_variables = re.sub(r"var\(--\w+,#\w+\)", "", svg)
    assert not re.search(r"[:\"] ?#[0-9a-f]{6}", outside_variables)
    targets = re.findall(r'(?:href="|url\()#([^")]+)', svg)
    assert set(targets) == set(re.findall(r' id="([^"]+)"', svg))
    assert "font-family" not in svg


def test_mfu_is_in_proportion_only_where_its_ratio_to_the_rate_holds():
    steady = [logged(step, tokens_per_second=100.0 + step, mfu=(100.0 + step) / 400) for step in range(9)]
    assert mfu_is_in_proportion(steady)
    assert not mfu_is_in_proportion([*steady, logged(9, tokens_per_second=100.0, mfu=0.2)])
    assert not mfu_is_in_proportion([logged(1, tokens_per_second=100.0)])


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (49, 1), (50, 3), (4000, 161)])
def test_the_smoothing_is_a_twenty_fifth_of_the_run_and_odd(steps, width):
    assert smoothing_width([logged(step) for step in range(steps)]) == width
