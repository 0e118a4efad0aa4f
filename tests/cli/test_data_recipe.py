"""`napkin data recipe`: what is printed is a pipeline, with every stage and every option."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.conftest import Napkin
from napkin.cli.common.options import field_docstrings
from napkin.cli.data.pipelines import STANDARD, commented_pipeline
from napkin.curation.engine.pipeline_file import InputOptions, OutputOptions, pipeline_of
from napkin.curation.registry import STAGES, make_stage, stage_class

REQUIRED: dict[str, dict[str, Any]] = {
    "decontaminate": {"tasks": ["t.jsonl"]},
    "best-share": {"share": 0.5},
    "classifier": {"model": "m"},
    "importance-resampling": {"target": "t.jsonl", "share": 0.5},
    "perplexity": {"model": "m"},
    "rephrase": {"model": "m"},
    "conversations": {"model": "m"},
    "host-list": {"file": "f"},
    "word-list": {"file": "f"},
}
PAGE = Path(__file__).parents[2] / "docs" / "curation_recipe.md"


def test_what_is_printed_is_the_standard_pipeline_at_its_defaults() -> None:
    pipeline = pipeline_of(tomllib.loads(commented_pipeline()))
    assert (pipeline.input, pipeline.output) == (InputOptions(("pages/",)), OutputOptions())
    options = {"language": {"keep": ["en"]}}
    assert pipeline.stages == tuple(make_stage(name, options.get(name, {})) for name in STANDARD)


def test_every_stage_that_is_not_in_use_is_there_once_its_number_sign_is_taken_away(
    tmp_path: Path,
) -> None:
    (tmp_path / "list").write_text("word")
    optional = re.sub(
        r"(?m)^# ", "", commented_pipeline().split('name = "personal-data"')[1].partition("\n[output]")[0]
    )
    tables = tomllib.loads(optional.partition("\n\n")[2])["stage"]
    assert {*STANDARD, *(table["name"] for table in tables)} == set(STAGES)
    for table in tables:
        name = table.pop("name")
        # What is not told there has to be given.
        given = {key: value if key != "file" else f"{tmp_path}/list" for key, value in REQUIRED.get(name, {}).items()}
        assert make_stage(name, table | given) == make_stage(name, given)


@pytest.mark.parametrize("name", STAGES)
def test_every_option_stands_below_what_it_means(name: str) -> None:
    printed = commented_pipeline((name,))
    assert re.findall(r'(?m)^name = "(.+)"$', printed) == [name]
    block = printed.partition(f'name = "{name}"\n')[2].partition("\n\n[output]")[0]
    meanings = field_docstrings(stage_class(name))
    found = re.findall(r"((?:# .*\n)+?)(?:# )?(\w+) = (.+)(?:\n|$)", block)
    assert [option for _, option, _ in found] == [field.name for field in dataclasses.fields(stage_class(name))]
    for text, option, _ in found:
        said = " ".join(line.removeprefix("# ") for line in text.splitlines())
        assert said.removeprefix("To be given: ").lower() == " ".join(meanings[option].split()).lower()


def test_the_page_shows_what_the_command_prints() -> None:
    """After a change of an option, paste what `napkin data recipe` prints into docs/curation_recipe.md."""
    assert f"```toml\n{commented_pipeline()}```" in PAGE.read_text()


@pytest.mark.thorough
def test_a_printed_pipeline_runs(napkin: Napkin, tmp_path: Path) -> None:
    done = napkin("data", "recipe", "length", "duplicate-lines")
    assert done.status == 0
    (tmp_path / "pipeline.toml").write_text(done.out.replace("pages/", str(tmp_path / "pages")))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "a.txt").write_text("A page of one line that is long enough to be looked at.\n" * 2)
    assert napkin("data", "run", str(tmp_path / "pipeline.toml"), "--out", str(tmp_path / "corpus")).status == 0


def test_bands_find_what_draws_of_equal_numbers_find(napkin: Napkin) -> None:
    """Numbers of two signatures are equal with the similarity as the probability: bands of such draws are looked at."""
    done = napkin("data", "banding", "--threshold", "0.7", "--hashes", "64", "--json")
    told = json.loads(done.out)
    rows, bands = told["rows"], told["bands"]
    assert rows * bands <= 64
    draws = np.random.default_rng(0).random((4000, bands, rows))
    for pair in told["pairs"]:
        found = (draws < pair["similarity"]).all(2).any(1).mean()
        assert abs(found - pair["found"]) < 0.05
    assert next(pair["found"] for pair in told["pairs"] if pair["similarity"] == 0.7) >= 0.9


def test_a_stage_is_spelled_as_its_command(napkin: Napkin, tmp_path: Path) -> None:
    for name in STAGES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert stage_class(name).name == name
    (tmp_path / "a.txt").write_text("a text")
    for spelling in ("near duplicates", "near_duplicates", "nearduplicates"):
        (tmp_path / "p.toml").write_text(f'[input]\npaths = ["{tmp_path}/a.txt"]\n[[stage]]\nname = "{spelling}"\n')
        for command in (("run", f"{tmp_path}/p.toml"), ("recipe", spelling), (spelling, f"{tmp_path}/a.txt")):
            done = napkin("data", *command, *(("--out", f"{tmp_path}/out") if command[0] != "recipe" else ()))
            assert done.status == 2
            assert "near-duplicates" in done.err
