"""The files of a profile: a trace that nests, a page that is whole and escaped, pictures to scale."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.profiling.profile_page import (
    flame_boxes,
    flame_svg,
    memory_svg,
    render_profile_page,
    roofline_svg,
    write_profile_page,
)
from napkin.profiling.profile_table import headings, table_rows, trace_of, write_trace
from napkin.profiling.step_profile import ProfiledSpan, StepProfile
from profiling.test_profiler import example


def ranges(found: StepProfile) -> list[dict[str, Any]]:
    return [each for each in trace_of(found)["traceEvents"] if each["ph"] == "X"]


@pytest.mark.thorough
def test_the_trace_has_every_call_and_phases_and_modules_around_them(tmp_path: Path) -> None:
    found = example()
    path = write_trace(found, tmp_path / "trace.json")
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    operators = [each for each in events if each["cat"] == "operator"]
    assert len(operators) == sum(row.figures.calls for row in found.rows)
    phases = [each["name"] for each in events if each["cat"] == "phase"]
    assert phases[0] == "forward"
    assert {"forward", "recompute", "backward", "optimizer"} == set(phases)
    assert phases[-1] == "optimizer"
    modules = {each["name"] for each in events if each["cat"].startswith("module")}
    assert {"embedding", "blocks", "blocks.0", "blocks.1.up"} <= modules


def test_ranges_of_a_line_nest() -> None:
    # Perfetto draws no ranges that overlap without one containing the other.
    found = ranges(example())
    for line in {each["tid"] for each in found}:
        open_ends: list[float] = []
        of_line = [(round(1e3 * each["ts"]), round(1e3 * each["dur"])) for each in found if each["tid"] == line]
        for begin, length in sorted(of_line, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or begin + length <= open_ends[-1]
            open_ends.append(begin + length)


def test_each_call_lies_in_the_range_of_its_phase_and_of_its_module() -> None:
    found = ranges(example())
    around = [each for each in found if each["cat"] == "phase" or each["cat"].startswith("module")]
    for call in (each for each in found if each["cat"] == "operator"):
        names = {
            each["name"]
            for each in around
            if each["ts"] - 1e-6 <= call["ts"] and call["ts"] + call["dur"] <= each["ts"] + each["dur"] + 1e-6
        }
        assert call["args"]["phase"] in names
        assert not call["args"]["module"] or call["args"]["module"] in names


def test_kernels_have_a_line_for_each_stream() -> None:
    kernel = ProfiledSpan("mm", "up", "forward", 10, 20, kernel="gemm", stream=7)
    found = replace(example(), trace=(ProfiledSpan("mm", "up", "forward", 0, 5), kernel))
    (event,) = [each for each in ranges(found) if each["cat"] == "kernel"]
    (call,) = [each for each in ranges(found) if each["cat"] == "operator"]
    assert event["name"] == "gemm"
    assert event["args"]["operator"] == call["name"] == "mm"
    assert event["tid"] != call["tid"]


def test_boxes_of_the_flame_view_add_up() -> None:
    found = example()
    step = flame_boxes(found)
    assert step.seconds == pytest.approx(found.seconds)
    pending = [step]
    while pending:
        box = pending.pop()
        if box.parts:
            assert sum(part.seconds for part in box.parts.values()) == pytest.approx(box.seconds)
            pending += box.parts.values()
    widths = re.findall(r'class="box" x="[\d.]+" y="22" width="([\d.]+)"', flame_svg(found))
    assert sum(map(float, widths)) == pytest.approx(800, abs=3)


def test_the_table_ends_with_the_whole_step() -> None:
    found = example()
    rows = table_rows(found, "operator", most=3)
    assert [row[0] for row in rows[:3]] == list(found.by("operator"))[:3]
    assert rows[3][0] == f"{len(found.by('operator')) - 3} others"
    assert rows[-1][0] == "step"
    assert {len(row) for row in rows} == {len(headings("operator"))}
    assert {len(row) for row in table_rows(found, "module", most=3)} == {len(headings("module"))}


def test_the_page_is_one_file_with_pictures_and_tables(tmp_path: Path) -> None:
    page = write_profile_page(example(), tmp_path / "page.html").read_text()
    for anchor in ("flame", "roofline", "memory", "by-phase", "by-module", "by-operator", "outside"):
        assert f'<section id="{anchor}">' in page
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page


def test_names_are_escaped() -> None:
    found = example()
    hostile = "<script>alert(1)</script>\x1b\0&"
    rows = tuple(replace(row, module=f"{hostile}.{row.module}", operator=hostile) for row in found.rows)
    spans = tuple(replace(span, module=hostile) for span in found.trace)
    found = replace(found, rows=rows, trace=spans, title=hostile, device_name=hostile)
    page = render_profile_page(found)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\0" not in page
    assert json.loads(json.dumps(trace_of(found)))["otherData"]["device"] == hostile


def test_what_is_not_known_has_no_picture() -> None:
    found = example()
    unknown = replace(found, roofs=None, price=None, row_moments=(None,) * len(found.row_moments))
    assert roofline_svg(unknown) is None
    assert memory_svg(unknown) is None
    page = render_profile_page(unknown)
    assert page.count("<svg") == 1


def test_files_that_exist_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("mine")
    for write in (write_profile_page, write_trace):
        with pytest.raises(NapkinError, match=r"exists.*overwritten"):
            write(example(), path)
    assert path.read_text() == "mine"
