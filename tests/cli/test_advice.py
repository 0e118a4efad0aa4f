"""What an error or a hint tells a user to do can be done, as it is written."""

import doctest
import json
import re
import shutil
from pathlib import Path

import pytest

from napkin import errors
from napkin.recipe.toml_file import read_recipe
from napkin.training.run import recipe_differences

pytestmark = pytest.mark.usefixtures("place")


def lengthen(run: str, steps: int) -> None:
    """Give a finished run more steps to do."""
    file = Path(run, "recipe.toml")
    file.write_text(re.sub(r"(?m)^steps = \d+$", f"steps = {steps}", file.read_text()))


@pytest.mark.thorough
def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(errors).failed == 0


@pytest.mark.thorough
def test_a_resumed_run_finds_its_text_where_it_is_told_and_remembers_it(napkin, refusal) -> None:
    lengthen("runs/tiny", 8)
    Path("data").rename("moved")
    assert "name yours with --data.train" in refusal("resume", "runs/tiny")
    places = ["--data.train", "moved/train.tokens", "--data.validation", "moved/validation.tokens"]
    done = napkin("resume", "runs/tiny", *places)
    assert (done.status, "trained 8 steps" in done.out) == (0, True)
    data = read_recipe("runs/tiny/recipe.toml").data
    assert (data.train, data.validation) == ("moved/train.tokens", "moved/validation.tokens")
    lengthen("runs/tiny", 10)
    assert napkin("resume", "runs/tiny").status == 0
    assert napkin("evaluate", "runs/tiny").status == 0


def test_another_text_under_the_same_option_is_refused(refusal) -> None:
    lengthen("runs/tiny", 8)
    line = refusal("resume", "runs/tiny", "--data.train", "data/validation.tokens")
    assert "'data/validation.tokens': these are not the tokens that 'runs/tiny' was trained with" in line
    assert "there is no token file 'none'" in refusal("resume", "runs/tiny", "--data.validation", "none")


@pytest.mark.thorough
def test_a_run_without_its_validation_text_can_do_without(napkin, refusal) -> None:
    lengthen("runs/tiny", 8)
    Path("data/validation.tokens").unlink()
    assert "do without: --data.validation None" in refusal("resume", "runs/tiny")
    assert napkin("resume", "runs/tiny", "--data.validation", "None").status == 0


def test_a_moved_text_is_not_another_recipe() -> None:
    recipe = read_recipe("tiny.toml")
    assert recipe_differences(recipe, Path("runs/tiny")) == []
    Path("data").rename("moved")
    Path("moved.toml").write_text(
        Path("tiny.toml").read_text()
        + '\n[data]\ntrain = "moved/train.tokens"\nvalidation = "moved/validation.tokens"\n'
        + 'tokenizer = "moved/tokenizer.json"\n'
    )
    assert recipe_differences(read_recipe("moved.toml"), Path("runs/tiny")) == []
    other = Path("moved.toml").read_text().replace("moved/", "one/")
    Path("other.toml").write_text(other)
    differences = recipe_differences(read_recipe("other.toml"), Path("runs/tiny"))
    assert [each.partition(" ")[0] for each in differences] == ["data.train", "data.validation", "data.tokenizer"]


def test_a_finished_run_is_said_to_be_finished_without_a_plan(napkin) -> None:
    shutil.rmtree("data")
    done = napkin("resume", "runs/tiny")
    assert (done.status, done.err) == (0, "")
    assert done.out == "runs/tiny is at step 6 of 6: nothing was done\nreport: runs/tiny/report.html\n"
    said = json.loads(napkin("resume", "runs/tiny", "--json").out)
    assert said == {
        "run": "runs/tiny",
        "step": 6,
        "stopped_by": None,
        "checkpoint": "runs/tiny/checkpoints/step-00000006",
        "table": [],
    }


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        ("runs", "it holds runs: choose a --run in it, such as runs/run"),
        ("docs", "it is a folder without a run: choose a --run in it, such as docs/run"),
        ("one.txt", "it is a file, not a run: choose another --run"),
        ("runs/tiny", "continue it with `napkin resume runs/tiny` or choose another --run"),
    ],
)
def test_a_taken_name_for_a_run_says_what_is_there(refusal, path: str, way_out: str) -> None:
    line = refusal("train", "tiny.toml", "--run", path)
    assert line == f"train: '{path}' exists and is not overwritten: {way_out}"


