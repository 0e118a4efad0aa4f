"""`import napkin` resolves names at first use; a submodule of the same name would take a function's place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
STUBS = sorted((SOURCE / "napkin").rglob("__init__.pyi"))


def package_of(stub: Path) -> str:
    return ".".join(stub.parent.relative_to(SOURCE).parts)


def submodules_of(stub: Path) -> set[str]:
    modules = {path.stem for path in stub.parent.glob("*.py")} - {"__init__", "__main__"}
    return modules | {path.parent.name for path in stub.parent.glob("*/__init__.py")}


def names_and_modules(stub: Path) -> dict[str, str | None]:
    """The public names of a package, each with the submodule that defines it; None for a submodule itself."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module for node in imports for alias in node.names}


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_no_public_name_is_also_the_name_of_a_submodule(stub: Path) -> None:
    names, submodules = names_and_modules(stub), submodules_of(stub)
    assert names
    assert not {name for name, module in names.items() if module is not None and name in submodules}
    assert {name for name, module in names.items() if module is None} <= submodules


@pytest.mark.thorough
def test_public_names_stay_what_they_are_whatever_was_imported_before() -> None:
    lines = [f"import {package_of(stub)}.{name}" for stub in STUBS for name in sorted(submodules_of(stub))]
    lines.append("import types")
    for stub in STUBS:
        for name, module in names_and_modules(stub).items():
            lines.append(f"assert isinstance({package_of(stub)}.{name}, types.ModuleType) == {module is None}")
    lines += ["assert isinstance(napkin.count, types.FunctionType)", "assert isinstance(napkin.Ledger, type)"]
    lines.append("assert napkin.count is napkin.accounting.count")
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
