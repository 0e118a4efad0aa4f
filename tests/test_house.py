"""The house keeps its floors: imports run downwards, files stay readable, nothing reads a pickle."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "napkin"
FILES = sorted(SOURCE.rglob("*.py"))

FLOORS = [
    {"errors", "units", "files"},
    {"compiler", "tokenizer", "optim", "kernels"},
    {"formats", "data", "model"},
    {"hardware", "inference", "tensors"},
    {"accounting"},
    {"training", "report"},
    {"cli", "__init__"},
    {"__main__"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# Within a floor a house stands on its neighbour where the neighbour does not stand on it.
NEIGHBOURS = {("files", "errors"), ("units", "errors")}


def part_of(file: Path) -> str:
    relative = file.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            if module.startswith("napkin."):
                yield module.split(".")[1]


def test_imports_run_downwards() -> None:
    for file in FILES:
        part = part_of(file)
        for imported in imported_parts(file):
            allowed = imported == part or FLOOR_OF[imported] < FLOOR_OF[part] or (part, imported) in NEIGHBOURS
            assert allowed, f"{file}: {part} imports {imported}, which stands on its floor or above"


def test_every_part_has_a_floor() -> None:
    assert {part_of(file) for file in FILES} <= FLOOR_OF.keys()


def test_a_file_can_be_read_in_one_sitting() -> None:
    assert [file for file in FILES if len(file.read_text().splitlines()) > 400] == []


def test_no_pickle_is_read() -> None:
    pickle = re.compile(r"\bpickle\b.*(load|import)|import pickle|torch\.load\(|allow_pickle|marshal|shelve")
    assert [file for file in FILES if pickle.search(file.read_text())] == []


def test_annotations_are_enforced_in_every_part_but_accounting(pytestconfig: pytest.Config) -> None:
    enforced = {
        name.removeprefix("napkin.") for name in str(pytestconfig.getoption("jaxtyping_packages")).split(",")[:-1]
    }
    assert enforced == {part_of(file) for file in FILES} - {"accounting", "__init__", "__main__", "errors"}
