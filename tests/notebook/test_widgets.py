"""Widgets of notebooks: their pages in a real browser, answered by the functions behind them as a kernel would."""

import base64
import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.studio.learn.ideas import IDEAS
from napkin.studio.learn.ranks import PipelineRequest, pipeline_answer
from oracles.browser import Browser
from studio.test_studio_runs import make_run

pytest.importorskip("anywidget")
from napkin.notebook import LearnChart, PageWidget, PlanChart, RunChart

in_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
NOTE = (
    "window.asked = []; window.addEventListener('message', ({ data }) => { if (data.path) window.asked.push(data); });"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        browser.do("Page.addScriptToEvaluateOnNewDocument", source=NOTE)
        yield browser


def answers_of(widget: PageWidget, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a kernel would send: the widget's own handler, with what it sends kept."""
    sent: list[dict[str, Any]] = []
    widget.send = lambda content, buffers=None: sent.append(content)  # pyright: ignore[reportAttributeAccessIssue]
    for question in questions:
        widget._handle_custom_msg(question, [])
    return sent


def shown(browser: Browser, widget: PageWidget, place: Path, until: str) -> None:
    """Open the widget's page, and answer what it asks until a condition is true."""
    place.write_text(widget.page, encoding="utf-8")
    browser.open(place.as_uri())
    for _ in range(400):
        questions = browser.run("window.asked.splice(0)")
        for answer in answers_of(widget, questions):
            browser.run(f"window.postMessage({json.dumps(answer)}, '*')")
        if browser.run(until):
            return
        browser.run("new Promise((done) => setTimeout(done, 50))")
    raise AssertionError(browser.run("document.body.innerText"))


@in_browser
def test_an_idea_is_drawn_from_its_first_state_and_its_controls_ask_the_kernel(
    browser: Browser, tmp_path: Path
) -> None:
    widget = LearnChart("pipelines", ranks=8, micro_batches=32)
    page = tmp_path / "page.html"
    shown(browser, widget, page, "document.querySelectorAll('#picture svg').length > 0")
    answer = pipeline_answer(PipelineRequest(ranks=8, micro_batches=32, stages_per_rank=2))
    assert f"{100 * answer['bubble']:.1f}%" in browser.run("document.getElementById('verdict').textContent")
    assert browser.run("document.querySelectorAll('#picture text').length") > 8
    before = browser.run("document.getElementById('verdict').textContent")
    browser.run("document.getElementById('control-ranks').focus()")
    browser.press("ArrowRight")
    browser.wait_for("window.asked.length === 1")
    (question,) = browser.run("window.asked.splice(0)")
    assert (question["path"], json.loads(question["body"])["ranks"]) == ("/api/learn/pipelines", 9)
    (told,) = answers_of(widget, [question])
    browser.run(f"window.postMessage({json.dumps(told)}, '*')")
    browser.wait_for(f"document.getElementById('verdict').textContent !== {json.dumps(before)}")


@in_browser
@pytest.mark.parametrize("idea", IDEAS)
def test_every_idea_is_drawn_as_a_widget(browser: Browser, tmp_path: Path, idea: str) -> None:
    shown(browser, LearnChart(idea), tmp_path / "page.html", "document.querySelectorAll('#picture svg').length > 0")
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert browser.complaints == []


@in_browser
def test_the_planner_shows_rule_and_count(browser: Browser, tmp_path: Path) -> None:
    widget = PlanChart("gpt2", on="8xH100", batch_size=64, micro_batch_size=8)
    shown(browser, widget, tmp_path / "page.html", "document.body.dataset.ready === 'count'")
    assert browser.run("document.getElementById('control-preset').value") == "gpt2"
    assert (
        "batch_size = 64" in browser.run("document.getElementById('toml').value")
        or browser.run("document.getElementById('control-batch_size').getAttribute('aria-valuetext')") == "64"
    )


@in_browser
def test_a_frame_passes_questions_and_answers(browser: Browser) -> None:
    widget = LearnChart("roofline")
    browser.open("about:blank")
    code = base64.b64encode((files("napkin.notebook") / "frame.js").read_bytes()).decode()
    traits = json.dumps({"page": widget.page, "title": widget.title, "height": widget.height})
    browser.run(
        f"""(async () => {{
          const traits = {traits}, listeners = [];
          window.sent = []; window.tell = (told) => listeners.forEach((each) => each(told));
          const model = {{
            get: (name) => traits[name], send: (data) => window.sent.push(data),
            on: (_, listener) => listeners.push(listener), off() {{}},
          }};
          const {{ default: made }} = await import("data:text/javascript;base64,{code}");
          window.end = made.render({{ model, el: document.body }});
        }})()"""
    )
    browser.wait_for("window.sent.length === 1")
    (question,) = browser.run("window.sent.splice(0)")
    assert question["path"] == "/api/planner/catalogue"
    (told,) = answers_of(widget, [question])
    browser.run(f"window.tell({json.dumps(told)})")
    # The answer has reached the page in the frame: it goes on to its next question.
    browser.wait_for("window.sent.length === 1")
    assert browser.run("window.sent[0].path") == "/api/learn/roofline"
    assert browser.run("document.querySelector('iframe').getAttribute('sandbox')") == "allow-scripts"


def test_what_cannot_be_answered_is_said_in_a_line() -> None:
    widget = LearnChart("pipelines")
    asked = [
        {"number": 1, "path": "/api/learn/pipelines", "body": '{"ranks": 1000000}'},
        {"number": 2, "path": "/api/learn/pipelines", "body": '{"schedule": "none"}'},
        {"number": 3, "path": "/api/runs", "body": None},
        {"number": 4, "path": "/api/learn/pipelines", "body": "{"},
    ]
    told = answers_of(widget, asked)
    assert [each["status"] for each in told] == [400, 422, 404, 400]
    assert all("\n" not in each["content"]["error"] for each in told)
    with pytest.raises(NapkinError, match="'pipeline'"):
        LearnChart("pipeline")
    with pytest.raises(NapkinError, match="H1000"):
        PlanChart("gpt2", on="8xH1000")


def test_a_run_is_its_report(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 30, scale=2.0)
    widget = RunChart(tmp_path / "run")
    assert "<html" in widget.page
    assert widget.title == "Report of run"
    with pytest.raises(NapkinError):
        RunChart(tmp_path / "nothing")
