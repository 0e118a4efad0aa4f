"""What a newcomer types, one command after the other."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest

from napkin.cli.plan.output import print_plan
from napkin.data import TokenFile
from napkin.hardware.conditions import Conditions
from napkin.planning.planner import plan as make_plan
from napkin.planning.step.plan_file import plan_file_of
from napkin.recipe import read_recipe
from napkin.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("place")


def test_a_run_leaves_its_books_and_can_be_used(napkin, place: Path) -> None:
    run = Path("runs/new")
    done = napkin("train", "tiny.toml", "--run", str(run))
    assert done.status == 0
    assert "it fits, and takes about" in done.out
    assert "meter/count" in done.out
    assert "where the time went" in done.out
    assert "trained 6 steps" in done.out
    assert {"recipe.toml", "plan.json", "metrics.jsonl", "measurement.json", "report.html", "tokenizer.json"} <= {
        path.name for path in run.iterdir()
    }
    assert "bits per byte" in napkin("evaluate", str(run)).out
    assert (run / "evaluation.json").exists()
    report = (run / "report.html").read_text()
    assert "gzip" in report
    assert napkin("generate", str(run), "--save", "--tokens", "5", "--prompts", "fox", "<|endoftext|>").status == 0
    assert "<|endoftext|>" in (run / "samples.txt").read_text()
    assert napkin("report", str(run)).out == f"wrote {run}/report.html\n"
    assert "nothing was done" in napkin("resume", str(run)).out


@pytest.mark.parametrize("command", ["evaluate runs/tiny", "generate runs/tiny --prompts the --tokens 4 --save"])
def test_a_result_is_printed_although_the_report_cannot_be_written(napkin, place: Path, command: str) -> None:
    Path("runs/tiny/plan.json").write_text("{")
    done = napkin(*command.split())
    assert done.status == 2
    assert "runs/tiny/plan.json" in done.err
    assert "bits per byte" in done.out or "=== 1" in done.out


@pytest.mark.thorough
def test_every_result_is_pure_json_where_it_is_asked_for(napkin) -> None:
    commands = (
        "tokenizer train docs --vocab-size 300 --out new/tokenizer.json",
        "tokenizer encode docs --tokenizer new/tokenizer.json --out new",
        "plan tiny.toml",
        "train tiny.toml --run runs/json",
        "resume runs/json",
        "evaluate runs/json",
        "generate runs/json --tokens 3",
        "report runs/json",
    )
    results = {command.split()[0]: napkin(*command.split(), "--json") for command in commands}
    for command, done in results.items():
        assert (done.status, done.messages) == (0, []), command
        assert done.out.isascii()
    assert json.loads(results["train"].out)["step"] == 6
    assert json.loads(results["generate"].out)[0]["prompt"] == ""
    assert json.loads(results["plan"].out)["fits"] is True


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    "text",
    {
        "crlf": "line one\r\nline two\r\n" * 200,
        "byte order mark": "\ufefffirst line\nsecond\n" * 50,
        "one endless line": "title\n" + "abc def " * 5000,
        "no boundary at all": "x" * 5000,
        "emoji": "👩‍👩‍👧‍👦🦊é" * 1000,
        "carriage returns": "abc\rdef\r" * 300,
    }.items(),
    ids=lambda item: item[0],
)
def test_a_single_file_is_cut_in_two_and_no_byte_is_lost(napkin, text: tuple[str, str]) -> None:
    Path("text.txt").write_bytes(text[1].encode())
    assert napkin(*"tokenizer train text.txt --vocab-size 270 --out new/tokenizer.json".split()).status == 0
    assert napkin(*"tokenizer encode text.txt --tokenizer new/tokenizer.json --out new".split()).status == 0
    tokenizer = load_tokenizer("new/tokenizer.json")
    sides = []
    for side in ("train", "validation"):
        tokens = TokenFile.open(f"new/{side}.tokens", tokenizer_fingerprint=tokenizer.fingerprint, verify=True)
        sides.append(tokenizer.decode_bytes(tokens.tokens[1:-1].tolist()))
    assert b"".join(sides) == text[1].encode()
    assert 0.03 < len(sides[1]) / len(b"".join(sides)) < 0.07


def test_several_texts_are_read_one_after_the_other(napkin) -> None:
    done = napkin("tokenizer", "encode", "docs", "one.txt", "--out", "new", "--validation-fraction", "0", "--json")
    assert json.loads(done.out)["training"]["documents"] == 41
    assert not Path("new/validation.tokens").exists()


@pytest.mark.thorough
def test_the_standard_library_is_a_text(napkin) -> None:
    done = napkin("tokenizer", "train", "stdlib:", "--vocab-size", "257", "--out", "new.json", "--json")
    assert done.status == 0
    assert json.loads(done.out)["kinds"]["bytes"]["bytes_per_token"] == 1


@pytest.mark.thorough
def test_a_short_run_needs_no_warmup_of_its_own(napkin) -> None:
    done = napkin("train", "tiny.toml", "--run", "new", "--training.steps", "20", "--data.validation", "None", "--json")
    assert done.status == 0
    recipe = read_recipe("new/recipe.toml")
    assert recipe.optimizer.warmup_steps == 2
    assert recipe.data.validation is None


@pytest.mark.parametrize("timed_beside_others", [False, True])
@pytest.mark.parametrize("calibrated_beside_others", [False, True])
def test_figures_taken_on_a_busy_machine_say_so(
    capsys, calibrated_beside_others: bool, timed_beside_others: bool
) -> None:
    plan = make_plan(read_recipe("runs/tiny/recipe.toml"))
    conditions = Conditions(2, 2, 1.5 * timed_beside_others)
    site = dataclasses.replace(plan.site, disturbed=calibrated_beside_others)
    plan = dataclasses.replace(plan, site=site, price=dataclasses.replace(plan.price, conditions=conditions))
    print_plan(plan)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("`napkin calibrate`" in printed) is calibrated_beside_others
    assert ("measured on a busy machine, and may be more" in printed) is calibrated_beside_others
    assert ("1.5 of 2 cores" in printed) is timed_beside_others
    at_most = re.search("takes about [0-9a-z. ]+ at most", printed)
    assert bool(at_most) is (calibrated_beside_others or timed_beside_others)
    assert plan_file_of(plan).conditions == conditions


@pytest.mark.thorough
def test_a_plan_needs_no_text(napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    tiny = "--model.vocab-size 300 --model.d-model 16 --model.n-layers 1 --model.n-heads 2 --training.threads 1"
    done = napkin("plan", *tiny.split(), "--json")
    assert done.status == 0
    assert json.loads(done.out)["tokens_per_step"] == 16 * 256
    assert not list(Path().iterdir())


@pytest.mark.thorough
def test_an_optimizer_and_a_schedule_are_options(napkin, place: Path) -> None:
    chosen = ["--optimizer.name", "muon", "--optimizer.schedule", "warmup-stable-decay"]
    assert napkin("plan", "tiny.toml", *chosen).status == 0
    trained = napkin("train", "tiny.toml", *chosen, "--run", "runs/muon", "--training.parallelism", "fsdp")
    assert trained.status == 0
    assert "fsdp has nothing to shard in one process" in trained.out
    written = tomllib.loads(Path("runs/muon/recipe.toml").read_text())["optimizer"]
    assert (written["name"], written["momentum"], written["learning_rate"]) == ("muon", 0.95, 0.003)
    assert napkin("evaluate", "runs/muon").status == 0
    refused = napkin("train", "tiny.toml", "--optimizer.name", "sgd", "--optimizer.beta1", "0.9")
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "optimizer.beta1 is 0.9, but sgd has no such option: leave it out" in refused.err
