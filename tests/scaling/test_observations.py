"""Runs are read from any CSV file with the usual columns; a bad line is named."""

import json
from pathlib import Path

import pytest

from napkin import NapkinError
from napkin.scaling import read_observations
from napkin.scaling.observations import EXAMPLE, drop_highest


def read(tmp_path: Path, text: str, **options: str):
    (tmp_path / "runs.csv").write_text(text)
    return read_observations(tmp_path / "runs.csv", **options)


def test_columns_are_found_by_their_names_in_any_order(tmp_path: Path) -> None:
    found = read(tmp_path, "Val_Loss, D ,N,dataset,seed\n3.5,2e9,1e8,web,1\n3.0,4e9,2e8,books,2\n\n")
    assert [(run.parameters, run.tokens, run.loss, run.group) for run in found.runs] == [
        (1e8, 2e9, 3.5, "web"),
        (2e8, 4e9, 3.0, "books"),
    ]
    assert found.groups == ("web", "books")
    assert found.runs[0].compute == 6 * 1e8 * 2e9


def test_tokens_are_derived_from_flops_where_there_are_none(tmp_path: Path) -> None:
    found = read(tmp_path, "params,tokens,flops,loss\n1e8,,6e18,3.5\n1e8,5e9,9e18,3.4\n")
    assert [run.tokens for run in found.runs] == [1e10, 5e9]
    assert [run.compute for run in found.runs] == [6e18, 9e18]
    assert found.notes


def test_runs_without_a_finite_loss_have_diverged(tmp_path: Path) -> None:
    found = read(tmp_path, "params,tokens,loss\n1e8,2e9,nan\n1e8,2e9,3.5\n1e8,2e9,\n1e8,2e9,inf\n")
    assert len(found.runs) == 1
    assert [where.rpartition("line ")[2] for where in found.diverged] == ["2", "4", "5"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("params,tokens,loss\n1e8,2e9,3.5\n1e8,x,3.5\n", "line 3: tokens is 'x', which is not a number"),
        ("params,tokens,loss\n1e8,2e9,3.5,7\n", "line 2: 4 columns, the header has 3"),
        ("params,tokens,loss\n-1e8,2e9,3.5\n", r"line 2: parameters is -1e\+08: use 1 to"),
        ("params,tokens,loss\n1e8,nan,3.5\n", "line 2: tokens is nan"),
        ("params,tokens,loss\n1e8,,3.5\n", "line 2: tokens are missing, and so are FLOPs"),
        ("params,tokens,loss\n,2e9,3.5\n", "line 2: parameters are missing"),
        ("params,tokens,loss\n1e8,2e9,-3.5\n", "line 2: loss is -3.5"),
        ("params,tokens,loss\n1e8,1_000,3.5\n", "'1_000', which is not a number"),
        ("params,tokens,loss\n", "holds no run"),
        ("", "has no column 'loss'"),
        ("params,loss\n1,2\n", "neither a column 'tokens' nor 'flops'"),
        ("tokens,loss\n1,2\n", "has no column 'parameters'"),
        ("n,params,d,loss\n1,1,2,3\n", "more than one column for parameters"),
        ("params,tokens,loss_a,loss_b\n1,1,2,3\n", "name one of .* with --loss-column"),
        ("params,tokens,loss\n1\0,1,2\n", "NUL"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(NapkinError, match=complaint) as refusal:
        read(tmp_path, text)
    assert "\n" not in str(refusal.value)


def test_a_column_of_the_loss_can_be_named(tmp_path: Path) -> None:
    text = "params,tokens,loss_a,loss_b\n1e8,1e9,2,3\n"
    assert read(tmp_path, text, loss="loss_b").runs[0].loss == 3
    with pytest.raises(NapkinError, match="has no column 'loss_c'"):
        read(tmp_path, text, loss="loss_c")


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="does not exist"):
        read_observations(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NapkinError, match="not UTF-8 at byte 0"):
        read_observations(tmp_path / "bytes.csv")


def test_the_example_is_chinchillas_runs() -> None:
    runs = read_observations(EXAMPLE).runs
    assert len(runs) == 245
    kept, dropped = drop_highest(runs, 5)
    assert len(kept) == 240
    assert [round(run.loss, 2) for run in dropped] == [5.01, 4.67, 3.79, 3.77, 3.45]
    assert json.dumps([run.loss for run in kept]) == json.dumps([run.loss for run in runs if run not in dropped])
