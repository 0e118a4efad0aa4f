"""Names that come from outside, with characters that a terminal obeys, are printed as escapes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from napkin.cli.common import progress, terminal
from napkin.recipe.toml_file import read_recipe

pytestmark = pytest.mark.usefixtures("place")

HOSTILE = "\x1b[31mred\n\x9b2J\u202e\x07"
# Tables break long names; their beginning stays whole.
ESCAPED = r"\x1b[31mred"


def printed(done) -> str:
    """What a command printed, none of which may control a terminal; line breaks of names are escaped, too."""
    text = done.out + done.err
    assert all(each.isprintable() or each == "\n" for each in text), text
    assert "red\n" not in text
    return text


def copy_run(name: str) -> str:
    shutil.copytree("runs/tiny", f"runs/{name}")
    return f"runs/{name}"


def test_runs(napkin) -> None:
    copy_run(HOSTILE)
    listed = napkin("runs", "--over", "steps", "--page", f"{HOSTILE}.html")
    assert listed.status == 0
    # In the list, in what is said of the runs, as a heading of the comparison, and in the path of the page.
    assert printed(listed).count(ESCAPED) == 4
    Path(f"runs/{HOSTILE}/plan.json").write_text("{")
    left_out = napkin("runs")
    assert r"left out: 'runs/\x1b[31mred \x9b2J\u202e\x07/plan.json' is malformed" in printed(left_out)


@pytest.mark.torture
def test_a_run_in_a_hostile_folder(napkin) -> None:
    run = f"runs/{HOSTILE}"
    assert printed(napkin("train", "tiny.toml", "--run", run)).count(ESCAPED) == 2
    shutil.copytree("data", HOSTILE)
    recipe = Path(run, "recipe.toml")
    other = json.dumps(f"{HOSTILE}/validation.tokens")
    recipe.write_text(recipe.read_text().replace('"data/validation.tokens"', other).replace("steps = 6", "steps = 8"))
    resumed = napkin("resume", run)
    assert resumed.status == 0
    assert "the recipe has changed" in printed(resumed)
    for command in ("report", "evaluate", "resume"):
        done = napkin(command, run)
        assert done.status == 0
        assert ESCAPED in printed(done)


def test_a_recipe_with_hostile_names_in_its_help(napkin) -> None:
    names = (
        f"train = {json.dumps(HOSTILE)}",
        f"validation = {json.dumps(HOSTILE)}",
        f"tokenizer = {json.dumps(HOSTILE)}",
    )
    Path("hostile.toml").write_text("\n".join(["[data]", *names]))
    assert printed(napkin("train", "hostile.toml", "--help")).count(ESCAPED) == 3
    Path("back.toml").write_text(napkin("recipe", "hostile.toml").out)
    assert read_recipe("back.toml").data == read_recipe("hostile.toml").data
    assert read_recipe("back.toml").data.train == HOSTILE


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["tokenizer", "train", "docs", "--vocab-size", "270", "--out", f"{HOSTILE}/t.json"], 1),
        (["tokenizer", "encode", "docs", "--out", HOSTILE], 2),
        (["tokenizer", "show", f"{HOSTILE}.json", "--merges", "1"], 1),
        (["tokenizer", "compare", "one.txt", "--with", f"{HOSTILE}.json"], 2),
        (["tokenizer", "export", f"{HOSTILE}.json", "--out", f"{HOSTILE}.tiktoken", "--format", "tiktoken"], 1),
        (["tokenizer", "import", HOSTILE, "--pattern", "gpt2", "--out", "new.json", "--special", "<|endoftext|>"], 1),
        (["evaluate", "runs/tiny", "--tokens", HOSTILE], 1),
        (["train", f"{HOSTILE}.toml"], 1),
        (["report", f"runs/{HOSTILE}"], 1),
        (["runs", HOSTILE], 1),
        (["train", "tiny.toml", "--run", "one.txt", "--data.train", HOSTILE], 0),
        ([HOSTILE], 1),
        (["tokenizer", HOSTILE], 1),
        (["train", f"--{HOSTILE}"], 1),
    ],
    ids=lambda value: " ".join(value)[:20].encode("unicode_escape").decode() if isinstance(value, list) else "",
)
def test_names_in_results_and_errors(napkin: Callable, command: list[str], shown: int) -> None:
    shutil.copy("data/tokenizer.json", f"{HOSTILE}.json")
    assert printed(napkin(*command)).count(ESCAPED) >= shown


def test_nothing_that_the_consoles_print_controls_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_table((HOSTILE, "b"), [(HOSTILE, "[bold]1[/bold]")])
    terminal.print_rich(HOSTILE)
    terminal.err.print(HOSTILE)
    with progress.progress_line(HOSTILE) as line:
        line.retitle(HOSTILE)
    out, err = capsys.readouterr()
    assert all(each.isprintable() or each == "\n" for each in out + err)
    assert "[bold]1[/bold]" in out
    assert out.count("\\x1b[31mred") == 3


def test_on_a_terminal_a_text_keeps_its_lines_and_loses_its_controls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(terminal.out), "is_terminal", True)
    terminal.print_verbatim("a\n\tb\x1b[2J")
    assert capsys.readouterr().out == "a\n\tb\N{REPLACEMENT CHARACTER}[2J\n"
