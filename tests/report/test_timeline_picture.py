import doctest
import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from napkin.accounting.pipeline_schedules import PipelineSchedule, pipeline_schedule
from napkin.accounting.pipeline_simulation import PipelineTimeline, StageSeconds, simulate_pipeline
from napkin.errors import NapkinError
from napkin.report import timeline_picture
from napkin.report.timeline_picture import MOST_ROWS, ticks, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def simulated(
    name: str, ranks: int, micro_batches: int, *, stages_per_rank: int = 1, seconds: float = 0.01
) -> PipelineTimeline:
    schedule = pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
    return simulate_pipeline(schedule, [StageSeconds(seconds, 2 * seconds, seconds)] * schedule.stages)


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(SVG + tag))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in elements(svg, "text")]


def test_every_action_has_a_box_at_its_time_in_the_row_of_its_rank() -> None:
    timeline = simulated("zb-v", 3, 6, stages_per_rank=2)
    svg = timeline_svg(timeline)
    rows = [element for element in elements(svg, "rect") if element.get("class") == "row"]
    assert len(rows) == 3
    left, length = float(rows[0].attrib["x"]), float(rows[0].attrib["width"])
    drawn = {
        (
            element.attrib["class"],
            element.attrib["y"],
            round(float(element.attrib["x"])),
            round(float(element.attrib["width"])),
        )
        for element in elements(svg, "rect")
        if element.get("class") in ("forward", "backward_input", "backward_weight")
    }
    scale = length / timeline.seconds
    assert drawn == {
        (each.action.kind, row.attrib["y"], round(left + each.start * scale), round((each.end - each.start) * scale))
        for row, timed in zip(rows, timeline.ranks, strict=True)
        for each in timed
    }
    assert len(drawn) == 3 * 2 * 6 * 3


def test_boxes_name_their_action_and_show_its_micro_batch() -> None:
    svg = timeline_svg(simulated("1f1b", 2, 2))
    assert "stage 0, forward, micro-batch 1: 10.0 ms to 20.0 ms" in [each.text for each in elements(svg, "title")]
    assert "stage 1, backward, micro-batch 1: 60.0 ms to 90.0 ms" in [each.text for each in elements(svg, "title")]
    assert texts(svg).count("0") == texts(svg).count("1") == 4
    assert texts(svg).count("rank 1") == 1


def test_the_first_line_the_axis_and_the_ends_of_rows_have_the_figures() -> None:
    svg = timeline_svg(simulated("1f1b", 4, 8))
    assert "1f1b: 4 ranks, 8 micro-batches, 440 ms per step, idle 27.3%" in texts(svg)
    assert {"0 s", "100 ms", "400 ms"} <= set(texts(svg))
    assert texts(svg).count("27.3% idle") == 4


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "legend"),
    [
        ("gpipe", 1, ["forward", "backward", "idle"]),
        ("zb-h1", 1, ["forward", "backward, of the input", "backward, of weights", "idle"]),
        ("interleaved-1f1b", 2, ["forward", "backward", "idle", "paler: a later stage of the rank"]),
    ],
)
def test_the_legend_has_what_is_drawn(name: str, stages_per_rank: int, legend: list[str]) -> None:
    svg = timeline_svg(simulated(name, 2, 4, stages_per_rank=stages_per_rank))
    assert texts(svg)[-len(legend) :] == legend


