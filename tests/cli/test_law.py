"""`napkin law`: fits, predictions and comparisons as they are printed, and what is refused."""

import json
from pathlib import Path

import pytest

from scaling.synthetic_runs import TRUTH, synthetic_runs, true_loss


@pytest.fixture
def runs_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [f"{run.parameters},{run.tokens},{run.loss}" for run in synthetic_runs(24, noise=0.003)]
    (tmp_path / "runs.csv").write_text("\n".join(["parameters,tokens,loss", *lines]) + "\n")
    return "runs.csv"


@pytest.mark.thorough
def test_a_law_is_fitted_written_and_predicts(napkin, runs_csv: str) -> None:
    done = napkin("law", "fit", runs_csv, "--out", "law.json", "--page", "law.html", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    alpha = found["coefficients"][""]["alpha"]
    assert alpha["low"] < TRUTH["alpha"] < alpha["high"]
    assert len(found["left_out"]) == len(found["residuals"]["of_runs"]) == 24
    page = Path("law.html").read_text()
    assert page.count("<circle") == 48
    assert "/N^alpha" in page
    # Again: the page is replaced, the law is not.
    assert napkin("law", "fit", runs_csv, "--page", "law.html").status == 0
    predicted = json.loads(napkin("law", "predict", "law.json", "--params", "10B", "--tokens", "200B", "--json").out)
    loss = predicted["losses"][""]
    assert loss["low"] < true_loss(1e10, 2e11) < loss["high"]
    by_flops = json.loads(napkin("law", "predict", "law.json", "--params", "10B", "--flops", "1.2e22", "--json").out)
    assert by_flops["losses"] == predicted["losses"]
    best = json.loads(napkin("law", "predict", "law.json", "--flops", "1e22", "--json").out)["optima"][""]
    assert 6 * best["parameters"]["estimate"] * best["tokens"]["estimate"] == pytest.approx(1e22)


@pytest.mark.thorough
def test_what_is_printed_says_what_the_json_says(napkin) -> None:
    shown = napkin("law", "fit", "example", "--drop-highest", "5").out
    for text in ("0.36717", "2143.4", "0.45305", "5 runs were left out (loss 5.01, 4.67", "240 runs scatter about it"):
        assert text in shown
    compared = napkin("law", "compare", "example", "--drop-highest", "5")
    assert compared.status == 0
    assert "holds best" in compared.out


def test_approaches_of_best_sizes_find_the_exponent_and_the_bias(napkin, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["n,c,loss"]
    for flops in (1e19, 1e20, 1e21, 1e22):
        for step in range(-3, 4):
            n = (flops / 120) ** 0.5 * 2.0**step
            lines.append(f"{n},{flops},{1.8 + 400 / n**0.34 + 700 / (flops / 6 / n) ** 0.3}")
    Path("iso.csv").write_text("\n".join(lines))
    true = 0.3 / (0.34 + 0.3)
    found = json.loads(napkin("law", "fit", "iso.csv", "--approach", "2", "--flops", "1e24", "--json").out)
    assert found["exponents"]["parameters"]["estimate"] == pytest.approx(true, abs=0.01)
    assert found["bias"]["true_exponent"] == pytest.approx(true, abs=1e-4)
    # The runs are without noise, so that the bias is all of the error.
    assert found["bias"]["found_exponent"] == pytest.approx(found["exponents"]["parameters"]["estimate"], abs=1e-5)
    assert abs(found["bias"]["relative"]) > 1e-3
    assert "bias: on losses without noise" in napkin("law", "fit", "iso.csv", "--approach", "2").out
    first = json.loads(napkin("law", "fit", "iso.csv", "--approach", "1", "--json").out)
    assert first["exponents"]["parameters"]["estimate"] == pytest.approx(true, abs=0.1)


def test_a_run_is_an_observation(napkin, place: Path, refusal) -> None:
    assert "needs 6 runs or more, 1 is given" in refusal("law", "fit", "runs/tiny")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("fit", "no runs are given"),
        ("fit missing.csv", "'missing.csv' does not exist"),
        ("fit runs.csv --drop-highest 24", "there are 24 runs: leave some"),
        ("fit runs.csv --drop-highest -1", "use 0 or more"),
        ("fit runs.csv --drop-highest 19", "needs 6 runs or more, 5 are given"),
        ("fit runs.csv --delta 0", "delta is 0"),
        ("fit runs.csv --flops many", "'many' is not a count"),
        ("fit runs.csv --approach 2", "approach 2 needs 3 budgets"),
        (
            "fit runs.csv --approach 1 --out law.json",
            "'--out' does not go with --approach=1, which is `napkin law fit",
        ),
        ("fit runs.csv --out runs.csv", "exists and is not overwritten"),
        ("fit runs.csv --page runs.csv", "runs.csv"),
        ("fit runs.csv --loss-column none", "has no column 'none'"),
        ("fit runs.csv other.csv", "is not a folder"),
        ("predict runs.csv", "nothing to predict for"),
        ("predict runs.csv --params 1B", "--tokens is missing"),
        ("predict runs.csv --params 1B --tokens 1B --flops 1e18", "one too many"),
        ("predict runs.csv --params 1B --tokens 0", "--tokens is 0"),
        ("predict runs.csv --flops 1e20 --law kaplan-c", "says nothing of parameters and tokens"),
        ("predict runs.csv --flops 1e20 --training-set web", "does not know the training set 'web'"),
        ("compare runs.csv --share 1.5", "use a number between 0 and 1"),
        ("compare runs.csv --share 0.95", "runs are left to predict"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(runs_csv: str, refusal, arguments: str, complaint: str) -> None:
    assert complaint in refusal("law", *arguments.split())


@pytest.mark.thorough
def test_the_worth_of_repeated_tokens_is_printed(napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["parameters,tokens,unique_tokens,loss"]
    lines += [f"{run.parameters},{run.tokens},,{run.loss}" for run in synthetic_runs(20)]
    for epochs in (2, 4, 10, 40):
        worth = 5e9 * (1 + 15 * (1 - 2.718281828459045 ** (-(epochs - 1) / 15)))
        lines += [f"{n},{5e9 * epochs},5e9,{true_loss(n, worth)}" for n in (1e7, 2e7, 5e7)]
    Path("runs.csv").write_text("\n".join(lines))
    found = json.loads(napkin("law", "fit", "runs.csv", "--law", "data-constrained", "--json").out)
    assert found["repeated_tokens"]["estimate"] == pytest.approx(15, rel=0.01)
    shown = napkin("law", "fit", "runs.csv", "--law", "data-constrained")
    assert shown.status == 0
    assert "R_D*" in shown.out
    assert "4 epochs 93.0%" in shown.out


def test_a_loss_below_the_floor_is_told(napkin, runs_csv: str) -> None:
    Path(runs_csv).write_text(Path(runs_csv).read_text() + "1e9,2e10,1.0\n")
    done = napkin("law", "fit", runs_csv)
    assert done.status == 0
    assert "1 of the runs have a loss below the fitted floor, line 26" in done.err
