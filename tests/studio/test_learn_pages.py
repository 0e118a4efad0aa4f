"""The pages of ideas in a real browser: each is drawn, each control changes what it should, at any width and theme."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from napkin.studio.learn.ideas import IDEAS
from oracles.browser import Browser
from studio.conftest import Studio

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")

SHOWN = "document.querySelector('.results').innerHTML"
TYPED = {
    "control-text": "to be or not to be",
    "control-requests": "5+9 8+3",
    "control-value": "0.3",
    "control-rewards": "0 0 0 0 0 0 0 1",
    "control-lengths": "9 9 9 9 9 9 9 8",
}
CONTROLS = """[...document.querySelectorAll('#controls input:not([inputmode]), #controls select, #controls textarea')]
    .filter((each) => !each.closest('[hidden]')).map((each) => each.id)"""


@pytest.fixture(scope="module")
def browser(studio: Studio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        browser.open(studio.address)
        yield browser


def opened(browser: Browser, studio: Studio, idea: str, link: str = "") -> None:
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{studio.port}/learn/{idea}{link}")
    settled(browser)


def settled(browser: Browser) -> None:
    """Until the newest answer is drawn."""
    browser.wait_for("Number(document.body.dataset.drawn) > 0 && !document.querySelector('.working')")


def text(browser: Browser, name: str) -> str:
    return browser.run(f"document.getElementById('{name}').innerText")


def test_the_index_leads_to_every_idea_and_the_first_page_to_the_index(browser: Browser, studio: Studio) -> None:
    browser.open(f"http://127.0.0.1:{studio.port}/")
    assert browser.run("document.querySelectorAll('.tiles a[href=\"/learn\"]').length") == 1
    browser.open(f"http://127.0.0.1:{studio.port}/learn")
    links = browser.run("[...document.querySelectorAll('.tiles a')].map((each) => each.getAttribute('href'))")
    assert links == [f"/learn/{idea}" for idea in IDEAS]
    assert studio.ask("/learn/nothing").status == 404
    assert studio.ask("/api/learn/nothing", {}).status == 404
    assert studio.ask("/api/learn/pipelines", {"ranks": 10**6}).status == 400


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("idea", IDEAS)
def test_a_page_is_drawn_and_every_control_changes_it_by_keyboard_alone(
    browser: Browser, studio: Studio, idea: str
) -> None:
    opened(browser, studio, idea)
    assert text(browser, "verdict")
    assert browser.run("document.querySelectorAll('#picture svg').length") >= 1
    assert browser.run(
        "[...document.querySelectorAll('#picture svg')].every((each) => each.getAttribute('aria-label'))"
    )
    for control in browser.run(CONTROLS):
        before = browser.run(SHOWN)
        drawn = browser.run("document.body.dataset.drawn")
        browser.run(f"document.getElementById('{control}').focus()")
        kind = browser.run(f"document.getElementById('{control}').type")
        if kind in ("text", "textarea"):
            browser.run(f"document.getElementById('{control}').select()")
            browser.type(TYPED[control])
        else:
            at_end = browser.run(f"(e => e.value === e.max)(document.getElementById('{control}'))")
            browser.press("ArrowLeft" if at_end else "ArrowRight" if kind == "range" else "ArrowDown")
        browser.wait_for(f"document.body.dataset.drawn !== '{drawn}'")
        settled(browser)
        assert browser.run(SHOWN) != before, control
        opened(browser, studio, idea)
    assert browser.complaints == []
    elsewhere = (
        "performance.getEntriesByType('resource').filter((each) => new URL(each.name).origin !== location.origin)"
    )
    assert browser.run(f"{elsewhere}.length") == 0


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_pages_fit_from_narrow_to_wide_in_both_themes_without_motion(
    browser: Browser, studio: Studio, dark: bool
) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.do("Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}])
    try:
        for idea in IDEAS:
            for width in (390, 2560):
                browser.size(width, 900)
                opened(browser, studio, idea)
                assert browser.run("document.documentElement.scrollWidth") <= width, (idea, width)
                ends = "[...document.querySelectorAll('#picture svg')].map((e) => e.getBoundingClientRect().right)"
                widest = f"Math.max(...{ends})"
                assert browser.run(widest) <= width, (idea, width)
            assert browser.run("document.getAnimations().length") == 0
    finally:
        browser.size(1280, 800)
        browser.do("Emulation.setEmulatedMedia", features=[])
    assert browser.complaints == []


def test_a_bit_is_turned_over_and_the_address_holds_the_state(browser: Browser, studio: Studio) -> None:
    opened(browser, studio, "number-formats", "#value=1&format=fp16")
    assert "1.0 is a number of fp16" in text(browser, "verdict")
    bits = "[...document.querySelectorAll('.bits button')].map((each) => each.textContent).join('')"
    assert browser.run(bits) == "0011110000000000"
    for place, value in ((15, "1.0009765625"), (0, "-1.0009765625")):
        browser.run(f"document.querySelectorAll('.bits button')[{place}].focus()")
        browser.press("Enter")
        browser.wait_for(f"document.getElementById('verdict').textContent.includes('{value} is')")
        # The focus stays, so that the next bit is one key away.
        assert browser.run("document.activeElement.dataset.bit") == str(place)
    browser.run("document.getElementById('control-value').focus()")
    browser.run("document.getElementById('control-value').select()")
    browser.type("<img src=x onerror=document.title='taken'>")
    browser.wait_for("document.getElementById('refused').textContent.includes('is not a number')")
    assert browser.run("document.querySelectorAll('main img').length") == 0


def test_steps_of_views_are_done_and_undone(browser: Browser, studio: Studio) -> None:
    opened(browser, studio, "strides")
    browser.run("document.querySelector('[data-step=\"x.view(-1)\"]').click()")
    browser.wait_for("document.getElementById('verdict').textContent.includes('cannot be merged')")
    browser.run("document.getElementById('undo').click()")
    browser.wait_for("document.getElementById('verdict').textContent.includes('A view')")
    browser.run("document.querySelector('[data-step=\"x.contiguous()\"]').click()")
    browser.wait_for("document.getElementById('verdict').textContent.includes('a copy')")
    assert browser.run("decodeURIComponent(location.hash)") == "#steps=x.T;x.contiguous()"
    browser.run("document.getElementById('anew').click()")
    browser.wait_for("document.getElementById('verdict').textContent.includes('x itself')")


@pytest.mark.parametrize(
    ("idea", "link", "asked", "shown"),
    [
        ("pipelines", "#micro_batches=16", {"micro_batches": 16}, lambda a: f"{100 * a['bubble']:.1f}%"),
        (
            "collectives",
            "#devices=64",
            {"devices": 64},
            lambda a: f"{1e3 * a['rule']:.2f} ms",
        ),
        ("roofline", "#m=1", {"m": 1}, lambda a: f"{1e6 * a['seconds']:.1f} µs"),
        ("advantages", "", {}, lambda a: f"+{a['completions'][0]['advantage']:.2f}"),
        ("batching", "#slots=2", {"slots": 2}, lambda a: f"{a['continuous']['steps']} steps"),
        ("bpe", "#merges=7", {"merges": 7}, lambda a: f"{a['sizes'][7]}"),
        ("isoflop", "", {}, lambda a: f"{a['parameters']['estimate'] / 1e9:.1f} B"),
        ("scaling-law", "", {}, lambda a: f"{a['inside']} are inside"),
        ("step-memory", "", {}, lambda a: f"{a['none']['peak'] / 1e6:.0f} MB"),
    ],
)
def test_a_page_shows_the_figures_of_the_functions(
    browser: Browser, studio: Studio, idea: str, link: str, asked: dict[str, Any], shown: Any
) -> None:
    opened(browser, studio, idea, link)
    answer = studio.ask(f"/api/learn/{idea}", asked).json
    assert shown(answer) in browser.run("document.querySelector('.results').textContent")


def test_a_newer_question_is_the_one_that_is_drawn(browser: Browser, studio: Studio, tmp_path: Path) -> None:
    opened(browser, studio, "pipelines")
    slide = "(e => { for (let at = 4; at <= 40; at++) { e.value = at; e.dispatchEvent(new Event('input')); } })"
    browser.run(f"{slide}(document.getElementById('control-micro_batches'))")
    settled(browser)
    answer = studio.ask("/api/learn/pipelines", {"micro_batches": 41}).json
    assert f"{100 * answer['bubble']:.2f}%" in text(browser, "verdict")
