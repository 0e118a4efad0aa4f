"""Approaches 1 and 2, power laws, laws compared, runs left out, and the noise of gradients against known truths."""

from typing import Any

import numpy as np
import pytest

from napkin import NapkinError
from napkin.scaling import (
    Observation,
    approach_1,
    approach_2,
    compare_laws,
    fit_law,
    fit_power_law,
    leave_one_out,
    noise_of_gradients,
)
from napkin.scaling.isoflop import parabola_minimum
from scaling.synthetic_runs import synthetic_runs


def curves(*, shift: float = 0.0, loss=lambda offset: 0.05 * offset**2) -> list[Observation]:
    """Runs at five budgets; their best size is exactly 0.09·C^0.5."""
    runs = []
    for flops in (1e18, 1e19, 1e20, 1e21, 1e22):
        for offset in np.linspace(-1.5, 1.5, 7) + shift:
            size = 0.09 * flops**0.5 * float(np.exp(offset))
            runs.append(Observation(size, flops / 6 / size, 2 + 5 * flops**-0.05 + loss(offset), flops))
    return runs


def test_parabolas_find_the_minimum_of_parabolas() -> None:
    found = approach_2(curves(shift=0.3))
    assert len(found.best) == 5
    for best in found.best:
        assert best.parameters == pytest.approx(0.09 * best.flops**0.5, rel=1e-6)
    parameters, tokens = found.optimum(1e24)
    assert parameters.estimate == pytest.approx(9e10, rel=1e-5)
    assert tokens.estimate == pytest.approx(1e24 / 6 / 9e10, rel=1e-5)


def test_losses_of_the_best_sizes_have_the_law_of_the_optima() -> None:
    """With one exponent a for both terms the best loss is E + 2 · sqrt(A·B) · (6/C)^(a/2)."""
    runs = []
    for flops in 10.0 ** np.arange(17, 22):
        best = (flops / 6) ** 0.5
        for factor in np.geomspace(0.7, 1 / 0.7, 5):
            size = best * factor
            tokens = flops / 6 / size
            runs.append(Observation(float(size), float(tokens), 1.8 + 1000 / size**0.34 + 1000 / tokens**0.34))
    found = approach_2(runs)
    for flops in (1e22, 1e23):
        loss = found.best_loss(flops)
        assert loss is not None
        assert loss.estimate == pytest.approx(1.8 + 2000 * (6 / flops) ** 0.17, rel=3e-4)
    assert approach_2(runs[:15]).best_loss(1e22) is None


def test_a_minimum_outside_the_sizes_is_left_out() -> None:
    smaller = [run for run in curves() if run.flops != 1e22]
    edge = [*smaller, *(run for run in curves(shift=1.7) if run.flops == 1e22)]
    found = approach_2(edge)
    assert [best.at_edge for best in found.best] == [False] * 4 + [True]
    assert found.notes
    assert found.parameters.exponents["flops"].estimate == pytest.approx(0.5, abs=1e-6)


def test_the_envelope_is_what_no_cheaper_run_beats() -> None:
    runs = curves()
    beaten = Observation(1e9, 1e20 / 6e9, 9.0, 1e20)
    found = approach_1([*runs, beaten])
    assert [best.flops for best in found.best] == [1e18, 1e19, 1e20, 1e21, 1e22]
    assert found.parameters.exponents["flops"].estimate == pytest.approx(0.5, abs=1e-6)


def test_a_parabola_that_opens_downwards_has_no_minimum() -> None:
    at = np.array([0.0, 1.0, 2.0, 3.0])
    assert parabola_minimum(at, -((at - 1) ** 2)) is None


