import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.report.comparison import MOST_RUNS, equal_points, find_runs, read_run, write_comparison
from napkin.report.templates import UPLOT, read_asset
from napkin.report.xy_picture import AXES
from report.conftest import metrics_line


@pytest.fixture
def straight_run(planned_run: Path) -> Path:
    """Ten steps of 4,096 tokens and 0.6 seconds, whose loss is 9, 8, ..., 0."""
    lines = [metrics_line(step, loss=10.0 - step, mfu=0.4) for step in range(1, 11)]
    lines[4] = metrics_line(5, loss=5.0, mfu=0.4, validation_loss=6.5)
    (planned_run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return planned_run


def with_price(run: Path, dollars: float) -> Path:
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "dollars": dollars}))
    return run


def test_a_run_is_summed_up(straight_run: Path) -> None:
    found = read_run(straight_run, training=False, usd_per_hour=3600.0).summary
    assert (found.name, found.state, found.step, found.steps) == ("shakespeare", "stopped", 10, 300)
    assert (found.tokens, found.loss, found.validation_loss, found.seconds) == (40_960, 0.0, 6.5, 6.0)
    assert found.mfu == pytest.approx(0.4)
    assert found.flops == pytest.approx(10 * (7.1e9 + 1.31e10))
    assert found.dollars == pytest.approx(6.0)


def test_the_price_is_the_plan_s_own_unless_another_is_given(straight_run: Path) -> None:
    assert read_run(straight_run, training=False).summary.dollars is None
    priced = read_run(with_price(straight_run, 31.2), training=False)
    assert priced.summary.dollars == pytest.approx(31.2 * 6 / 156)


def test_a_run_s_state_follows_from_its_steps_and_from_who_trains_it(planned_run: Path, straight_run: Path) -> None:
    assert read_run(straight_run, training=True).summary.state == "training"
    (straight_run / "metrics.jsonl").write_text(metrics_line(300) + "\n")
    assert read_run(straight_run, training=False).summary.state == "finished"
    (straight_run / "metrics.jsonl").unlink()
    nothing = read_run(straight_run, training=False)
    assert nothing.summary.state == "planned"
    assert (nothing.summary.loss, nothing.summary.flops, nothing.loss_at("tokens", 10)) == (None, None, None)


@pytest.mark.parametrize(
    ("axis", "place"),
    [("steps", 2.5), ("tokens", 2.5 * 4096), ("seconds", 1.5), ("flops", 2.5 * 2.02e10), ("dollars", 1.5)],
)
def test_a_loss_between_two_logged_steps_is_on_the_line_between_them(
    straight_run: Path, axis: str, place: float
) -> None:
    run = read_run(straight_run, training=False, usd_per_hour=3600.0)
    assert axis in AXES
    assert run.loss_at(axis, place) == pytest.approx(7.5)
    assert run.loss_at(axis, place / 10) is None
    assert run.loss_at(axis, place * 10) is None
    assert run.loss_at(axis, 2 * place, "validation") == pytest.approx(6.5)


