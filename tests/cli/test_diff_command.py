"""`napkin diff`: of files, of a file at a commit of a real repository, and of what another command has printed."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent

BEFORE = "[model]\nvocab_size = 64\ncontext_length = 16\nd_model = 16\nn_layers = 1\nn_heads = 2\n"
AFTER = BEFORE.replace("n_layers = 1", "n_layers = 2")


def git(*arguments: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *arguments], check=True, capture_output=True)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a repository that has changed since it was committed."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    Path("small.toml").write_text(BEFORE)
    git("add", "small.toml")
    git("commit", "-q", "-m", "a recipe")
    Path("small.toml").write_text(AFTER)
    Path("before.toml").write_text(BEFORE)
    return tmp_path


def test_a_recipe_is_compared_with_itself_at_a_commit(napkin, recipes: Path) -> None:
    at_commit = napkin("diff", "HEAD:small.toml", "small.toml", "--json")
    assert at_commit.status == 0
    assert json.loads(at_commit.out) == json.loads(napkin("diff", "before.toml", "small.toml", "--json").out)
    printed = napkin("diff", "HEAD:small.toml", "small.toml")
    assert "blocks.*.attention.output" in printed.out
    assert "parameters" in printed.out
    assert "the steps are equal" in "".join(napkin("diff", "HEAD:small.toml", "before.toml")[1:])


def test_recipes_are_compared_with_a_commit_each_under_limits(napkin, recipes: Path) -> None:
    Path("new.toml").write_text(AFTER)
    every = ("diff", "--since", "HEAD", "small.toml", "new.toml")
    done = napkin(*every, "--limit", "parameters=0", "--limit", "parameters=400%")
    assert done.status == 1
    assert "small.toml exceeds the limit parameters=0" in done.out + done.err
    assert "parameters=400%" not in done.out + done.err
    assert "new.toml is new since HEAD" in done.out + done.err
    assert napkin(*every, "--limit", "parameters=400%").status == 0


def test_what_count_has_printed_is_compared(napkin, recipes: Path) -> None:
    for name in ("before", "small"):
        Path(f"{name}.json").write_text(napkin("count", f"{name}.toml", "--json", "--by", "operator").out)
    found = json.loads(napkin("diff", "before.json", "small.json", "--json").out)
    # Products and norms of one block: four of 16 by 16, three of 16 by 43 (swiglu's inner width), and the norms.
    counted = [json.loads(Path(f"{name}.json").read_text()) for name in ("before", "small")]
    assert found["totals"]["flops"]["difference"] == counted[1]["flops"] - counted[0]["flops"] > 0
    assert found["totals"]["peak_bytes"]["after"] == counted[1]["peak_bytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["small.toml"], "1 step to compare: name two"),
        (["--since", "HEAD"], "nothing to compare with HEAD"),
        (["HEAD:none.toml", "small.toml"], "'HEAD:none.toml' cannot be read"),
        (["none:small.toml", "small.toml"], "'none:small.toml' cannot be read"),
        (["--output=x:small.toml", "small.toml"], "--output"),
        (["--since", "--all", "small.toml"], ""),
        (["none.json", "small.toml"], "there is no file 'none.json'"),
        (["bad.json", "small.toml"], "'bad.json' is malformed"),
        (["small.toml", "before.toml", "--limit", "size=2%"], "there is no figure 'size' to limit"),
        (["small.toml", "before.toml", "--on", "H1000"], "H1000"),
        (["small.toml", "small.json", "--limit", "seconds=2%"], "no figure seconds"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    refusal: Callable[..., str], napkin, recipes: Path, arguments: list[str], says: str
) -> None:
    Path("bad.json").write_text("{")
    if "small.json" in arguments:
        Path("small.json").write_text(napkin("count", "small.toml", "--json", "--by", "module").out)
    assert says in refusal("diff", *arguments)


STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > arguments.txt
cat printed.txt
exit "$(cat status.txt)"
"""


def test_the_action_and_the_hook_compare_a_pull_request(napkin, recipes: Path) -> None:
    """The action's script runs twice: the arguments that it gives to the command become the output that it gets."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    script = next(step for step in action["runs"]["steps"] if step["name"] == "compare")
    programs = recipes / "programs"
    programs.mkdir()
    (programs / "napkin").write_text(STAND_IN)
    (programs / "napkin").chmod(0o755)
    given = {"RECIPES": "*.toml", "SINCE": "HEAD", "DEVICES": "H100", "LIMITS": "parameters=0 flops=900%"}
    assert given.keys() == script["env"].keys()
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    environment = {**os.environ, **given, "PATH": path, "GITHUB_STEP_SUMMARY": "summary.md"}

    def run_action(printed: str, status: int) -> int:
        Path("summary.md").write_text("")
        Path("printed.txt").write_text(printed)
        Path("status.txt").write_text(str(status))
        # GitHub's own options of `shell: bash`.
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script["run"]]
        return subprocess.run(shell, env=environment, capture_output=True, check=False).returncode

    assert run_action("", 0) == 0
    done = napkin(*Path("arguments.txt").read_text().splitlines())
    assert run_action(done.out + done.err, done.status) == done.status == 1
    summary = (recipes / "summary.md").read_text()
    assert "small.toml exceeds the limit parameters=0" in summary
    assert "before.toml is new since HEAD" in summary
    assert summary.count("```") == 2
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command, *arguments = hook["entry"].split()
    assert command == "napkin"
    done = napkin(*arguments, "small.toml")
    assert (done.status, "+4,128" in done.out) == (0, True)
