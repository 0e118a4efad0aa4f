"""Every command and every Python block in README and docs runs, in the order of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# CHANGELOG tells of files as they were.
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[list[str]]:
    """The page's commands, as arguments of a process: shell lines behind `$ `, Python blocks whole."""
    commands = []
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            commands.append([sys.executable, "-c", text])
        else:
            commands += [["bash", "-c", line[2:]] for line in text.splitlines() if line.startswith("$ ")]
    return commands


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_every_command_of_the_page_works(page: Path, tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    for command in commands_of(page):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", prose_of(page)):
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(other), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_the_tests_and_benchmarks_that_a_page_names_exist(page: Path) -> None:
    for named in re.findall(r"`((?:tests|benchmarks)/[\w./-]*)`", prose_of(page)):
        assert (ROOT / named).exists(), f"{page.name} names {named}"


def prose_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_an_anchor_is_the_heading_in_small_letters_without_signs(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# What `x` is, and why\n\n```\n# no heading\n```\n")
    assert anchors_of(tmp_path / "page.md") == {"what-x-is-and-why"}
