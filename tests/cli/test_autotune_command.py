"""`napkin autotune`: what is kept, and what is said where there is no GPU."""

import json
from pathlib import Path

import pytest

from napkin.cli import main
from napkin.kernels.triton_tiles import Choice, Device, keep_choices

CHOICE = Choice("swiglu", "bfloat16", 4096, "", {"block": 2048, "warps": 8}, 10.0, 12.5)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")


def test_tiles_that_are_kept_are_shown_for_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--show"]) == 0
    assert "no tiles are kept" in capsys.readouterr().out
    for name in ("NVIDIA A100", "NVIDIA H100"):
        keep_choices(Device(name, "8.0", "3.8.0", "abc"), [CHOICE])
    assert main(["autotune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA A100 (8.0), Triton 3.8.0, kernels abc" in shown
    assert "block 2048, warps 8" in shown
    assert "1.25" in shown
    assert main(["autotune", "--show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["device"]["name"] for each in found} == {"NVIDIA A100", "NVIDIA H100"}
    assert found[0]["choices"][0]["tile"] == {"block": 2048, "warps": 8}


def test_without_a_gpu_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--training.device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autotune: there is nothing to tune here: ")
    assert error.count("\n") == 1
