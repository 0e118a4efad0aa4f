"""The notebooks of docs/ run from top to bottom, cell by cell in one namespace, and are kept without outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("anywidget")

FOLDER = Path(__file__).parent.parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(notebook)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), namespace)


def test_notebooks_are_six_and_without_outputs() -> None:
    assert len(NOTEBOOKS) == 6
    for notebook in NOTEBOOKS:
        cells = cells_of(notebook)
        assert cells[0]["cell_type"] == "markdown"
        assert len({cell["id"] for cell in cells}) == len(cells)
        for cell in cells:
            assert cell.get("outputs", []) == []
            assert cell.get("execution_count") is None