def test_a_power_law_is_that_of_scipy() -> None:
    from scipy.stats import linregress

    random = np.random.default_rng(0)
    x = 10 ** random.uniform(1, 4, 15)
    y = 3 * x**-0.4 * np.exp(random.normal(0, 0.1, 15))
    theirs: Any = linregress(np.log(x), np.log(y))
    ours = fit_power_law(y, size=x)
    exponent = ours.exponents["size"]
    assert exponent.estimate == pytest.approx(theirs.slope)
    assert exponent.high - exponent.estimate == pytest.approx(theirs.stderr * 1.7709333959868734)
    assert ours.constant.estimate == pytest.approx(float(np.exp(theirs.intercept)))
    assert ours.predict(size=50.0).estimate == pytest.approx(float(np.exp(theirs.intercept)) * 50**theirs.slope)


def test_a_power_law_of_two_variables_is_found() -> None:
    random = np.random.default_rng(1)
    n, d = 10 ** random.uniform(7, 9, 12), 10 ** random.uniform(9, 11, 12)
    law = fit_power_law(0.7 * n**-0.3 * d**0.1, parameters=n, tokens=d)
    assert law.exponents["parameters"].estimate == pytest.approx(-0.3)
    assert law.exponents["tokens"].estimate == pytest.approx(0.1)
    assert law.predict(parameters=1e10, tokens=1e12).estimate == pytest.approx(0.7 * 1e10**-0.3 * 1e12**0.1)


def test_power_laws_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(NapkinError, match="needs 3 points, 2 are given"):
        fit_power_law([1.0, 2.0], x=[1.0, 2.0])
    with pytest.raises(NapkinError, match="above 0 alone"):
        fit_power_law([1.0, 2.0, -1.0], x=[1.0, 2.0, 3.0])
    with pytest.raises(NapkinError, match="do not vary"):
        fit_power_law([1.0, 2.0, 3.0, 4.0], x=[1.0, 2.0, 3.0, 4.0], z=[2.0, 4.0, 6.0, 8.0])


def test_the_law_that_the_runs_follow_predicts_best() -> None:
    found = compare_laws(synthetic_runs(40, noise=0.001), ["gadre", "kaplan", "chinchilla", "kaplan-n"])
    assert found.scores[0].law == "chinchilla"
    assert found.scores[0].median_error < 0.002
    assert found.scores[-1].law == "kaplan-n"
    assert found.fitted + found.predicted == 40
    assert "kaplan-n" not in found.tied


def test_leaving_a_run_out_is_fitting_the_others() -> None:
    runs = synthetic_runs(20, noise=0.01, seed=4)
    fitted = fit_law(runs)
    left_out = leave_one_out(fitted)
    assert len(left_out) == 20
    assert [each.shift for each in left_out] == sorted((each.shift for each in left_out), reverse=True)
    first = left_out[0]
    others = fit_law([run for run in runs if run is not first.run], delta=fitted.delta, draws=2).law
    assert first.coefficients["alpha"] == pytest.approx(others.coefficients[""]["alpha"].estimate, rel=2e-3)
    predicted = others.predict(first.run.parameters, first.run.tokens).estimate
    assert first.error == pytest.approx(float(np.log(first.run.loss / predicted)), abs=2e-4)


def test_the_noise_scale_of_known_gradients_is_found() -> None:
    random = np.random.default_rng(0)
    gradient = random.normal(0, 1, 200)
    deviations = np.exp(random.normal(0, 1, 200))

    def mean_squared_norm(batch: int, steps: int = 4000) -> float:
        noise = random.normal(0, 1, (steps, 200)) * deviations / np.sqrt(batch)
        return float(((gradient + noise) ** 2).sum(1).mean())

    found = noise_of_gradients(4, mean_squared_norm(4), 64, mean_squared_norm(64))
    assert found.squared_gradient == pytest.approx(float(gradient @ gradient), rel=0.02)
    assert found.simple_noise_scale == pytest.approx(float((deviations**2).sum() / (gradient @ gradient)), rel=0.03)
    assert found.progress(found.simple_noise_scale) == pytest.approx(0.5)
    with pytest.raises(NapkinError, match="average over more steps"):
        noise_of_gradients(4, 1.0, 64, 2.0)
    with pytest.raises(NapkinError, match="a smaller and a larger one"):
        noise_of_gradients(64, 1.0, 4, 2.0)
