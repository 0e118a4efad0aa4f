"""JSON and TOML files of a run with values that nobody would write: one line that names the file, or a page; never a
traceback."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from napkin.checkpoint.folder import read_checkpoint
from napkin.errors import NapkinError
from napkin.recipe.toml_file import read_recipe
from napkin.report.comparison import equal_points, point_rows, read_run, summary_rows, write_comparison
from napkin.report.page import render_report
from napkin.runs.metrics import format_metrics, parse_metrics
from napkin.runs.run_folder import RunFolder
from napkin.runs.run_record import read_run_record
from napkin.tokenizer.tokenizer_file import load_tokenizer
from reliability.conftest import Tally
from reliability.harness import Napkin

DEEP = "\0deep"
"""In place of a value: a list in a list in a list ... so deep that it cannot be held."""
HOSTILE = (
    None,
    True,
    -1,
    0,
    0.5,
    2**31,
    2**63,
    10**30,
    10**400,
    1e39,
    1e308,
    -1e308,
    5e-324,
    "",
    "NaN",
    "\ud800",
    "../../../etc/passwd",
    "\x1b[2J",
    "9" * 5000,
    [],
    [None],
    [[1], {}, "x"],
    {},
    {"": {"": 1}},
    float("nan"),
    float("inf"),
    DEEP,
)


def places_of(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """The path to each value within a value."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_of(each, (*place, name))


def replaced(value: Any, place: tuple, new: Any) -> str:
    """JSON text of the value with another one at a place; NaN and Infinity as Python's json writes them."""
    changed = deepcopy(value)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = new
    return json.dumps(changed).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)


def removed(value: Any, place: tuple) -> str:
    changed = deepcopy(value)
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    del inner[place[-1]]
    return json.dumps(changed)


def without_checksum(path: Path) -> Any:
    values = json.loads(path.read_text())
    values.pop("crc32", None)
    return values


def variants(path: Path) -> Iterator[str]:
    """The text of a file with each value replaced by each hostile one, or removed."""
    value = without_checksum(path)
    for place in places_of(value):
        yield removed(value, place)
        for new in HOSTILE:
            yield replaced(value, place, new)


