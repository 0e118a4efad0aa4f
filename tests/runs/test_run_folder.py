import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from napkin.data.token_file import SEPARATOR
from napkin.errors import CorruptFile, NapkinError
from napkin.files import atomic_file, draft_folder
from napkin.runs.metrics import MetricsFile, StepMetrics, read_metrics
from napkin.runs.run_folder import RunFolder
from napkin.tokenizer.bpe import ByteTokenizer
from oracles.tiny_run import tiny_recipe

TOKENIZER = ByteTokenizer([SEPARATOR])


def metrics(step: int, validation_loss: float | None = None) -> StepMetrics:
    return StepMetrics(step, 10 * step, 1 / 3, 1e-3, 0.1, 2.5 * step, 0.1, 99.9, 0.5, 123, validation_loss)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", tiny_recipe("data"), TOKENIZER)


def test_a_run_folder_says_what_was_chosen(run: RunFolder) -> None:
    opened = RunFolder.open(run.path)
    assert opened.recipe == tiny_recipe("data")
    assert opened.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert opened.checkpoints.is_dir()
    assert [path.name for path in run.path.parent.iterdir()] == ["run"]


def test_what_is_there_is_not_overwritten(run: RunFolder) -> None:
    before = (run.path / "recipe.toml").read_bytes()
    with pytest.raises(NapkinError, match="napkin resume"):
        RunFolder.create(run.path, tiny_recipe("other"), TOKENIZER)
    assert (run.path / "recipe.toml").read_bytes() == before


def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NapkinError, match="cannot be created"):
        RunFolder.create(tmp_path / "file" / "run", tiny_recipe("data"), TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NapkinError, match="is not a run"):
            RunFolder.open(path)


def test_one_process_at_a_time_holds_a_run(run: RunFolder) -> None:
    script = f"""
from pathlib import Path
from napkin.errors import NapkinError
from napkin.files import atomic_file, draft_folder
from napkin.runs.run_folder import RunFolder
try:
    with RunFolder(Path({str(run.path)!r})).locked(): print("held")
except NapkinError as error: print(error)
"""
    tell = lambda: subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout  # noqa: E731
    with run.locked():
        answer = tell()
        assert "is being trained by another process" in answer
        assert answer.count("\n") == 1
    assert tell() == "held\n"


def test_json_is_replaced_whole_and_missing_is_none(run: RunFolder) -> None:
    assert run.read_json("plan.json") is None
    run.write_json("plan.json", {"a": 1})
    run.write_json("plan.json", {"a": (2, 3)})
    assert run.read_json("plan.json") == {"a": [2, 3]}
    (run.path / "plan.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"plan\.json"):
        run.read_json("plan.json")


def test_lines_come_back_as_they_were_written(run: RunFolder) -> None:
    file = MetricsFile(run.path)
    for step in (1, 2, 3):
        file.append(metrics(step, validation_loss=2.0 if step == 2 else None))
    assert list(read_metrics(file.path)) == [metrics(1), metrics(2, 2.0), metrics(3)]
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 2, 3]


def test_a_figure_that_is_not_finite_is_null_in_the_file(run: RunFolder) -> None:
    file = MetricsFile(run.path)
    file.append(dataclasses.replace(metrics(1), loss=math.inf, gradient_norm=math.nan, mfu=math.nan))
    values = json.loads(file.path.read_text(), parse_constant=pytest.fail)
    assert {name for name, value in values.items() if value is None} == {"loss", "gradient_norm", "mfu"}
    (found,) = read_metrics(file.path)
    assert all(map(math.isnan, (found.loss, found.gradient_norm, found.mfu)))
    assert dataclasses.replace(found, loss=1 / 3, gradient_norm=0.1, mfu=0.5) == metrics(1)


def test_rewinding_drops_what_lies_past_the_step_and_what_a_kill_cut_off(run: RunFolder) -> None:
    file = MetricsFile(run.path)
    for step in range(1, 8):
        file.append(metrics(step))
    whole = file.path.read_bytes()
    for cut in range(len(whole) - 5, len(whole), 2):
        file.path.write_bytes(whole[:cut])
        file.rewind(5)
        file.append(metrics(6))
        assert list(read_metrics(file.path)) == [metrics(step) for step in range(1, 7)]
        assert file.path.read_bytes().endswith(b"}\n")


def test_zeros_that_a_power_cut_left_at_the_end_are_dropped(run: RunFolder) -> None:
    file = MetricsFile(run.path)
    file.append(metrics(1))
    with open(file.path, "ab") as end:
        end.write(b"\0" * 300)
    file.rewind(4)
    assert file.path.read_text().count("\n") == 1
    assert list(read_metrics(file.path)) == [metrics(1)]


def test_rewinding_makes_the_file_and_leaves_one_alone_that_needs_nothing(run: RunFolder) -> None:
    file = MetricsFile(run.path)
    file.rewind(0)
    assert file.path.read_bytes() == b""
    file.append(metrics(1))
    before = file.path.stat()
    file.rewind(1)
    assert (file.path.stat().st_ino, file.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@contextmanager
def files_of_at_most(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: for moments only, its output may be a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_clear_line_and_its_broken_line_is_dropped(run: RunFolder) -> None:
    file = MetricsFile(run.path)
    file.append(metrics(1))
    file.append(metrics(2))
    with pytest.raises(NapkinError, match="after step 3: make room"), files_of_at_most(600):
        file.append(metrics(3))
    assert file.path.stat().st_size == 600
    file.rewind(9)
    assert list(read_metrics(file.path)) == [metrics(1), metrics(2)]


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(run: RunFolder) -> None:
    of_writers = [f".{name}.{'0123' * 4}.tmp" for name in ("metrics.jsonl", "plan.json", "report.html")]
    for name in (*of_writers, ".report.html.0123.tmp", ".plan.json.mine.tmp", "notes.tmp"):
        (run.path / name).touch()
    beside = run.path.with_name(f".run.{'4567' * 4}.tmp")
    (beside / "checkpoints").mkdir(parents=True)
    run.remove_leftovers()
    left = {path.name for path in run.path.iterdir()}
    kept = {".report.html.0123.tmp", ".plan.json.mine.tmp", "notes.tmp"}
    assert left == {"run.json", "recipe.toml", "tokenizer.json", "checkpoints", *kept}
    assert not beside.exists()


def test_what_a_live_process_writes_is_not_taken_for_a_leftover(run: RunFolder) -> None:
    with atomic_file(run.path / "report.html", "w") as page, draft_folder(run.path) as draft:
        page.write("half")
        run.remove_leftovers()
        assert draft.is_dir()
        page.write(" whole")
    assert (run.path / "report.html").read_text() == "half whole"


def test_a_recipe_that_was_spoiled_is_named(run: RunFolder) -> None:
    (run.path / "recipe.toml").write_text("[training]\nstep = 4\n")
    with pytest.raises(NapkinError, match=r"mean 'training\.steps'"):
        _ = RunFolder.open(run.path).recipe
    os.remove(run.path / "tokenizer.json")
    with pytest.raises(NapkinError, match=r"tokenizer\.json"):
        _ = run.tokenizer
