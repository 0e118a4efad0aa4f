"""The planner in a real browser: rule and count beside Python's, links from anywhere, keys alone, narrow windows."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.step_rules import step_rule
from napkin.planning.layouts.layout_plan import plan_layout
from napkin.planning.planner import resolve
from napkin.planning.step.machine import CatalogueMachine, machine_of
from napkin.recipe.toml_file import read_recipe
from napkin.studio.page_files import PAGES
from napkin.studio.rule_fields import FORMAT_BYTES, model_fields
from oracles.browser import Browser
from studio.conftest import Studio

FILES = Path(__file__).parents[2] / "src" / "napkin" / "studio" / "pages"
SMALL = "preset=gpt2&n=8&device=A100-SXM-80GB&batch_size=256&context_length=1024&micro_batch_size=8&tokens=1000000000"
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")


def show(browser: Browser, studio: Studio, link: str) -> None:
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{studio.port}/planner#{link}")
    browser.wait_for("['count', 'refused'].includes(document.body.dataset.ready)")


def figures(browser: Browser) -> dict[str, list[str]]:
    rows = "[...document.querySelectorAll('#figures tbody tr')]"
    cells = browser.run(f"{rows}.map((row) => [...row.children].map((each) => each.innerText))")
    return {name: rest for name, *rest in cells}


def test_pages_have_nothing_inline_and_nothing_from_elsewhere() -> None:
    for page in FILES.iterdir():
        # The name of SVG looks like an address, and is asked for by nobody.
        content = page.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"<style|<script>| style=| on\w+=\"|https?:", content), page
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", content), page


def test_rule_and_count_are_pythons(browser: Browser, studio: Studio, tmp_path: Path) -> None:
    show(browser, studio, SMALL)
    shown = figures(browser)
    # The recipe that the page shows, read as a file, is planned by the library.
    browser.run("document.querySelector('#recipe').open = true")
    browser.wait_for("document.querySelector('#toml').value.includes('[model]')")
    (tmp_path / "recipe.toml").write_text(browser.run("document.querySelector('#toml').value"))
    recipe = read_recipe(tmp_path / "recipe.toml")
    machine = machine_of("8xA100-SXM-80GB", device="auto")
    assert isinstance(machine, CatalogueMachine)
    plan = plan_layout(resolve(recipe, machine), machine)
    sizes: dict[str, Any] = {**model_fields(recipe.model), **FORMAT_BYTES["bf16"]}
    rule = step_rule(
        **sizes,
        batch_size=256,
        micro_batch_size=8,
        loss_chunk_size=4096,
        shard=8,
        peak=plan.site.matmul_peak,
    )
    steps = -(-(10**9) // (256 * 1024))
    assert recipe.training.steps == steps
    expected = {
        "memory of the fullest device": (rule["bytes"], plan.peak_bytes, "bytes"),
        "seconds per step": (rule["seconds"], plan.seconds, "seconds"),
        "FLOPs per step": (rule["flops"], plan.model_flops, "FLOP"),
        "MFU": (rule["mfu"], plan.mfu, "share"),
        "time of the run": (steps * rule["seconds"], steps * plan.seconds, "seconds"),
    }
    for name, (by_rule, by_count, unit) in expected.items():
        formatted = browser.run(f"[{by_rule!r}, {by_count!r}].map(FORMATS[{json.dumps(unit)}])")
        assert shown[name][:2] == formatted, name


def test_a_dragged_control_changes_the_rule_at_once_and_the_count_after(browser: Browser, studio: Studio) -> None:
    show(browser, studio, SMALL)
    before = figures(browser)
    drag = "(slider => { slider.value = Number(slider.value) + 2; slider.dispatchEvent(new Event('input')); })"
    took = browser.run(
        f"(() => {{ const begin = performance.now(); {drag}(document.querySelector('#control-micro_batch_size'));"
        " return performance.now() - begin; })()"
    )
    assert took > 0
    dragged = figures(browser)
    memory = "memory of the fullest device"
    assert dragged[memory][0] != before[memory][0]
    assert dragged[memory][1] == ""
    browser.wait_for("document.body.dataset.ready === 'count'")
    assert figures(browser)[memory][1] not in ("", before[memory][1])
    assert "micro_batch_size=16" in browser.run("location.hash")
    # The link alone gives the same plan, and another beside it.
    again = browser.run("location.hash.slice(1)")
    browser.run("document.querySelector('#beside').click()")
    show(browser, studio, again)
    assert figures(browser)[memory][0] == dragged[memory][0]
    browser.run("document.querySelector('#beside').click()")
    browser.run("document.querySelector('#changes button').click()")
    browser.wait_for("document.body.dataset.ready === 'count'")
    assert figures(browser)[memory][2] == dragged[memory][0] != figures(browser)[memory][0]


def test_what_does_not_fit_says_what_would(browser: Browser, studio: Studio) -> None:
    show(browser, studio, "preset=llama-3-8b&n=1&sharing=copies&batch_size=8&device=H100-SXM-80GB")
    assert browser.run("document.querySelector('#verdict').innerText").startswith("It does not fit: ")
    rows = browser.run("[...document.querySelectorAll('#changes tbody tr')].map((row) => row.innerText)")
    assert rows
    show(browser, studio, "preset=gpt2&n=8&batch_size=63&context_length=1024")
    assert "use a multiple of 8" in browser.run("document.querySelector('#verdict').innerText")


@pytest.mark.parametrize(
    "link",
    [
        "preset=<img src=x onerror=alert(1)>&device=__proto__&n=1e999&tokens=-4&recompute=constructor",
        "preset=gpt2&d_model=0&n_layers=NaN&n=0&batch_size=Infinity",
        "%00%ff&=&&preset",
    ],
)
def test_a_link_from_anywhere_is_data(browser: Browser, studio: Studio, link: str) -> None:
    show(browser, studio, link)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('#verdict').innerText") != ""


def test_the_controls_are_reached_and_moved_by_keys_alone(browser: Browser, studio: Studio) -> None:
    show(browser, studio, SMALL)
    reached = []
    for _ in range(len(PAGES) + 8):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
    assert {"control-preset", "control-d_model", "Width, as a number"} <= set(reached)
    browser.run("document.querySelector('#control-n_layers').focus()")
    before = browser.run("location.hash")
    browser.press("ArrowRight")
    assert browser.run("location.hash") != before
    named = "[...document.querySelectorAll('input, select, textarea, button')].filter((each) => !each.hidden)"
    unnamed = f"{named}.filter((e) => !e.labels?.length && !e.ariaLabel && !e.innerText).map((e) => e.outerHTML)"
    assert browser.run(unnamed) == []


@pytest.mark.parametrize("width", [390, 768, 1280, 2560])
def test_nothing_is_wider_than_the_window(browser: Browser, studio: Studio, width: int) -> None:
    browser.size(width, 900)
    show(browser, studio, SMALL)
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.size(1280, 800)