def test_points_are_round_and_each_run_s_end_is_one(straight_run: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(straight_run, longer)
    with open(longer / "metrics.jsonl", "a") as file:
        file.write(metrics_line(23, loss=0.5) + "\n")
    runs = [read_run(run, training=False) for run in (straight_run, longer)]
    assert equal_points(runs, "steps", 5) == [5, 10, 15, 20, 23]
    assert equal_points(runs, "steps", 2) == [10, 20, 23]
    with pytest.raises(NapkinError, match=r"price.*--usd-per-hour"):
        equal_points(runs, "dollars", 5)


def test_runs_are_found_by_name_or_in_the_folder_that_holds_them(straight_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert find_runs([str(tmp_path)]) == find_runs([str(straight_run)]) == [straight_run]
    assert find_runs([str(straight_run), str(tmp_path)]) == [straight_run]
    with pytest.raises(NapkinError, match="contains none"):
        find_runs([str(tmp_path / "empty")])


def test_the_page_draws_every_run_over_every_axis_and_asks_nothing_of_the_network(
    straight_run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "<other>"
    shutil.copytree(straight_run, other)
    runs = [read_run(run, training=False, usd_per_hour=1.0) for run in (straight_run, other)]
    page = write_comparison(tmp_path / "c.html", runs, loss="training", axis="steps", points=[5, 10]).read_text()
    assert "<other>" not in page
    assert "&lt;other&gt;" in page
    without_library = page.replace(read_asset(UPLOT), "")
    assert not re.search(r"https?://|<script src|@import", without_library)
    data = chart_data(page)
    assert list(data["axes"]) == list(AXES)
    assert data["axis"] == "steps"
    assert [list(chart) for chart in (data["charts"],)] == [["validation", "training"]]
    for chart in data["charts"].values():
        assert [(line["label"], line["colour"]) for line in chart["lines"]] == [
            ("shakespeare", "blue"),
            ("<other>", "vermilion"),
        ]
    for table in data["tables"]:
        assert table["positions"]["steps"] == list(range(1, 11))
        assert table["positions"]["tokens"] == 4096
        assert table["positions"]["flops"] == pytest.approx(2.02e10)
        assert table["curves"]["training"] == [10.0 - step for step in range(1, 11)]
        assert table["curves"]["validation"] == [None] * 4 + [6.5] + [None] * 5
    assert "<td>5.0000</td><td>5.0000</td>" in page
    # On a phone each figure stands beside its name.
    assert page.count('data-label="validation"') == 2
    unpriced = [read_run(straight_run, training=False)]
    page = write_comparison(tmp_path / "c.html", unpriced, loss="training", axis="steps", points=[5]).read_text()
    assert "dollars" not in chart_data(page)["axes"]
    with pytest.raises(NapkinError, match=f"{MOST_RUNS} runs"):
        write_comparison(tmp_path / "d.html", runs * 5, loss="training", axis="steps", points=[5])


def test_the_page_leads_with_the_lowest_validation_loss_and_says_what_the_recipes_differ_in(
    straight_run: Path, tmp_path: Path
) -> None:
    better = tmp_path / "better"
    shutil.copytree(straight_run, better)
    (better / "metrics.jsonl").write_text(
        "".join(metrics_line(step, loss=10.5 - step, validation_loss=6.0) + "\n" for step in range(1, 11))
    )
    (better / "recipe.toml").write_text("[model]\nd_model = 256\n[optimizer]\nbetas = [0.9, 0.95]\n")
    runs = [read_run(run, training=False) for run in (straight_run, better)]
    page = write_comparison(tmp_path / "c.html", runs, loss="validation", axis="tokens", points=[20_480]).read_text()
    lead = "better has the lowest validation loss, 6.0000 nats per token at step 1."
    places = [page.index(lead), page.index('data-chart="validation"'), page.index('data-chart="training"')]
    assert places == sorted(places)
    assert page.index('data-label="validation">6.0000') < page.index('data-label="validation">6.5000')
    row = re.search(r"<code>model.d_model</code></th>(.*?)</tr>", page)
    assert row
    assert row[1] == "<td>256</td><td>128</td>"
    assert "<code>optimizer.betas</code></th><td>[0.9, 0.95]</td><td>–</td>" in page
    assert "<code>name</code></th><td>–</td><td>shakespeare</td>" in page


def test_a_page_of_many_long_runs_is_below_a_megabyte(straight_run: Path, tmp_path: Path) -> None:
    with (straight_run / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            noise = step * 7919 % 997 / 997
            validation = {"validation_loss": 3 + noise} if step % 5 == 0 else {}
            file.write(metrics_line(step, loss=2 + noise, seconds=step + noise, **validation) + "\n")
    run = read_run(straight_run, training=False, usd_per_hour=1.0)
    points = equal_points([run], "tokens", 1000)
    page = write_comparison(tmp_path / "c.html", [run] * MOST_RUNS, loss="validation", axis="tokens", points=points)
    assert page.stat().st_size < 1_000_000


def chart_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])
