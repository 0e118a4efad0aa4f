"""How fast the studio's pages are, in a real Chromium on this machine: first paint, a control, a count, many runs.

    python benchmarks/studio_pages.py                 # some six minutes; needs chromium
    python benchmarks/studio_pages.py --minutes 60    # and an hour of a live run

Planner: milliseconds from the navigation to the first paint, from a moved control until rule, bars and tables are
drawn, and seconds from a moved control until the server's count of Llama 3 70B on 64 H100 is shown, where the last
plan was of another layout. Runs: seconds until a page of so many runs is drawn, by samples of their lines and by all of
them, frames per second while the page is scrolled and while a chart is panned, and the server's bytes while one of the
runs grows by ten lines a second. Runs beyond `--files` have the file of another one, by a hard link: each is read for
itself. The table is also written to benchmarks/results/.
"""

import argparse
import dataclasses
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from napkin.json_files import add_checksum
from napkin.runs.metrics import METRICS_FILE, MetricsFile, format_metrics
from result_files import heading, write_result
from turns import BRACKETS, spread

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from oracles.browser import Browser  # pyright: ignore[reportMissingImports]
from studio.test_studio_runs import logged, make_run  # pyright: ignore[reportMissingImports]

PLAN = "preset=llama-3-70b&recompute=full&context_length=8192"
TIMES = 15
SHOWN = 12
"""Runs that the label of a chart names."""
FRAMES = """new Promise((done) => {
  const times = [], begin = performance.now();
  const frame = (now) => {
    times.push(now);
    MOVE;
    if (now - begin < 3000) requestAnimationFrame(frame);
    else done(times.map((each, index) => each - times[index - 1]).slice(1));
  };
  requestAnimationFrame(frame);
})"""

