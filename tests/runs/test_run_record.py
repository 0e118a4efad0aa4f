import json
import math
import re
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.runs.run_record import read_run_record


def metrics_of(run: Path, *lines: str) -> list[int]:
    (run / "metrics.jsonl").write_text("\n".join(lines))
    return [logged.step for logged in read_run_record(run).metrics]


def line(step: int) -> str:
    return json.dumps({"step": step, "tokens": 8 * step, "seconds": 0.5 * step, "loss": 3.0})


def test_a_run_is_read_with_every_figure_in_its_place(full_run):
    run = read_run_record(full_run)
    assert run.name == "shakespeare"
    assert run.plan is not None
    assert run.plan.device.matmul_peak == 1.2e12
    assert [logged.step for logged in run.metrics] == list(range(1, 301))
    assert run.metrics[99].validation_loss is not None
    assert run.measurement is not None
    assert run.measurement.table[0].exact
    assert run.evaluation is not None
    assert run.evaluation.bytes == 22_500


def test_what_is_not_there_yet_is_none_or_empty(planned_run):
    (planned_run / "plan.json").unlink()
    run = read_run_record(planned_run)
    assert (run.plan, run.metrics, run.measurement, run.evaluation, run.samples) == (None, (), None, None, None)


def test_wherever_a_kill_cuts_the_last_line_the_earlier_lines_are_read(planned_run):
    last = line(4).encode()
    for cut in range(len(last)):
        (planned_run / "metrics.jsonl").write_bytes("\n".join([line(1), line(2), ""]).encode() + last[:cut])
        assert [logged.step for logged in read_run_record(planned_run).metrics] == [1, 2]


def test_a_last_line_of_bytes_that_are_no_text_is_left_out(planned_run):
    (planned_run / "metrics.jsonl").write_bytes(line(1).encode() + b"\n" + b"\0" * 40 + b"\xff")
    assert [logged.step for logged in read_run_record(planned_run).metrics] == [1]


def problem_of(run: Path) -> str:
    (problem,) = read_run_record(run).problems
    assert "\n" not in problem
    return problem


def test_a_broken_line_before_the_last_is_named_with_its_number_and_the_others_are_read(planned_run):
    assert metrics_of(planned_run, line(1), line(2)[:-4], line(3)) == [1, 3]
    assert "metrics.jsonl': damaged line, left out: line 2 (" in problem_of(planned_run)


def test_a_whole_last_line_of_the_wrong_kind_is_named(planned_run):
    assert metrics_of(planned_run, line(1), '{"step": "two", "tokens": 2, "seconds": 1}') == [1]
    assert "line 2 (Expected `int`, got `str` - at `$.step`)" in problem_of(planned_run)


def test_steps_taken_again_after_a_resume_replace_the_earlier_ones(planned_run):
    assert metrics_of(planned_run, *map(line, [1, 2, 3, 4, 3, 4, 5])) == [1, 2, 3, 4, 5]
    assert metrics_of(planned_run, *map(line, [1, 2, 3, 4, 2])) == [1, 2]


def test_figures_that_are_absent_or_null_are_nan(planned_run):
    lines = [line(1), json.dumps({"step": 2, "tokens": 16, "seconds": 1.0, "loss": None, "mfu": 0.5})]
    (planned_run / "metrics.jsonl").write_text("\n".join(lines))
    first, second = read_run_record(planned_run).metrics
    assert (first.loss, first.bytes, first.validation_loss) == (3.0, 0, None)
    assert math.isnan(first.mfu)
    assert math.isnan(first.tokens_per_second)
    assert math.isnan(second.loss)
    assert second.mfu == 0.5


@pytest.mark.parametrize("name", ["step", "tokens", "seconds"])
def test_a_line_without_step_tokens_or_seconds_is_named(planned_run, name):
    values = json.loads(line(2))
    del values[name]
    assert metrics_of(planned_run, line(1), json.dumps(values)) == [1]
    assert re.search(f"line 2 .*{name}", problem_of(planned_run))


def test_empty_metrics_are_no_steps(planned_run):
    assert metrics_of(planned_run, "") == []
    assert metrics_of(planned_run, "", "") == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", b"{"),
        ("plan.json", b"[]"),
        ("plan.json", b'{"napkin": "0.1.0"}'),
        ("plan.json", b"\xff\xfe"),
        ("measurement.json", b'{"table": [{"quantity": "x", "unit": "miles"}], "seconds": {}, "steps": 3}'),
        ("measurement.json", b'{"table": [], "seconds": {"data": "long"}, "steps": 3}'),
        ("evaluation.json", b'{"loss": NaN}'),
        ("evaluation.json", b""),
        ("recipe.toml", b'name = "\xff"'),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(full_run, name, content):
    (full_run / name).write_bytes(content)
    with pytest.raises(NapkinError, match=f"{name}' is malformed") as caught:
        read_run_record(full_run)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(planned_run):
    (planned_run / "samples.txt").mkdir()
    with pytest.raises(NapkinError, match=r"samples\.txt'"):
        read_run_record(planned_run)


def test_a_folder_without_a_recipe_is_no_run(tmp_path):
    for path in [tmp_path, tmp_path / "missing"]:
        with pytest.raises(NapkinError, match="is not a run folder"):
            read_run_record(path)


def test_samples_that_are_no_utf8_are_shown_with_replacements(planned_run):
    (planned_run / "samples.txt").write_bytes(b"to be \xff or not")
    assert read_run_record(planned_run).samples == "to be \N{REPLACEMENT CHARACTER} or not"
