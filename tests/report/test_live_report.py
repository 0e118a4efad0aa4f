"""The report while a run trains: often enough to be watched, seldom enough to cost nothing."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from napkin.report import page as module
from napkin.report import templates
from napkin.report.page import MAX_TIME_FRACTION, REFRESH_SECONDS, LiveReport, live_report


class Clock:
    """Seconds that pass when they are told to, and as a page is written."""

    def __init__(self, seconds_a_page: float) -> None:
        self.now, self.seconds_a_page = 100.0, seconds_a_page

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds_a_page", "pages"), [(0.1, 117), (1.0, 18), (30.0, 1)])
def test_pages_come_every_half_a_minute_or_as_seldom_as_they_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds_a_page: float, pages: int
) -> None:
    clock = Clock(seconds_a_page)

    promised: list[float] = []

    def write(run: Path, *, training: bool, every: Callable[[], float]) -> None:
        clock.now += clock.seconds_a_page
        promised.append(clock.now + every())

    monkeypatch.setattr(module, "write_report", write)
    live = LiveReport(tmp_path, print, clock=clock)
    written_at = []
    while clock.now < 3700:
        clock.now += 1.0
        before = live.pages
        live()
        written_at += [clock.now] * (live.pages - before)
    assert abs(live.pages - pages) <= 2
    assert all(later - earlier >= REFRESH_SECONDS for earlier, later in itertools.pairwise(written_at))
    # The first page's cost is not known before it; from the second on the share holds.
    assert live.pages == 1 or live.pages * seconds_a_page <= MAX_TIME_FRACTION * 3600 + 0.1
    # The page said when the next one would come, give or take one call.
    assert [later - due for due, later in zip(promised, written_at[1:], strict=False)] == pytest.approx(
        [seconds_a_page] * (len(written_at) - 1), abs=1.1
    )
    assert written_at[0] == pytest.approx(100 + REFRESH_SECONDS + seconds_a_page, abs=1.1)


@pytest.mark.thorough
def test_a_page_of_a_run_in_training_says_so_and_loads_itself_anew(place: Path) -> None:
    run = Path("runs/tiny")
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(metrics[:3]) + "\n")
    live = LiveReport(run, print, clock=iter([0.0, 31.0, 31.1, 31.1]).__next__)
    live()
    page = (run / "report.html").read_text()
    assert re.search(r"Training, step 3 of 6, [\d.]+ epochs on", page)
    assert f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' in page


def test_a_page_promises_the_next_when_its_own_cost_is_known(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def render(template: str, **values: object) -> str:
        rendered.append(template)
        return templates.render(template, **values)

    def every() -> float:
        rendered.append("promise")
        return 30.0

    monkeypatch.setattr(module, "render", render)
    module.write_report("runs/tiny", training=True, every=every)
    assert rendered == ["page.html", "promise", "liveness.html"]


def test_a_promised_page_is_not_written_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.05)
    due: list[float] = []
    written: list[float] = []

    def write(run: Path, *, training: bool, every: Callable[[], float]) -> None:
        written.append(clock.now)
        # The first page is slower: it imports what draws it.
        clock.now += 0.05 if due else 0.4
        due.append(clock.now + every())

    monkeypatch.setattr(module, "write_report", write)
    live = LiveReport(tmp_path, print, clock=clock)
    for _ in range(40_000):
        clock.now += 0.01
        live()
    assert len(written) > 5
    assert written[1:] == pytest.approx(due[: len(written) - 1], abs=0.02)


def test_the_finished_run_s_page_stays_as_it_is(napkin, place: Path) -> None:
    assert napkin("report", "runs/tiny").status == 0
    page = Path("runs/tiny/report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "Training, step" not in page


def test_a_run_that_ends_with_an_error_is_not_said_to_train(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 1e-9)
    monkeypatch.setattr(module, "MAX_TIME_FRACTION", 1e9)
    run = Path("runs/tiny")
    pages: list[str] = []

    def train_and_fail() -> None:
        with live_report(run, print) as live:
            live()
            pages.append((run / "report.html").read_text())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    pages.append((run / "report.html").read_text())
    assert ['http-equiv="refresh"' in page for page in pages] == [True, False]


def test_a_report_that_cannot_be_written_is_told_once(place: Path) -> None:
    said: list[str] = []
    Path("runs/tiny/plan.json").write_text("{")
    times = iter([0.0, *(100.0 * n for n in range(1, 9))])
    live = LiveReport(Path("runs/tiny"), said.append, clock=lambda: next(times))
    live()
    live()
    assert len(said) == 1
    assert said[0].startswith("the report is not updated while the run trains: 'runs/tiny/plan.json' is malformed")
