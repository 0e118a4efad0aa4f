"""The page of several runs has the figures of each run's own table, and its scores."""

import json
import re
from html import unescape
from pathlib import Path

from napkin.accounting.quantities import format_figure, format_ratio
from napkin.report import StagePage, write_stages
from napkin.runs.run_record import read_run_record


def words_of(page: str) -> list[str]:
    """The texts between the page's tags."""
    return [unescape(each).strip() for each in re.findall(r">([^<]+)<", page)]


def test_a_page_has_the_table_and_the_scores_of_each_run(full_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in full_run.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    measured = json.loads((other / "measurement.json").read_text())
    for row in measured["table"]:
        row["meter"] = None if row["meter"] is None else 3 * row["meter"]
    measured["table"][1]["quantity"] = "peak bytes"
    (other / "measurement.json").write_text(json.dumps(measured))
    page = tmp_path / "page.html"
    page.write_text("an earlier page")
    stages = [
        StagePage("style", "Small <letters>.", full_run, [("in style", "1.0%", "97.0%")]),
        StagePage("sums", "Rewards.", other),
    ]
    assert write_stages(page, "A & B", stages) == page
    text = page.read_text()
    words = words_of(text)
    assert "A & B" in words
    assert "Small <letters>." in words
    shown = [each for each in words[words.index("in style") :] if each][:3]
    assert shown == ["in style", "1.0%", "97.0%"]
    for stage in stages:
        measurement = read_run_record(stage.run).measurement
        assert measurement is not None
        for row in measurement.table:
            assert format_figure(row.count, row.unit) in words
            assert format_figure(row.meter, row.unit) in words
    # The summary has a column for each stage.
    head, *rows = re.findall(r"<tr>.*?</tr>", text[text.index('id="summary"') :], re.DOTALL)
    assert [each for each in words_of(head) if each][1:] == ["style", "sums"]
    measurement = read_run_record(other).measurement
    assert measurement is not None
    peak = next(row for row in measurement.table if row.quantity == "peak bytes")
    figures = [format_figure(peak.count, peak.unit), format_figure(peak.meter, peak.unit), format_ratio(peak)]
    row = next(each for each in rows if "peak bytes" in words_of(each))
    assert [each for each in words_of(row) if each][-3:] == figures
    assert "://" not in text
