"""The house keeps its floors: imports run downwards, files stay readable, nothing reads a pickle."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "napkin"
FILES = sorted(SOURCE.rglob("*.py"))

# From the ground up; imports run downwards.
FLOORS = [
    {"errors"},
    {"bounds", "units", "files", "number_formats", "child_process"},
    {"tensors", "torch_compile", "machine_code", "json_files", "toml_files"},
    {"kernels"},
    {"optim", "tokenizer"},
    {"extraction", "languages", "hardware", "data", "model"},
    {"grading", "accounting"},
    {"recipe"},
    {"runs", "distributed"},
    {"report"},
    {"chats"},
    {"train_step", "evaluation"},
    {"curation"},
    {"checkpoint"},
    {"inference"},
    {"serving", "planning"},
    {"benchmarking", "hooks"},
    {"profiling"},
    {"training"},
    {"environments"},
    {"tuning", "scaling"},
    {"studio"},
    {"notebook"},
    {"cli", "__init__"},
    {"__main__"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def room_of(file: Path) -> str:
    relative = file.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def module_of(file: Path) -> str:
    parts = ("napkin", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_modules(file: Path) -> frozenset[str]:
    """Modules of napkin that a file imports, wherever in it."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("napkin."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.startswith("napkin.")}
    return frozenset(imported)


MODULES = {module_of(file): file for file in FILES}


def test_imports_run_downwards() -> None:
    for file in FILES:
        room = room_of(file)
        for module in imported_modules(file):
            imported = module.split(".")[1]
            allowed = imported == room or FLOOR_OF[imported] < FLOOR_OF[room]
            assert allowed, f"{file}: {room} imports {imported}, which stands on its floor or above"


def test_no_two_files_import_each_other_in_a_circle() -> None:
    imports = {name: imported_modules(file) & MODULES.keys() for name, file in MODULES.items()}
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle of imports: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in finished:
            for imported in sorted(imports[module]):
                visit(imported, (*path, module))
            finished.add(module)

    for module in sorted(imports):
        visit(module, ())


def test_every_room_has_a_floor() -> None:
    assert {room_of(file) for file in FILES} <= FLOOR_OF.keys()


def test_a_file_can_be_read_in_one_sitting() -> None:
    assert [file for file in FILES if len(file.read_text().splitlines()) > 600] == []


def test_files_that_docstrings_name_are_there() -> None:
    ends = [f"/{file.as_posix()}" for file in (*FILES, *(SOURCE.parents[1] / "benchmarks").glob("*.py"))]
    for file in FILES:
        for named in re.findall(r"`((?:\w+/)*\w+\.py)`", file.read_text()):
            assert any(end.endswith(f"/{named}") for end in ends), f"{file} names {named}"


def test_no_pickle_is_read() -> None:
    pickle = re.compile(r"\bpickle\b.*(load|import)|import pickle|torch\.load\(|allow_pickle|marshal|shelve")
    assert [file for file in FILES if pickle.search(file.read_text())] == []


def test_annotations_are_enforced_in_every_part_but_accounting(pytestconfig: pytest.Config) -> None:
    enforced = {
        name.removeprefix("napkin.") for name in str(pytestconfig.getoption("jaxtyping_packages")).split(",")[:-1]
    }
    assert enforced == {room_of(file) for file in FILES} - {"accounting", "__init__", "__main__", "errors"}


def test_tests_name_the_folder_of_a_conftest() -> None:
    """pytest keeps one module of the plain name `conftest`, that of the folder that it entered last."""
    plain = re.compile(r"^\s*(from|import) conftest\b", re.MULTILINE)
    files = Path(__file__).parent.rglob("*.py")
    assert [file for file in files if plain.search(file.read_text(encoding="utf-8"))] == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a test file by its plain name: a second one of the name is not collected."""
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
