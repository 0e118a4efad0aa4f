"""A run whose process was killed is not said to train."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from napkin.report.page import write_report
from napkin.runs.run_folder import is_being_trained

# A page after every step, whatever it costs.
TRAIN = """
import sys
from napkin.cli import main
from napkin.report import live_report
live_report.REFRESH_SECONDS, live_report.MAX_TIME_FRACTION = 0, 1e9
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.torture
def test_a_killed_run_has_stopped_and_one_that_lives_has_not(napkin, place: Path) -> None:
    run, page = Path("runs/long"), Path("runs/long/report.html")
    command = [sys.executable, "-c", TRAIN, "train", "tiny.toml", "--run", str(run), "--training.steps", "1000000"]
    command += ["--training.compile", "off"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as trainer:
        try:
            wait_until(lambda: page.exists() or trainer.poll() is not None)
            assert "Training, step " in page.read_text()
            assert '"state": "training"' in napkin("runs", str(run), "--json").out
            assert napkin("report", str(run)).status == 0
            assert "Training, step " in page.read_text()
        finally:
            trainer.send_signal(signal.SIGKILL)
    assert trainer.returncode == -signal.SIGKILL
    # The page has not been written since: the reader's browser sees how old it is.
    assert re.search(
        r'data-written="20[\d-]+T[\d:]+\+00:00" data-due="\d+" data-timeout="\d+" hidden>No sign of life since',
        page.read_text(),
    )
    assert is_being_trained(run) is False
    assert '"state": "stopped"' in napkin("runs", str(run), "--json").out
    assert napkin("report", str(run)).status == 0
    assert "Stopped at step " in page.read_text()
    assert 'id="stale"' not in page.read_text()


@pytest.mark.torture
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
@pytest.mark.parametrize("hours", [0, 2])
def test_a_browser_sees_that_a_page_is_old(place: Path, hours: int) -> None:
    run = Path("runs/tiny")
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(metrics[:3]) + "\n")
    page = write_report(run, training=True)
    written = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 3600 * hours))
    page.write_text(re.sub(r'data-written="[^"]*"', f'data-written="{written}"', page.read_text()))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.absolute().as_uri()]
    shown = subprocess.run(browser, capture_output=True, text=True, check=True, timeout=300).stdout
    hidden = {name: "hidden" in rest for name, rest in re.findall(r'<p id="(current|stale)"([^>]*)>', shown)}
    assert hidden == {"current": hours > 0, "stale": hours == 0}


def wait_until(condition, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
