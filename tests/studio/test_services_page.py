"""The page of services in a real browser: its figures are the command's, limits choose, keys and windows."""

import json
import shutil

import pytest

from napkin.model.config import preset
from napkin.planning.services.service_curve import service_curves
from oracles.browser import Browser
from studio.conftest import Studio

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
SMALL = "preset=gpt2&n=2&input_tokens=128&output_tokens=32&shortest=1"


def show(browser: Browser, studio: Studio, link: str) -> None:
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{studio.port}/services#{link}")
    browser.wait_for("['curves', 'refused'].includes(document.body.dataset.ready)")


def verdict(browser: Browser) -> str:
    return browser.run("document.querySelector('#verdict').innerText")


def test_the_page_shows_the_plans_of_the_library(browser: Browser, studio: Studio) -> None:
    show(browser, studio, SMALL)
    found = service_curves(preset("gpt2"), "2xH100", input_tokens=128, output_tokens=32)
    knees = [curve.knee for curve in found.curves]
    best = max((knee for knee in knees if knee), key=lambda knee: knee.tokens_per_second)
    assert f"tensor {best.degree.tensor}, {best.concurrency} requests in flight" in verdict(browser)
    shown = browser.run("document.querySelector('#keys').innerText")
    for value, unit in ((best.tokens_per_second, "tokens/s"), (best.times.time_to_first_token, "seconds")):
        assert browser.run(f"FORMATS[{json.dumps(unit)}]({value!r})") in shown
    assert browser.run("document.querySelectorAll('#curve .point').length") == sum(len(c.points) for c in found.curves)
    assert browser.run("document.querySelectorAll('#curve .point.knee').length") == 2
    rows = browser.run("[...document.querySelectorAll('#points tbody tr')].map((row) => row.children[0].innerText)")
    assert rows == [str(point.concurrency) for point in found.curves[0].points]


def test_limits_choose_without_asking_again(browser: Browser, studio: Studio) -> None:
    show(browser, studio, SMALL)
    found = service_curves(preset("gpt2"), "2xH100", input_tokens=128, output_tokens=32)
    browser.run("document.querySelector('[aria-label=\"Each token, ms, as a number\"]').focus()")
    limit = sorted(point.times.time_per_output_token for point in found.curves[0].points)[5]
    browser.run("document.activeElement.select()")
    browser.type(f"{1000 * limit:.6f}")
    browser.press("Enter")
    best = found.best(tpot=float(f"{1000 * limit:.6f}") / 1000)
    assert best is not None
    browser.wait_for("document.querySelector('#verdict').innerText.startsWith('With each token within')")
    assert f"tensor {best.degree.tensor}, {best.concurrency} requests in flight" in verdict(browser)
    assert "tpot=" in browser.run("location.hash")
    show(browser, studio, SMALL + "&tpot=0.001")
    assert "No number of requests holds" in verdict(browser)


def test_what_does_not_fit_and_what_is_refused_is_said(browser: Browser, studio: Studio) -> None:
    show(browser, studio, "preset=llama-3-70b&n=1")
    assert "does not fit" in verdict(browser)
    show(browser, studio, "preset=gpt2&device=A100-SXM-80GB&weights=nvfp4")
    assert browser.run("document.querySelector('#said').innerText") != ""
    assert browser.run("document.body.dataset.ready") == "refused"
    show(browser, studio, "preset=<img src=x onerror=alert(1)>&n=-3&input_tokens=1e99&kv=__proto__")
    assert browser.run("document.querySelectorAll('img').length") == 0
    # A refusal of the server is a complaint of the browser, and the only one.
    assert [each for each in browser.complaints if "/api/services/curves" not in each] == []
    browser.complaints.clear()


def test_a_control_is_moved_by_keys_and_plans_anew(browser: Browser, studio: Studio) -> None:
    show(browser, studio, SMALL)
    before = verdict(browser)
    browser.run("document.querySelector('#control-output_tokens').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.wait_for("document.body.dataset.ready === 'curves' && location.hash.includes('output_tokens=64')")
    assert verdict(browser) != "" != before
    assert "--output-tokens 64" in browser.run("document.querySelector('#command').innerText")


@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_nothing_is_wider_than_the_window(browser: Browser, studio: Studio, width: int) -> None:
    browser.size(width, 900)
    show(browser, studio, SMALL)
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.size(1280, 800)