def one_line(error: Exception, *names: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1000
    assert any(name in text for name in names), text


@pytest.fixture
def run(napkin: Napkin, uninterrupted: Path) -> Path:
    """The finished run, evaluated."""
    shutil.copytree(uninterrupted, napkin.folder / "run")
    assert napkin.run("evaluate", "run").status == 0
    return napkin.folder / "run"


def look_at(run: Path, page: Path) -> None:
    """Everything that reads a run without its weights."""
    render_report(read_run_record(run), training=True)
    compared = read_run(run, training=False)
    points = equal_points([compared], "tokens", 5) if compared.summary.step else []
    summary_rows([compared])
    point_rows([compared], "tokens", points, "training")
    page.unlink(missing_ok=True)
    write_comparison(page, [compared], loss="training", axis="tokens", points=points)


def try_all(run: Path, name: str, tries: int | None, rendered: int) -> Counter[str]:
    """Try variants of a file, all or `tries`, in random order; of those that are accepted `rendered` become pages."""
    path, page = run / name, run.parent / "comparison.html"
    whole, found = path.read_bytes(), list(variants(path))
    found = random.Random(name).sample(found, min(tries or len(found), len(found)))
    outcomes: Counter[str] = Counter()
    for text in found:
        path.write_text(text)
        try:
            read_run_record(run)
            RunFolder.open(run)
            if outcomes["read"] < rendered:
                look_at(run, page)
            outcomes["read"] += 1
        except NapkinError as error:
            one_line(error, name, "is a run of format", "none of these runs has")
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{name}: {text[:3000]}") from error
    path.write_bytes(whole)
    return outcomes


FILES = ("run.json", "plan.json", "measurement.json", "evaluation.json")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", FILES)
def test_hostile_values_are_refused_in_one_line_or_shown(run: Path, name: str, tally: Tally) -> None:
    outcomes = try_all(run, name, tries=60, rendered=2)
    assert outcomes["refused"] > 20
    tally(f"a hostile value in {name}", outcomes.total())


@pytest.mark.torture
@pytest.mark.parametrize("name", FILES)
def test_every_hostile_value_is_refused_in_one_line_or_shown(
    run: Path, name: str, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = try_all(run, name, tries=None, rendered=150)
    tally(f"every hostile value in {name}", outcomes.total())
    with capsys.disabled():
        print(f"\n{name}: {outcomes.total():,} values: {dict(outcomes)}", end="")


@pytest.mark.thorough
def test_a_hostile_line_of_metrics_is_named_and_left_out_or_shown(run: Path, tally: Tally) -> None:
    metrics, page = run / "metrics.jsonl", run.parent / "comparison.html"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()[:12]]
    old = [{name: each for name, each in line.items() if name not in ("crc32", "previous_step")} for line in lines]
    old[9]["expert_tokens"], old[9]["dropped_tokens"] = [[1, 2], [3, 4]], [0, 1]
    draw, outcomes, shown = random.Random(0), Counter(), 0
    for place in places_of(old[9]):
        for new in HOSTILE:
            texts = [json.dumps(line) for line in old]
            texts[9] = replaced(old[9], place, new)
            metrics.write_text("\n".join(texts) + "\n")
            record = read_run_record(run)
            named = any("line 10 (" in problem for problem in record.problems)
            assert named or record.metrics
            outcomes["named" if named else "read"] += 1
            if not named and draw.random() < 0.015:
                shown += 1
                look_at(run, page)
    assert shown
    assert outcomes["named"] > 100
    tally("a hostile value in a line of metrics.jsonl", outcomes.total())


def write_state(checkpoint: Path, text: str) -> None:
    """Write state.json; its checksum is right, as that of whoever wrote it would be."""
    (checkpoint / "state.json").write_text(text)
    sums = (checkpoint / "SHA256SUMS").read_text().splitlines()
    kept = [line for line in sums if "state.json" not in line]
    checksum = sha256((checkpoint / "state.json").read_bytes()).hexdigest()
    (checkpoint / "SHA256SUMS").write_text("\n".join([*kept, f"{checksum}  state.json", ""]))


@pytest.mark.thorough
def test_hostile_values_in_the_state_of_a_checkpoint_are_refused_or_harmless(run: Path, tally: Tally) -> None:
    checkpoint = run / "checkpoints" / "step-00000040"
    state = json.loads((checkpoint / "state.json").read_text())
    metrics = parse_metrics((run / "metrics.jsonl").read_text().splitlines()[-1])
    state["history"]["unfinished"] = format_metrics(metrics)
    for name in ("validation_losses", "recent_losses"):
        state["history"][name] = state["history"][name][-2:]
    outcomes: Counter[str] = Counter()
    places = [place for place in places_of(state) if place[0] != "recipe" or len(place) < 3]
    for place in places:
        for text in (removed(state, place), *(replaced(state, place, new) for new in HOSTILE)):
            write_state(checkpoint, text)
            try:
                read_checkpoint(checkpoint)
            except NapkinError as error:
                one_line(error, "state.json")
                outcomes["refused"] += 1
            else:
                outcomes["read"] += 1
    for unfinished in ("", "x", "{}", format_metrics(metrics).replace('"step": 40', '"step": 41'), "[" * 10**5):
        write_state(checkpoint, replaced(state, ("history", "unfinished"), unfinished))
        with pytest.raises(NapkinError, match=r"state\.json.*history\.unfinished"):
            read_checkpoint(checkpoint)
    assert outcomes["refused"] > 200
    tally("a hostile value in state.json", outcomes.total())


@pytest.mark.torture
def test_a_run_is_resumed_from_any_state_that_is_read(
    napkin: Napkin, run: Path, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoints" / "step-00000040"
    state = json.loads((checkpoint / "state.json").read_text())
    state["history"]["unfinished"] = format_metrics(parse_metrics((run / "metrics.jsonl").read_text().splitlines()[-1]))
    saved = run.with_name("saved")
    shutil.copytree(run, saved)
    draw, outcomes = random.Random(0), Counter()
    places = list(places_of(state))
    for place in draw.sample(places, min(120, len(places))):
        shutil.rmtree(run)
        shutil.copytree(saved, run)
        write_state(checkpoint, replaced(state, place, draw.choice(HOSTILE)))
        for command in (("evaluate", "run"), ("resume", "run")):
            done = napkin.run(*command)
            assert "Traceback" not in done.err.read_text(), (place, done.err.read_text())
            assert done.status in (0, 2), (place, done.status)
            outcomes[f"{command[0]}: {done.status}"] += 1
    tally("resumed from a hostile state.json", outcomes.total())
    with capsys.disabled():
        print(f"\nstate.json: {dict(outcomes)}", end="")


@pytest.mark.thorough
def test_hostile_values_in_recipe_and_tokenizer_are_refused_in_one_line(run: Path, tally: Tally) -> None:
    recipe, tokenizer, tries = run / "recipe.toml", run / "tokenizer.json", 0
    text = recipe.read_text()
    hostile = ("-1", "0", "1e308", "nan", "inf", "9" * 400, '""', '"x"', "[]", "{}", "[[1]]", "true", "[" * 5000)
    for line in [line for line in text.splitlines() if " = " in line]:
        for value in hostile:
            tries += 1
            recipe.write_text(text.replace(line, f"{line.partition(' = ')[0]} = {value}", 1))
            try:
                read_recipe(recipe)
            except NapkinError as error:
                one_line(error, "recipe.toml")
    for name in variants(tokenizer):
        tries += 1
        tokenizer.write_text(name)
        try:
            load_tokenizer(tokenizer)
        except NapkinError as error:
            one_line(error, "tokenizer.json")
    tally("a hostile value in recipe.toml or tokenizer.json", tries)


def test_a_damaged_plan_is_named_before_the_first_step(napkin: Napkin, run: Path) -> None:
    plan = (run / "plan.json").read_text()
    for damaged in (plan[:-40], re.sub(r'"seconds": ', '"seconds": 1', plan, count=1), "[]", "\xff\x00"):
        (run / "plan.json").write_text(damaged, encoding="latin-1")
        before = (run / "metrics.jsonl").read_bytes()
        resumed = napkin.run("resume", "run")
        assert resumed.status == 2
        assert len(resumed.errors) == 1
        assert "'run/plan.json' is malformed" in resumed.errors[0]
        assert (run / "metrics.jsonl").read_bytes() == before
    (run / "plan.json").unlink()
    assert napkin.run("resume", "run").status == 0
