"""Tables fit the terminal: no line is wider, no word and no figure is broken, no column is lost."""

import doctest
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from napkin.cli.common import terminal
from napkin.cli.common.terminal import Column, lay_out, print_table
from reliability import harness

SIZES = "--params 70B --on 1024xH100 --tokens 15T --rules --n-layers 80 --d-model 8192 --n-heads 64 --vocab-size 128256"
MODEL = "--model.vocab-size 4096 --model.d-model 64 --model.n-layers 2 --model.n-heads 2 --model.context-length 64"
COMMANDS = [
    "hardware",
    "hardware H100",
    "formats",
    "formats 1e-8",
    "formats 0.1",
    f"plan {SIZES}",
    f"plan {MODEL} --rules --by module --memory-options --on A100",
    f"plan {MODEL} --rules --by module --on 8xH100",
    f"count {MODEL}",
    f"count {MODEL} --by module",
    f"count {MODEL} --by component",
    f"count {MODEL} --target cuda",
    "runs runs",
    "runs runs --over flops",
    "evaluate runs/tiny",
    "tokenizer compare one.txt --vocab-size 300",
    "tokenizer show data/tokenizer.json",
    "tokenizer show data/tokenizer.json --word jumping",
    "tokenizer train one.txt --vocab-size 280 --out new.json",
]
FIGURE = re.compile(r"(?<![\w.])\d[\d,.]* ?(?:[kMGTPEZ]?(?:FLOP/s|FLOP|B/s|B)|[KMGT]iB|%)(?!\w)")


def set_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let the command believe that its output is a terminal without colours."""
    monkeypatch.setattr(terminal.out, "_width", columns)
    monkeypatch.setattr(terminal.out, "_force_terminal", True)
    monkeypatch.setattr(terminal.out, "_color_system", None)


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(terminal).failed == 0


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_prints_fits(napkin, place: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    if "runs runs" in command:
        shutil.copytree("runs/tiny", "runs/a-second-run-with-a-long-name")
    printed: dict[int, str] = {}
    for columns in (80, 10_000):
        set_width(monkeypatch, columns)
        Path("new.json").unlink(missing_ok=True)
        done = napkin(*command.split())
        assert done.status in (0, 2), done.err
        printed[columns] = done.out
    for columns in printed.keys() - {10_000}:
        for line in printed[columns].splitlines():
            assert len(line) <= columns, line
        assert words(printed[columns]) >= words(printed[10_000]) - {"seconds"}


def words(text: str) -> set[str]:
    """The words of a text without its measured figures, whose values differ from run to run."""
    pieces = re.findall(r"[A-Za-z][A-Za-z-]{2,}", text)
    return set(pieces)


def test_a_piped_table_is_not_narrowed_and_a_name_in_it_is_whole(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    piped = harness.Napkin(tmp_path, server)
    command = f"count {MODEL} --by module".split()
    # pytest-xdist sets it.
    wide = f"import os; os.environ.pop('COLUMNS', None); from napkin.cli import main; assert main({command}) == 0"
    done = piped.run(program=wide)
    assert done.status == 0, done.errors
    assert "blocks.*.feed_forward.gate_up" in done.out.read_text()
    narrow = piped.run(*command, environment={"COLUMNS": "80"})
    assert narrow.status == 0, narrow.errors
    tables = [line for line in narrow.out.read_text().splitlines() if "FLOP" in line and "  " in line]
    tables = [line for line in tables if "parameters" not in line and "elementwise" not in line]
    assert tables
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_every_cell_of_a_table_is_printed_whole_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    set_width(monkeypatch, columns)
    headings = ["name of it", *(f"quantity {n}" for n in range(9))]
    rows = [[f"row.{i}.of_the_table", *(f"{i}{n}.{n} GFLOP" for n in range(9))] for i in range(5)]
    print_table(headings, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert all(cell in text for row in rows for cell in row[1:])


def test_a_table_with_room_is_laid_out_with_its_natural_widths() -> None:
    columns = [Column(10, 5), Column(7, 7)]
    (block,) = lay_out(columns, 80, edge=True)
    assert (block.widths, block.gap, block.has_edge) == ((10, 7), 2, True)
    (block,) = lay_out(columns, 15, edge=True)
    assert sum(block.widths) + block.gap <= 15
    assert [each.columns for each in lay_out([Column(9, 9)] * 4, 22, edge=False)] == [(0, 1), (0, 2), (0, 3)]


def test_columns_that_are_least_needed_are_left_out_before_a_name_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = ["pipeline 2 · shard 4, interleaved-1f1b", "data 4 · tensor 2"]
    rows = [(name, "8.90 GB", "42.6 ms", "1.54 M", "257 M") for name in layouts]
    for columns, left_out in ((90, set()), (78, {"tokens per dollar"}), (62, {"tokens per dollar", "tokens/s"})):
        set_width(monkeypatch, columns)
        headings = ("layout", "peak", "per step", "tokens/s", "tokens per dollar")
        print_table(headings, rows, droppable=("tokens per dollar", "tokens/s"))
        title, *lines = capsys.readouterr().out.splitlines()
        assert {heading for heading in headings if heading not in title} == left_out
        assert [line.strip().partition("  ")[0] for line in lines] == layouts
        assert max(map(len, [title, *lines])) <= columns
