"""The chat page in a real browser, against a real server."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from napkin.serving.application import POLICY
from oracles.browser import Browser
from serving.conftest import Served

PAGE = Path(__file__).parents[2] / "src" / "napkin" / "serving" / "page"


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere(served: Served) -> None:
    answer = served.get("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    page = answer.content.decode()
    assert page == (PAGE / "index.html").read_text()
    assert not re.search(r"<style|<script>| style=| on\w+=|https?:", page)
    for name in re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page):
        content = served.get(f"/{name}").content.decode()
        assert not re.search(r"https?:|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", content)


@pytest.fixture
def browser(served: Served, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{served.port}/")
        browser.wait_for("document.querySelector('#model')?.textContent.startsWith('tiny')")
        yield browser


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_a_conversation_streams_is_coloured_and_can_be_stopped(served: Served, browser: Browser) -> None:
    def answered(more: str = "true") -> None:
        browser.wait_for(f"!document.querySelector('#send').hidden && {more}")

    # A text is continued as the interface continues it.
    for name, value in {"max_tokens": 20, "seed": 7, "temperature": 1, "top_p": 1}.items():
        browser.run(f"document.querySelector('#{name}').value = {value}")
    asked = "a<img src=x onerror=document.title='taken'>"
    browser.type(asked)
    browser.press("Enter", shift=True)
    browser.type("b")
    browser.press("Enter")
    answered("document.querySelectorAll('.assistant .token').length > 0")
    (choice,) = served.complete(asked + "\nb", max_tokens=20, seed=7, logprobs=5)
    said = "[...document.querySelectorAll('.message')].map((each) => each.textContent)"
    assert browser.run(said) == [asked + "\nb", choice["text"]]
    assert browser.run("document.querySelectorAll('#messages img').length") == 0
    assert browser.run("document.title") == "tiny · napkin"
    assert browser.run("document.querySelector('#tokens').textContent").endswith("+ 20")

    # Colours and alternatives.
    assert browser.run("document.querySelector('#alternatives').hidden")
    browser.run("document.querySelector('#coloured').click()")
    browser.hover(".assistant .token")
    assert not browser.run("document.querySelector('#alternatives').hidden")
    best = max(choice["logprobs"]["top_logprobs"][0].values())
    shown = browser.run("document.querySelector('#alternatives meter').value")
    assert shown == pytest.approx(2.718281828459045**best, rel=1e-3)

    # A conversation; what was said goes with it.
    mode = "document.querySelector('#mode')"
    browser.run(f"{mode}.value = 'chat'; {mode}.dispatchEvent(new Event('change'))")
    messages = []
    for number, text in enumerate(("Hello", "Again")):
        browser.type(text)
        browser.press("Enter")
        answered(f"document.querySelectorAll('.assistant').length === {number + 1}")
        messages.append({"role": "user", "content": text})
        fields: dict[str, Any] = {"max_tokens": 20, "seed": 7, "temperature": 1}
        expected = served.post("/v1/chat/completions", messages=messages, **fields).json["choices"][0]["message"]
        assert browser.run(said)[-1] == expected["content"]
        messages.append({"role": "assistant", "content": expected["content"]})

    # Escape stops the answer, and the server stops too.
    browser.run("document.querySelector('#max_tokens').value = 1500")
    browser.run("document.querySelector('#temperature').value = 5")
    cancelled = served.metric('napkin_sequences_total{outcome="cancelled"}')
    browser.type("Go on")
    browser.press("Enter")
    browser.wait_for("document.querySelectorAll('.assistant')[2]?.textContent.length > 3")
    browser.press("Escape")
    answered()
    served.wait_until_idle()
    assert served.metric('napkin_sequences_total{outcome="cancelled"}') == cancelled + 1

    # Nothing is wider than its place, in a wide window and in a narrow one.
    widths = (
        "[...document.querySelectorAll('body, #messages, aside')].filter((e) => e.scrollWidth > e.clientWidth).length"
    )
    for width, settings in ((1280, "true"), (360, "false"), (360, "true")):
        browser.size(width, 740)
        browser.run(f"document.body.classList.toggle('settings-shown', {settings})")
        assert browser.run(widths) == 0
    browser.size(1280, 800)

    # An error of the server is shown as one line.
    browser.run("document.querySelector('#max_tokens').value = 5000")
    browser.type("More")
    browser.press("Enter")
    browser.wait_for("document.querySelector('.error')?.textContent.includes('context')")
    complaints = [each for each in browser.complaints if json.loads(each).get("entry", {}).get("level") != "verbose"]
    # The browser tells of the refused request itself.
    assert all("status of 400" in each for each in complaints), complaints
