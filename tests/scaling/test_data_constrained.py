"""The worth of repeated tokens is found in runs that follow the law."""

import numpy as np
import pytest

from napkin import NapkinError
from napkin.scaling import Observation, fit_data_constrained
from scaling.synthetic_runs import TRUTH, synthetic_runs

TOKENS, PARAMETERS = 15.4, 5.3


def loss(n: float, d: float, unique: float) -> float:
    """By the equations of the paper, one run at a time."""
    a, b = TRUTH["alpha"], TRUTH["beta"]
    best = (a * TRUTH["A"] / (b * TRUTH["B"])) ** (1 / a) * unique ** (b / a)
    base = min(best, n)
    data = unique + unique * TOKENS * (1 - np.exp(-(d / unique - 1) / TOKENS))
    size = base + base * PARAMETERS * (1 - np.exp(-(n / base - 1) / PARAMETERS))
    return float(TRUTH["E"] + TRUTH["A"] / size**a + TRUTH["B"] / data**b)


def repeating_runs(noise: float) -> list[Observation]:
    random = np.random.default_rng(0)
    runs = synthetic_runs(30, noise=noise)
    for epochs in (2, 4, 8, 20, 50, 100):
        for n in (2e8, 1e9, 4e9):
            for unique in (3e9, 2e10):
                factor = float(np.exp(random.normal(0, noise))) if noise else 1.0
                runs.append(Observation(n, unique * epochs, loss(n, unique * epochs, unique) * factor, None, unique))
    return runs


def test_the_worth_of_repetitions_is_found() -> None:
    law = fit_data_constrained(repeating_runs(0.0))
    assert law.repeated_tokens.estimate == pytest.approx(TOKENS, rel=1e-3)
    assert law.repeated_parameters.estimate == pytest.approx(PARAMETERS, rel=1e-3)
    assert law.predict(2e9, 5e11, 1e10).estimate == pytest.approx(loss(2e9, 5e11, 1e10), rel=1e-4)
    assert law.worth(4).estimate == pytest.approx((1 + TOKENS * (1 - np.exp(-3 / TOKENS))) / 4, rel=1e-4)


def test_its_interval_holds_the_truth_where_runs_scatter() -> None:
    law = fit_data_constrained(repeating_runs(0.002))
    assert law.repeated_tokens.low < TOKENS < law.repeated_tokens.high
    predicted = law.predict(2e9, 5e11, 1e10)
    assert predicted.low < loss(2e9, 5e11, 1e10) < predicted.high


def test_runs_that_do_not_repeat_are_refused() -> None:
    with pytest.raises(NapkinError, match=r"0.*repeat tokens, 4.*needed"):
        fit_data_constrained(synthetic_runs(20))
    repeating = [run for run in repeating_runs(0.0) if run.unique_tokens is not None]
    with pytest.raises(NapkinError, match=r"repetitions.*'chinchilla' needs 6"):
        fit_data_constrained(repeating)
