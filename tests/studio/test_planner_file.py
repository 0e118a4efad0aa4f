"""The planner as one file, opened from the disk in a real browser: its counts are the library's, the rest by rule."""

import json
import shutil
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.studio.planner_file import COUNTED_ON, write_planner_file
from napkin.studio.plans import first_request, plan_by_count, planner_catalogue
from oracles.browser import Browser

ON = "8xH100-SXM-80GB"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "planner.html"
    assert write_planner_file(path, counted_on=[ON], models=["gpt2"]) == 1
    return path


def test_the_file_is_small_asks_for_nothing_and_replaces_nothing(page: Path) -> None:
    content = page.read_text()
    plans = len(planner_catalogue()["models"]) * len(COUNTED_ON)
    embedded = json.loads(content.split('type="application/json">')[1].split("</script>")[0])
    of_a_plan = len(json.dumps(embedded["counts"], separators=(",", ":")))
    # With all plans that the command counts, 200 at least.
    assert plans >= 200
    assert len(content) + plans * of_a_plan < 150_000
    assert not any(each in content for each in ("https:", "unsafe", 'src="'))
    with pytest.raises(NapkinError, match=r"planner\.html"):
        write_planner_file(page, counted_on=[], models=[])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_its_counts_are_the_librarys_and_what_has_none_says_so(page: Path, tmp_path: Path) -> None:
    plan = plan_by_count(first_request("gpt2", ON), lambda doing: None)
    with Browser(tmp_path / "profile") as browser:
        for link, is_counted in (("preset=gpt2&n=8", True), ("preset=gpt2&n=8&batch_size=1024", False)):
            browser.open("about:blank")
            browser.open(f"{page.as_uri()}#{link}")
            browser.wait_for("['count', 'refused'].includes(document.body.dataset.ready)")
            verdict = browser.run("document.querySelector('#verdict').innerText")
            if is_counted:
                shown = browser.run(f"FORMATS.bytes({plan['peak_bytes']})")
                assert f"{shown} by count" in verdict
            else:
                assert "by rule" in verdict
                assert browser.run("document.querySelector('#counted').innerText").startswith("Not counted")
        assert browser.complaints == []
