"""Every page of the studio by axe, in light and dark, narrow and wide; and nothing moves where people ask for that."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from napkin.studio.learn.ideas import IDEAS, LEARN
from napkin.studio.page_files import PAGES
from napkin.tokenizer import train_bpe
from oracles.browser import Browser
from reliability.harness import Napkin
from studio.conftest import Studio, started
from studio.test_studio_runs import make_run

AXE = Path(sys.prefix) / "node" / "node_modules" / "axe-core" / "axe.min.js"
PATHS = [*PAGES, *(f"{LEARN}/{idea}" for idea in IDEAS)]
pytestmark = [
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with"),
    pytest.mark.skipif(not AXE.exists(), reason="axe is not to be had: make types sets it up"),
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Iterator[Studio]:
    """A studio of a folder with a run and a tokenizer."""
    folder = tmp_path_factory.mktemp("filled")
    make_run(folder / "run", 300, scale=2.0)
    train_bpe(["a text that has some words, and some words again"], vocab_size=270).save(folder / "tokenizer.json")
    with started(Napkin(folder, server)) as studio:
        yield studio


@pytest.fixture(scope="module")
def browser(filled: Studio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(filled.address)
        yield browser


def show(browser: Browser, studio: Studio, path: str) -> None:
    browser.open(f"http://127.0.0.1:{studio.port}{path}")
    browser.wait_for("(document.querySelector('main')?.innerText ?? '').trim() !== ''")
    if path.startswith(f"{LEARN}/"):
        browser.wait_for("document.body.dataset.drawn !== undefined")
    browser.wait_for("!document.body.dataset.ready || !['asking', 'rule'].includes(document.body.dataset.ready)")


def violations(browser: Browser) -> list[Any]:
    browser.run(f"{AXE.read_text()}; 0")
    found = browser.run("axe.run(document, { resultTypes: ['violations'] }).then((each) => each.violations)")
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], each["help"], [node["html"][:200] for node in each["nodes"]]) for each in serious]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PATHS)
def test_axe_finds_nothing_serious(browser: Browser, filled: Studio, path: str, scheme: str) -> None:
    browser.prefer(scheme=scheme)
    for width in (390, 1280):
        browser.size(width, 900)
        show(browser, filled, path)
        assert violations(browser) == [], width


def test_axe_sees_what_is_wrong(browser: Browser, filled: Studio) -> None:
    show(browser, filled, "/")
    browser.run("document.querySelector('main').append(document.createElement('input')); 0")
    assert [name for name, _, _ in violations(browser)] == ["label"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("path", PATHS)
def test_nothing_moves_for_who_asks_for_less(browser: Browser, filled: Studio, path: str) -> None:
    browser.prefer(reduced_motion=True)
    show(browser, filled, path)
    duration = "(s => parseFloat(s.transitionDuration) || parseFloat(s.animationDuration))(getComputedStyle(each))"
    moving = f"[...document.querySelectorAll('*')].filter((each) => {duration})"
    assert browser.run(f"{moving}.map((each) => each.outerHTML.slice(0, 80))") == []
    assert browser.run("document.getAnimations().length") == 0
    browser.prefer()