@pytest.mark.thorough
def test_the_name_that_is_advised_for_a_run_is_free(napkin, refusal) -> None:
    for _ in range(2):
        name = refusal("train", "tiny.toml", "--run", "runs").rpartition(" ")[2]
        assert napkin("train", "tiny.toml", "--run", name).status == 0


@pytest.mark.parametrize("command", ["resume", "evaluate", "generate", "report"])
def test_a_run_is_found_in_the_folder_around_it_or_in_it(napkin, refusal, command: str) -> None:
    holds = "no run.json" if command in ("resume", "report") else "neither run.json nor config.json"
    assert refusal(command, "runs").endswith(f", it holds {holds}: name a run in it: runs/tiny")
    assert refusal(command, "runs/tiny/checkpoints").endswith("name the run that it is in: runs/tiny")
    assert "it is a file: name a folder" in refusal(command, "one.txt")


@pytest.mark.parametrize("name", ["GPT2", "Gpt2"])
def test_a_preset_is_known_in_any_case(napkin, name: str) -> None:
    assert napkin("recipe", "--preset", name).out == napkin("recipe", "--preset", "gpt2").out


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("recipe --preset GPT-2", "did you mean 'gpt2'?"),
        ("recipe --preset GTP-2", "did you mean 'gpt2'?"),
        ("recipe --preset zzz", "use one of gpt2, gpt2-medium"),
        ("recipe --optimizer.name AdamW", "(did you mean adamw?)"),
        ("recipe --model.norm RMS", "use one of rms, layer, none (did you mean rms?)"),
        ("count --by operater", "use one of component, operator, module, phase (did you mean operator?)"),
        ("fit --on 8xh101", "the closest names are H100-SXM-80GB"),
        ("hardware rtx4091", "the closest names are RTX-4090"),
        ("plan --params 7B --on H100 --format bf17", "did you mean bf16?"),
        ("recipe --model.dmodel 8", "did you mean --model.d-model?"),
        ("tokenizer compare text --wiht one.json", "did you mean --with?"),
        ("tokenizer compare text --zzz", "there is no option '--zzz'"),
        ("generate runs/tiny --no-savee", "did you mean --save?"),
        ("Train", "did you mean `napkin train`?"),
    ],
)
def test_a_near_miss_is_answered_with_the_name_that_is_meant(refusal, command: str, hint: str) -> None:
    assert hint in refusal(*command.split())


def test_a_word_that_is_not_a_number_has_the_example_of_one(napkin, refusal) -> None:
    line = refusal("formats", "abc")
    assert line.startswith("formats: 'abc' is not a number: give one, as in `napkin formats 1e-8`")
    assert napkin("formats", "1e-8").status == 0
    assert "missing from napkin fit: --on " in refusal("fit")


def test_a_misspelt_file_is_not_compared_as_a_text(napkin, refusal) -> None:
    line = refusal("tokenizer", "compare", "nosuchfile.txt", "--learn-from", "one.txt")
    assert line.startswith("tokenizer: 'nosuchfile.txt' does not exist: name a file")
    options = ["--learn-from", "one.txt", "--vocab-size", "280"]
    assert "add --literal" in line
    assert napkin("tokenizer", "compare", "nosuchfile.txt", "--literal", *options).status == 0
    assert napkin("tokenizer", "compare", "words with a dot.", *options).status == 0


def test_a_folder_with_tokenizer_json_alone_is_imported(napkin, refusal) -> None:
    Path("theirs").mkdir()
    line = refusal("tokenizer", "import", "theirs", "--out", "new.json")
    assert "'theirs' holds neither tokenizer.json nor a .tiktoken file" in line
    assert napkin("tokenizer", "export", "data/tokenizer.json", "--out", "theirs/tokenizer.json").status == 0
    assert napkin("tokenizer", "import", "theirs", "--out", "new.json").status == 0
    line = refusal("tokenizer", "import", "data", "--out", "newer.json")
    assert "'data/tokenizer.json' is a tokenizer of napkin already" in line