SCROLL = "scrollBy(0, times.length % 40 < 20 ? 25 : -25)"
PAN = (
    "document.querySelector('[data-curve=loss] .u-over').dispatchEvent(new WheelEvent('wheel', "
    "{ deltaX: times.length % 60 < 30 ? 9 : -9, cancelable: true }))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="runs that are shown at once")
    parser.add_argument("--points", type=int, default=100_000, help="logged steps of each")
    parser.add_argument("--files", type=int, default=10, help="files of metrics that differ")
    parser.add_argument("--whole-minutes", type=float, default=15.0, help="the most that reading all lines may take")
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes for which a run grows")
    options = parser.parse_args()
    if options.runs < SHOWN:
        parser.error(f"--runs {options.runs}: a page of runs names {SHOWN} of them, take {SHOWN} or more")
    title = f"Pages of the studio in Chromium, {options.runs} runs of {options.points:,} steps"
    head = heading(title, BRACKETS)
    rows = []
    # Children of a killed Chromium may write to its profile for a moment longer.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for number in range(options.runs):
            run = make_run(folder / "runs" / f"run-{number:04}", 0)
            if number < options.files:
                run.path.write_text("".join(lines_of(options.points, number)))
            else:
                run.path.hardlink_to(folder / "runs" / f"run-{number % options.files:04}" / METRICS_FILE)
        growing = make_run(folder / "runs" / "growing", 0)
        growing.path.write_text("".join(lines_of(options.points, 0)))
        growing.last_step = options.points
        command = [sys.executable, "-m", "napkin", "studio", str(folder / "runs"), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=\S+", server.stdout.readline())
            assert found is not None
            with Browser(folder / "profile") as browser:
                browser.open(found[0])
                rows += planner_rows(browser, found[1])
                rows += run_rows(browser, found[1], options.runs + 1, options.whole_minutes)
                rows += memory_rows(server.pid, growing, options.minutes)
        finally:
            server.terminate()
            server.wait()
    lines = ["| what | median | all |", "|---|---|---|", *rows]
    print("\n".join(lines))
    write_result("studio", [*head, *lines])


def moved(control: str, by: int) -> str:
    """Move a slider, and give the milliseconds until everything is drawn by rule."""
    return (
        "(slider => { const begin = performance.now(); "
        f"slider.value = Number(slider.value) + {by}; slider.dispatchEvent(new Event('input')); "
        f"return performance.now() - begin; }})(document.querySelector('#control-{control}'))"
    )


def planner_rows(browser: Browser, address: str) -> list[str]:
    """First paint, a control by rule, a count."""
    paints, counts = [], []
    counted = "document.body.dataset.ready === 'count'"
    for _ in range(5):
        browser.open("about:blank")
        browser.open(f"{address}/planner#{PLAN}")
        browser.wait_for("performance.getEntriesByName('first-contentful-paint').length > 0")
        paints.append(browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        browser.wait_for(counted)
    moves = [browser.run(moved("d_ff", 1 if turn % 2 else -1)) for turn in range(TIMES)]
    browser.wait_for(counted)
    for turn in range(6):
        begin = time.perf_counter()
        browser.run(moved("tensor", -1 if turn % 2 else 1))
        browser.wait_for(counted)
        counts.append(time.perf_counter() - begin)
    return [
        row("first paint of the planner, ms", paints),
        row("a moved control by rule, ms", moves),
        row("the count of Llama 3 70B on 64 H100, another layout, s", counts),
    ]


def lines_of(points: int, seed: int) -> Iterator[str]:
    """The text of a run's metrics, as a run of napkin writes it."""
    generator, previous = random.Random(seed), 0
    for step in range(1, points + 1):
        line = dataclasses.replace(logged(step), loss=2 + 3 / step + generator.gauss(0, 0.1))
        text = format_metrics(line).rstrip()[:-1]
        yield add_checksum(f'{text}, "previous_step": {previous}}}') + "\n"
        previous = step


def run_rows(browser: Browser, address: str, n_runs: int, most_minutes: float) -> list[str]:
    """Many runs at once: until they are drawn, by samples and whole; frames while scrolling and panning."""
    browser.open(f"{address}/runs")
    browser.wait_for("document.body.dataset.drawn > 0")
    begin = time.perf_counter()
    browser.run("delete document.body.dataset.drawn; document.querySelector('#all').click()")
    first = f"document.querySelector('[data-curve=loss]').ariaLabel.includes('and {n_runs - SHOWN} more')"
    browser.wait_for(first)
    seen = time.perf_counter() - begin
    browser.wait_for("document.body.dataset.drawn > 0")
    drawn = time.perf_counter() - begin
    # The files are still being read in the background, as they are when a user opens the page.
    scrolled, panned = (browser.run(FRAMES.replace("MOVE", move)) for move in (SCROLL, PAN))
    smooth = []
    for what, times in (("scrolling", scrolled), ("panning", panned)):
        smooth.append(row(f"frames per second while {what}", [1000 / statistics.mean(times)]))
        smooth.append(row(f"the slowest frame of a hundred while {what}, ms", [sorted(times)[int(0.99 * len(times))]]))
    waiting = "fetch('/api/runs').then((answer) => answer.json()).then((told) => told.waiting)"
    end = time.monotonic() + 60 * most_minutes
    while (left := browser.run(waiting)) and time.monotonic() < end:
        time.sleep(1)
    whole = time.perf_counter() - begin
    browser.wait_for("document.body.dataset.drawn > 0")
    begin = time.perf_counter()
    browser.run("delete document.body.dataset.drawn; document.querySelector('#axis').dispatchEvent(new Event('input'))")
    browser.wait_for("document.body.dataset.drawn > 0")
    again = time.perf_counter() - begin
    return [
        row(f"{n_runs} runs: the loss is drawn, s", [seen]),
        row("all charts are drawn, s", [drawn]),
        row(f"all lines of {n_runs - left} runs are read, s", [whole]),
        row("all charts drawn again, s", [again]),
        *smooth,
    ]


def memory_rows(pid: int, growing: MetricsFile, minutes: float) -> list[str]:
    """The server's bytes while the page looks on and a run grows."""
    process, sizes = psutil.Process(pid), list[float]()
    end = time.monotonic() + 60 * minutes
    time.sleep(5)
    while time.monotonic() < end:
        for _ in range(50):
            growing.append(logged(growing.last_step + 1))
            time.sleep(0.1)
        sizes.append(process.memory_info().rss / 1e6)
    half = sizes[len(sizes) // 2 :]
    return [
        row(f"bytes of the server over {minutes:g} minutes of a live run, MB", sizes),
        row("of these, what the second half added, MB", [half[-1] - half[0]]),
    ]


def row(what: str, values: list[float]) -> str:
    return f"| {what} | {spread(values, '{:.3g}'.format)} | {min(values):.3g} to {max(values):.3g} |"


if __name__ == "__main__":
    main()
