"""What the project's files say of one another: version, links, versions of Python, what images are made of."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import napkin
from napkin.errors import CURATION_LIBRARIES

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def test_no_link_of_the_readme_is_relative_on_a_package_index() -> None:
    readme = runpy.run_path(str(ROOT / "setup.py"))["readme_for_an_index"]()
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    here = [target.removeprefix(f"{REPOSITORY}/blob/main/") for target in targets if target.startswith(REPOSITORY)]
    assert [target for target in here if not (ROOT / target.partition("#")[0]).is_file()] == []
    assert "readme" in PROJECT["dynamic"]


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == napkin.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == REPOSITORY
    assert citation["authors"] == PROJECT["authors"]


def test_every_version_of_python_that_is_promised_is_tested() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert matrix["python"] == promised
    for included in matrix["include"]:
        assert included["os"] in matrix["os"]
        assert included["python"] in promised


def test_the_workflow_calls_what_the_makefile_has() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert sorted(commands) == ["make demo", "make docs", "make peers", "make test"]
    for command in commands:
        assert f"\n{command.removeprefix('make ')}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_is_made_of_files_that_are_there_and_not_ignored(name: str) -> None:
    let_through = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = [
        file
        for line in re.findall(r"^COPY (.+) \S+$", (ROOT / name).read_text(), re.MULTILINE)
        for file in line.split()
    ]
    assert set(copied) == let_through
    assert [file for file in copied if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_does_not_run_as_root(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert lines.index("USER ${UID}") < lines.index('ENTRYPOINT ["napkin"]')


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_every_extra_is_explained(extra: str) -> None:
    assert f"`.[{extra}]`" in (ROOT / "docs" / "install.md").read_text()


def test_no_advice_names_an_extra_by_a_distribution_that_no_index_has() -> None:
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py")]:
        assert "napkin-lm[" not in file.read_text(), file


def test_the_libraries_of_curation_are_those_of_its_extra() -> None:
    required = PROJECT["optional-dependencies"]["curation"]
    assert sorted(CURATION_LIBRARIES) == sorted(name.partition(">=")[0] for name in required)