def test_any_title_is_text() -> None:
    svg = timeline_svg(simulated("gpipe", 2, 2), title="<script>alert(1)</script> & \x00 \"'")
    assert "<script>alert(1)</script> & � \"'" in texts(svg)
    assert elements(svg, "script") == []


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("width", [500, 1200, 2000])
@pytest.mark.parametrize(
    ("name", "ranks", "stages_per_rank", "micro_batches"),
    [
        ("interleaved-1f1b", 16, 4, 256),
        ("gpipe", 64, 1, 40),
        ("zb-h1", 40, 1, 80),
        ("gpipe", 32, 1, 1000),
    ],
)
def test_a_picture_of_thousands_of_actions_stays_small(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, width: int
) -> None:
    timeline = simulated(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
    svg = timeline_svg(timeline, width=width)
    assert len(svg) < 2_000_000
    ElementTree.fromstring(svg)
    rows = [element for element in elements(svg, "rect") if element.get("class") == "row"]
    assert len(rows) == min(ranks, MOST_ROWS)
    if ranks > MOST_ROWS:
        assert f"{MOST_ROWS} of {ranks} ranks are drawn" in texts(svg)
        assert {"rank 0", f"rank {ranks - 1}"} <= set(texts(svg))


def test_narrow_actions_cover_what_they_take_and_no_more_than_a_pixel_of_idle_time() -> None:
    timeline = simulated("interleaved-1f1b", 8, 256, stages_per_rank=4)
    svg = timeline_svg(timeline)
    rows = [element for element in elements(svg, "rect") if element.get("class") == "row"]
    scale = float(rows[0].attrib["width"]) / timeline.seconds
    widths: dict[str, float] = {row.attrib["y"]: 0.0 for row in rows}
    strokes: Counter[str] = Counter()
    by_kind = {"forward": 0.0, "backward": 0.0}
    for path in elements(svg, "path"):
        for y, width in re.findall(r"M[\d.]+ ([\d.]+)h([\d.]+)v", path.attrib["d"]):
            widths[y] += float(width)
            strokes[y] += 1
            by_kind[path.attrib["class"]] += float(width)
    for width, busy in zip(widths.values(), timeline.busy_seconds, strict=True):
        assert width == pytest.approx(busy * scale, rel=0.02)
    # A backward takes three times as long as a forward, and gives the colour where both are drawn as one.
    assert by_kind["backward"] > 3 * by_kind["forward"] > 0
    assert len(timeline.ranks[0]) == 2048
    assert max(strokes.values()) <= float(rows[0].attrib["width"]) + 1 < 1100


def test_moments_of_the_axis_are_round_and_few() -> None:
    for exponent in range(-9, 9):
        for digits in (1.0, 1.4, 2.0, 3.3, 5.0, 7.7, 9.99):
            seconds = digits * 10.0**exponent
            moments = ticks(seconds)
            assert 3 <= len(moments) <= 11
            assert moments[0] == 0
            assert moments[-1] <= seconds * 1.0000001
            assert all(re.fullmatch(r"[1-9]\.?0*\d?e.*", f"{moment:.1e}") for moment in moments[1:])


@pytest.mark.parametrize("width", [499, 2001])
def test_a_width_out_of_range_is_refused(width: int) -> None:
    with pytest.raises(NapkinError, match=f"picture.*{width}.*possible: use.*500.*2000"):
        timeline_svg(simulated("gpipe", 2, 2), width=width)


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 3e11])
def test_a_step_without_end_or_beginning_has_no_picture(seconds: float) -> None:
    with pytest.raises(NapkinError, match=r"\S+ seconds.*picture: give"):
        timeline_svg(simulated("gpipe", 2, 2, seconds=seconds))


def test_the_shortest_and_the_longest_step_have_a_picture() -> None:
    for seconds in (1e-12, 1e10):
        ElementTree.fromstring(timeline_svg(simulated("zb-h1", 2, 2, seconds=seconds)))


def test_a_rank_without_stages_has_an_empty_row() -> None:
    forward, backward = pipeline_schedule("gpipe", 1, 1).actions[0]
    schedule = PipelineSchedule("alone", 1, (0,), ((forward, backward), ()))
    svg = timeline_svg(simulate_pipeline(schedule, [StageSeconds(1.0, 1.0)]))
    assert {"50.0% idle", "100% idle"} & set(texts(svg)) == {"100% idle"}
    assert "rank 1" in texts(svg)


def test_the_examples_of_the_docstrings_are_true() -> None:
    found = doctest.testmod(timeline_picture)
    assert found.attempted > 0
    assert found.failed == 0
