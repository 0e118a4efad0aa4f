import json
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import tiny_recipe, write_tiny_text
from reliability.harness import Napkin
from reliability.rank_cases import Case
from reliability.ranks import run_script_of_ranks


def in_folder_of_tiny_run(folder: Path, server: subprocess.Popen[str]) -> Napkin:
    """Commands in an empty folder, which gets a text and a recipe named recipe.toml."""
    write_tiny_text(folder)
    (folder / "recipe.toml").write_text(format_recipe(tiny_recipe(".")))
    return Napkin(folder, server)


@pytest.fixture
def napkin(tmp_path: Path, server: subprocess.Popen[str]) -> Napkin:
    """Commands in a folder that holds a text, and a recipe named recipe.toml."""
    return in_folder_of_tiny_run(tmp_path, server)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Path:
    """The run that nothing happened to, in a folder of the same make."""
    napkin = in_folder_of_tiny_run(tmp_path_factory.mktemp("uninterrupted"), server)
    assert napkin.run("train", "recipe.toml", "--run", "run").wait() == 0
    return napkin.folder / "run"


class TrainOnRanks(Protocol):
    """Lets so many ranks train cases in the test's folder, as a script of this folder has it."""

    def __call__(self, size: int, cases: dict[str, Case], script: str = "rank_cases.py") -> None: ...


@pytest.fixture
def train_on_ranks(tmp_path: Path, server: subprocess.Popen[str]) -> TrainOnRanks:
    """Each figure and checkpoint is in a file of the test's folder then."""

    def train(size: int, cases: dict[str, Case], script: str = "rank_cases.py") -> None:
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        run_script_of_ranks(Path(__file__).with_name(script), server, tmp_path, size)

    return train


Tally = Callable[..., None]


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Say how often something was tried; the table of all cases is printed when the tests have ended."""

    def add(case: str, tries: int = 1, inside: int = 0) -> None:
        request.node.user_properties.append(("reliability", (case, tries, inside)))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Case, tries, lost: a failed test counts its tries, or one, as lost."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, told in getattr(report, "user_properties", []):
                if name == "reliability" and report.when == "call":
                    case, tries, inside = told
                    lost = tries if outcome == "failed" else 0
                    rows[case] = [a + b for a, b in zip(rows[case], (tries, inside, lost), strict=True)]
    if not rows:
        return
    terminalreporter.section("reliability")
    width = max(map(len, rows))
    terminalreporter.write_line(f"{'case':<{width}}  tries  inside a write  lost")
    for case, (tries, inside, lost) in rows.items():
        terminalreporter.write_line(f"{case:<{width}}  {tries:>5}  {inside or '':>14}  {lost:>4}")
