"""Times of a service beside published measurements: benchmarks/published_serving.csv."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from napkin.hardware.service_efficiency import service_efficiencies

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that reads published measurements."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("published_serving")


def sizes(found: list[tuple[Any, Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors [row, 2] without their sign, and the share of each column that the intervals hold."""
    errors = np.abs(np.expm1(np.array([each[1] for each in found])))
    return errors, np.mean([each[2] for each in found], axis=0)


@pytest.mark.thorough
def test_the_constants_in_use_are_within_the_errors_that_they_state(published: Any) -> None:
    rows = published.read_measurements()
    assert len(rows) == 442
    for name, server in service_efficiencies().items():
        own = [row for row in rows if row["backend"] == name and published.is_fitted_to(row)]
        errors, held = sizes(published.judged(own, {name: server}))
        assert len(errors) == server.rows
        assert np.median(errors, axis=0) == pytest.approx([server.tpot_residual, server.ttft_residual], rel=0.01)
        assert np.all(np.abs(held - 0.9) < 0.03)


@pytest.mark.torture
def test_constants_found_on_h200_predict_b200(published: Any) -> None:
    rows = published.read_measurements()
    servers = {
        name: published.fitted(name, [row for row in rows if (row["backend"], row["system"]) == (name, "h200_sxm")])
        for name in ("vllm", "trtllm")
    }
    errors, held = sizes(published.judged([row for row in rows if row["system"] == "b200_sxm"], servers))
    assert len(errors) == 264
    assert np.median(errors[:, 0]) < 0.10
    assert np.quantile(errors[:, 0], 0.9) < 0.25
    assert np.median(errors[:, 1]) < 0.25
    assert np.all((held >= 0.84) & (held <= 0.96))


def test_a_roofline_at_the_datasheets_peaks_is_several_times_too_fast(published: Any) -> None:
    rows = published.read_measurements()
    slower = [row.measured[0] / published.roofline(row)[0] for row in rows]
    assert 3 < np.median(slower) < 4
