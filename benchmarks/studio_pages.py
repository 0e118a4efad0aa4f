"""How fast the studio's pages are, in a real Chromium on this machine: first paint, a control, a count, many runs.

    python benchmarks/studio_pages.py                 # some two minutes; needs chromium

Planner: milliseconds from the navigation to the first paint, from a moved control until rule, bars and tables are
drawn, and seconds from a moved control until the server's count of Llama 3 70B on 64 H100 is shown, where the last
plan was of another layout. Runs: frames per second while a page of so many runs is panned by its wheel, bytes of the
server before and after a run has grown for so many looks. The table is also written to benchmarks/results/.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from napkin.hardware.host import detect_host
from result_files import write_result

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from oracles.browser import Browser  # pyright: ignore[reportMissingImports]
from studio.test_studio_runs import logged, make_run  # pyright: ignore[reportMissingImports]

PLAN = "preset=llama-3-70b&recompute=full&context_length=8192"
TIMES = 15
FRAMES = """new Promise((done) => {
  const times = [], begin = performance.now();
  const frame = (now) => {
    times.push(now);
    scrollBy(0, times.length % 40 < 20 ? 25 : -25);
    if (now - begin < 3000) requestAnimationFrame(frame);
    else done(times.map((each, index) => each - times[index - 1]).slice(1));
  };
  requestAnimationFrame(frame);
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="runs that are shown at once")
    parser.add_argument("--points", type=int, default=2000, help="logged steps of each")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        growing = make_run(folder / "runs" / "run-0000", options.points)
        for number in range(1, options.runs):
            make_run(folder / "runs" / f"run-{number:04}", options.points)
        command = [sys.executable, "-m", "napkin", "studio", str(folder / "runs"), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=\S+", server.stdout.readline())
            assert found is not None
            with Browser(folder / "profile") as browser:
                browser.open(found[0])
                rows += planner_rows(browser, found[1])
                rows += run_rows(browser, found[1], options.runs, server.pid, growing)
        finally:
            server.terminate()
            server.wait()
    title = f"Pages of the studio in Chromium, {options.runs} runs of {options.points:,} steps"
    heading = f"# {title}: {detect_host().cpu_name}, load {os.getloadavg()[0]:.1f}"
    lines = [heading, "", "| what | median | all |", "|---|---|---|", *rows]
    print("\n".join(lines))
    write_result("studio", lines)


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


def run_rows(browser: Browser, address: str, n_runs: int, pid: int, growing) -> list[str]:
    """Many runs at once: until they are drawn, frames while scrolling, the server's bytes while one grows."""
    browser.open(f"{address}/runs")
    browser.wait_for(f"document.querySelectorAll('#list li').length === {n_runs}")
    begin = time.perf_counter()
    browser.run("document.querySelector('#all').click()")
    lines = "(document.querySelector('[data-curve=bytes]')?.ariaLabel ?? '').split(';').length"
    browser.wait_for(f"{lines} === {n_runs}")
    drawn = time.perf_counter() - begin
    frames = browser.run(FRAMES)
    process = psutil.Process(pid)
    time.sleep(3)
    before = process.memory_info().rss
    for step in range(growing.last_step + 1, growing.last_step + 200):
        growing.append(logged(step))
        time.sleep(0.1)
    after = process.memory_info().rss
    return [
        row(f"{n_runs} runs drawn, s", [drawn]),
        row("frames per second while scrolling", [1000 / statistics.mean(frames)]),
        row("the slowest frame of a hundred, ms", [sorted(frames)[int(0.99 * len(frames))]]),
        row("bytes of the server that 200 lines of a live run added, MB", [(after - before) / 1e6]),
    ]


def row(what: str, values: list[float]) -> str:
    shown = f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
    return f"| {what} | {statistics.median(values):.3g} | {shown} |"


if __name__ == "__main__":
    main()
