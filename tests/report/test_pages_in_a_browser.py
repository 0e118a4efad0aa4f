"""The pages in a real browser: charts are drawn under the page's own policy, and say the values at the cursor."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.quantities import format_figure
from napkin.report.comparison import read_run, write_comparison
from napkin.report.page import write_report
from napkin.units import format_count, format_three_digits
from report.conftest import metrics_line

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")

HOVER = """
addEventListener("load", () => setTimeout(() => {
  const over = document.querySelector('[data-chart="PLACE"] .u-over'), box = over.getBoundingClientRect();
  const at = { clientX: box.left + FRACTION * box.width, clientY: box.top + 20, bubbles: true };
  over.dispatchEvent(new MouseEvent("mouseenter", at));
  over.dispatchEvent(new MouseEvent("mousemove", at));
  setTimeout(() => {
    const legends = {};
    for (const chart of document.querySelectorAll("[data-chart]")) {
      const rows = [...chart.querySelectorAll(".u-series")];
      const texts = (row) => [...row.children].map((cell) => cell.textContent);
      legends[chart.dataset.chart] = Object.fromEntries(rows.map(texts));
    }
    document.body.dataset.result = JSON.stringify(legends);
  }, 100);
}, 100));
"""
FORMAT = """
addEventListener("load", () => {
  const formatted = VALUES.map(([unit, value]) => FORMATS[unit](value));
  document.body.dataset.result = JSON.stringify(formatted);
});
"""


def shown(page: Path, script: str = "") -> str:
    """The document after its scripts have run; fails if the browser has anything to complain about.

    `script` is run too, and the page's policy is changed to allow it.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    source = page.read_text()
    if script:
        source = source.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
        source = source.replace("</body>", f"<script>{script}</script>\n</body>")
    copy = page.with_name("copy.html")
    copy.write_text(source)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run([*command, copy.absolute().as_uri()], capture_output=True, text=True, check=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def result_of(page: Path, script: str) -> Any:
    found = re.search(r'data-result="([^"]*)"', shown(page, script))
    assert found
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))


def test_a_hover_says_the_values_of_all_lines_of_all_charts(running_run: Path) -> None:
    # 120 steps of 4,096 tokens; a quarter of the axis is step 30, and the nearest evaluation that of step 50.
    page = write_report(running_run, training=False)
    legends = result_of(page, HOVER.replace("PLACE", "loss").replace("FRACTION", "0.25"))
    assert list(legends) == ["loss", "learning-rate", "gradient-norm", "memory", "throughput"]
    assert {legend["tokens"] for legend in legends.values()} == {"122,880, step 30"}
    logged = [json.loads(line) for line in (running_run / "metrics.jsonl").read_text().splitlines()]
    loss = legends["loss"]
    assert loss["training loss, nats per token"] == f"{logged[29]['loss']:.4f}"
    assert loss["mean of 5 logged steps"] == f"{sum(each['loss'] for each in logged[27:32]) / 5:.4f}"
    assert loss["validation loss"] == f"{logged[49]['validation_loss']:.4f} at 204,800 tokens"
    assert legends["gradient-norm"]["gradient norm, before clipping"] == "0.700"
    assert legends["learning-rate"]["learning rate"] == "0.00300"
    assert legends["memory"]["memory"] == "403 MB"
    assert legends["throughput"] == {
        "tokens": "122,880, step 30",
        "tokens per second": "6.80 k",
        "MFU (right)": "42.5%",
    }


def test_a_hover_over_compared_runs_says_which_is_overfitted(running_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "overfitted"
    shutil.copytree(running_run, other)
    lines = [metrics_line(s, loss=5 - s / 30, validation_loss=4 + abs(s - 50) / 60) for s in range(1, 121)]
    (other / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    runs = [read_run(run, training=False) for run in (other, running_run)]
    page = write_comparison(tmp_path / "c.html", runs, loss="validation", axis="steps", points=[50, 100])
    legends = result_of(page, HOVER.replace("PLACE", "validation").replace("FRACTION", "0.5"))
    assert legends["validation"] == {
        "steps": "60",
        "shakespeare": f"{2.2 + 6 * 2.718281828459045 ** (-50 / 60):.4f} at step 50",
        "overfitted, overfitted": f"{4 + 10 / 60:.4f}",
    }
    assert legends["training"]["steps"] == "60"


@pytest.mark.parametrize(("minutes", "is_stale"), [(0, False), (120, True)])
def test_a_live_page_counts_down_to_the_next_and_notices_that_the_process_is_gone(
    running_run: Path, minutes: int, is_stale: bool
) -> None:
    page = write_report(running_run, training=True, every=lambda: 100.0)
    written = (datetime.now(UTC) - timedelta(minutes=minutes)).replace(microsecond=0).isoformat()
    page.write_text(re.sub(r'data-written="[^"]*"', f'data-written="{written}"', page.read_text()))
    document = shown(page)
    hidden = {name: "hidden" in rest for name, rest in re.findall(r'<p id="(current|stale)"([^>]*)>', document)}
    assert hidden == {"current": is_stale, "stale": not is_stale}
    if is_stale:
        assert "No sign of life since 20" in document
    else:
        # 100 seconds and a step, less the seconds since the page was written.
        left = re.search(r'<span id="next">next in about (\d+) s</span>', document)
        assert left
        assert 0 < int(left[1]) <= 101


def test_a_script_that_is_not_the_page_s_own_is_refused(running_run: Path) -> None:
    page = write_report(running_run, training=False)
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'taken';</script></body>"))
    with pytest.raises(AssertionError, match="Content Security Policy"):
        shown(page)


def test_figures_are_printed_as_everywhere_else(running_run: Path) -> None:
    page = write_report(running_run, training=False)
    sizes = [0, 1, 7.25, 59.94, 59.96, 999.4, 999.5, 999.6, 1234, 98765.4, 999_499, 999_500, 3599.7, 1e5, 2e5, 4.2e13]
    sizes += [0.5, 0.0123, 1.5e-4, 9.9e-5, 3e-7, 1e6, 2.5e16, 1.23e24]
    expected: list[tuple[str, float, str]] = []
    for value in sizes:
        expected += [(unit, value, format_figure(value, unit)) for unit in ("bytes", "FLOP", "share", "seconds", "USD")]
        expected += [("number", value, format_three_digits(value)), ("tokens/s", value, format_count(value))]
        expected += [("count", value, format_figure(value, "count"))]
    printed = result_of(page, FORMAT.replace("VALUES", json.dumps([[unit, value] for unit, value, _ in expected])))
    assert [(unit, value, text) for (unit, value, _), text in zip(expected, printed, strict=True)] == expected
