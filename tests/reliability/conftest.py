import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from napkin.training.recipe import format_recipe
from reliability.harness import Napkin, fork_server
from training.tiny_run import tiny_recipe, write_tiny_text


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    # A calibration takes seconds: one, and not one a test, where nobody has said where it is kept.
    os.environ.setdefault("NAPKIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    with fork_server() as server:
        yield server


@pytest.fixture
def napkin(tmp_path: Path, server: subprocess.Popen[str]) -> Napkin:
    """Commands in a folder that holds a text, and a recipe named recipe.toml."""
    write_tiny_text(tmp_path)
    (tmp_path / "recipe.toml").write_text(format_recipe(tiny_recipe(".")))
    return Napkin(tmp_path, server)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Path:
    """The run that nothing happened to, in a folder of the same make."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_tiny_text(folder)
    (folder / "recipe.toml").write_text(format_recipe(tiny_recipe(".")))
    assert Napkin(folder, server).run("train", "recipe.toml", "--run", "run").wait() == 0
    return folder / "run"
