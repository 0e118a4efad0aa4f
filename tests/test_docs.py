"""Every command and every Python block in README and docs runs, in the order of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
