"""`import napkin` resolves names at first use; a submodule of the same name would take a function's place."""

import ast
import subprocess
import sys
from pathlib import Path

import napkin.accounting

FOLDER = Path(napkin.accounting.__file__).parent


def test_no_public_name_is_also_the_name_of_a_submodule() -> None:
    stub = ast.parse((FOLDER / "__init__.pyi").read_text())
    public = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    submodules = {path.stem for path in FOLDER.iterdir() if path.suffix in (".py", "") and path.stem != "__init__"}
    assert public
    assert not public & submodules


def test_count_is_the_function_whatever_was_imported_before() -> None:
    submodules = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
    program = "\n".join(
        [
            *(f"import napkin.accounting.{name}" for name in submodules),
            "import napkin, types",
            "assert isinstance(napkin.count, types.FunctionType), napkin.count",
            "assert isinstance(napkin.Ledger, type), napkin.Ledger",
            "assert napkin.count is napkin.accounting.count",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True)
