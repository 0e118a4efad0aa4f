"""The law's own error beyond its runs: found where it is, small where it is not, and part of every interval."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from napkin import NapkinError
from napkin.scaling import FittedLaw, Observation, compare_laws, fit_law, read_law
from napkin.scaling.fitted_law import interval_of_new_run, quantile_shares
from napkin.scaling.rolling_origin import Origin, discrepancy_rates, rolling_error
from scaling.synthetic_runs import synthetic_runs, true_loss


def budgets(
    levels: int, noise: float, seed: int, bend: Callable[[float], float] = lambda flops: 0.0
) -> list[Observation]:
    """IsoFLOP curves of six sizes at budgets twice as large from level to level; log losses are those of the true law
    plus `bend` of their FLOPs and normal noise."""
    random = np.random.default_rng(seed)
    runs = []
    for flops in 1e17 * 2.0 ** np.arange(levels):
        for size in (flops / 120) ** 0.5 * np.geomspace(0.3, 3, 6):
            tokens = flops / 6 / size
            off = np.exp(bend(float(flops)) + random.normal(0, noise))
            runs.append(
                Observation(float(size), float(tokens), true_loss(float(size), float(tokens)) * float(np.exp(off)))
            )
    return runs


def test_the_interval_is_that_of_three_independent_normal_errors() -> None:
    """Beside the integral over the mixture of normal densities, solved for nine tenths."""
    from scipy.integrate import quad
    from scipy.optimize import brentq
    from scipy.stats import norm

    shares = quantile_shares()
    drawn, residuals = 0.01 * norm.ppf(shares), 0.02 * norm.ppf(shares)
    spread = np.diff(np.quantile(norm.ppf(shares), [0.05, 0.95]))[0] / (2 * norm.ppf(0.95))
    known = spread * np.hypot(0.01, 0.02)
    rates = np.array([0.005, 0.03, 0.08])

    def held(half: float) -> float:
        densities = [quad(norm.pdf, -half, half, args=(0, np.hypot(known, rate)))[0] for rate in rates]
        return float(np.mean(densities)) - 0.9

    found = interval_of_new_run(1.0, drawn, residuals, rates)
    half: float = brentq(held, 1e-4, 1.0)  # pyright: ignore[reportAssignmentType]
    assert found.estimate == pytest.approx(np.e)
    assert (np.log(found.low), np.log(found.high)) == pytest.approx((1 - half, 1 + half), rel=1e-6)
    alone = interval_of_new_run(1.0, drawn, residuals, np.zeros(3))
    assert np.log(alone.high) - 1 == pytest.approx(norm.ppf(0.95) * known, rel=1e-6)


def test_errors_beyond_each_origin_are_those_of_fits_to_the_runs_before_it() -> None:
    runs = budgets(5, 0.004, seed=2)
    fitted = fit_law(runs, draws=2)
    assert [origin.fitted for origin in fitted.origins] == [12, 18, 24]
    for origin in fitted.origins:
        before = [run for run in runs if run.compute <= origin.flops * 1.0001]
        beyond = [run for run in runs if run.compute > origin.flops * 1.0001]
        law = fit_law(before, delta=fitted.delta, draws=2).law
        errors = [np.log(run.loss / law.mean_loss(run.parameters, run.tokens)) for run in beyond]
        assert origin.errors == pytest.approx(errors, abs=2e-4)
        assert np.exp(origin.distances) == pytest.approx([run.compute / origin.flops for run in beyond])
    found = rolling_error(fitted.origins)
    assert found.predictions == 18 + 12 + 6
    assert found.farthest == pytest.approx(8)


def test_leverages_are_the_variances_of_predictions_by_the_normal_equations() -> None:
    """Beside a law fitted to the runs before the origin alone, differentiated by differences."""
    runs = budgets(4, 0.002, seed=5)
    fitted = fit_law(runs, delta=1.0, draws=2)
    origin = fitted.origins[-1]
    before = np.array([run.compute <= origin.flops * 1.0001 for run in runs])
    # The centres of both models differ, and so their coefficients, but not the law's values.
    law = fit_law([run for run, kept in zip(runs, before, strict=True) if kept], delta=1.0, draws=2).law
    theta = law.theta
    variables = {name: np.array([getattr(run, name) for run in runs]) for name in ("parameters", "tokens")}
    terms = law.model.terms(variables, [""] * len(runs))
    steps = np.eye(len(theta)) * 1e-5
    jacobian = ((terms.log_losses(theta + steps) - terms.log_losses(theta - steps)) / 2e-5).T
    covariance = np.linalg.inv(jacobian[before].T @ jacobian[before])
    expected = np.einsum("np,pq,nq->n", jacobian[~before], covariance, jacobian[~before])
    assert origin.leverages == pytest.approx(expected, rel=0.05)


def origin_with(errors: np.ndarray, distances: np.ndarray) -> Origin:
    return Origin(1e18, 30, 0.001, errors, distances, np.full(len(errors), 0.1))


def test_the_rate_of_many_origins_is_the_one_that_made_them() -> None:
    """Errors are drawn with a known deviation per factor of e; the posterior finds it, whichever it is."""
    random = np.random.default_rng(0)
    for rate in (0.003, 0.01, 0.05):
        distances = np.tile([0.7, 1.4], 20)
        made = [origin_with(random.normal(0, np.hypot(0.00105, rate * distances)), distances) for _ in range(6)]
        rates = np.array(discrepancy_rates(made))
        assert np.median(rates) == pytest.approx(rate, rel=0.4)
        assert rates[0] < rate < rates[-1]


def test_without_origins_the_rate_is_the_prior() -> None:
    rates = np.array(discrepancy_rates([]))
    assert np.median(rates) == pytest.approx(0.004, rel=0.02)
    assert np.std(np.log(rates)) == pytest.approx(np.hypot(1.0, 0.5), rel=0.05)


def test_signs_of_errors_do_not_matter_and_sizes_do() -> None:
    errors, distances = np.full(10, 0.02), np.linspace(0.7, 2, 10)
    assert discrepancy_rates([origin_with(errors, distances)]) == discrepancy_rates([origin_with(-errors, distances)])
    assert np.median(discrepancy_rates([origin_with(2 * errors, distances)])) > np.median(
        discrepancy_rates([origin_with(errors, distances)])
    )


def test_intervals_widen_with_the_distance_and_not_among_the_runs() -> None:
    law = fit_law(budgets(5, 0.003, seed=1)).law
    largest = law.ranges["compute"][1]
    halves = []
    for times in (0.5, 1.0, 8.0, 64.0):
        size = (times * largest / 120) ** 0.5
        tokens = times * largest / 6 / size
        halves.append(law.predict(size, tokens).relative)
        assert law.discrepancy(times * largest) == pytest.approx(max(0.0, np.log(times)) * np.array(law.content.rates))
    assert halves[1] < halves[2] < halves[3]


@pytest.mark.parametrize("slope", [0.01, -0.01])
def test_intervals_hold_runs_whose_law_bends(slope: float) -> None:
    """Log losses leave the law's form by a curve of known size: 0.5 · slope · log²(FLOPs/10¹⁷) / log 2⁶. Intervals of
    coefficients and scatter alone hold few of the runs beyond, those with the law's own error most."""
    held, alone, predictions = 0, 0, 0
    for seed in range(3):
        runs = budgets(9, 0.002, seed, bend=lambda flops: 0.5 * slope * np.log(flops / 1e17) ** 2 / np.log(2**6))
        law = fit_law(runs[:36], draws=40).law
        truth_alone = FittedLaw(msgspec.structs.replace(law.content, rates=(1e-9,)))
        for run in runs[36:]:
            held += run.loss in law.predict(run.parameters, run.tokens)
            alone += run.loss in truth_alone.predict(run.parameters, run.tokens)
            predictions += 1
    assert held / predictions > 0.85
    assert alone < held - predictions / 4


def test_runs_that_follow_the_law_have_a_small_rate_and_hold() -> None:
    """Noise of 0.3% about a true law: errors beyond are noise, which adds little to intervals at twice the FLOPs."""
    rates, held = [], 0
    for seed in range(6):
        runs = budgets(6, 0.003, seed)
        law = fit_law(runs[:30], draws=40).law
        rates.append(np.median(law.content.rates))
        held += sum(run.loss in law.predict(run.parameters, run.tokens) for run in runs[30:])
    assert np.median(rates) < 0.004
    assert held / 36 > 0.85


def test_comparison_states_the_error_of_rolling_the_origin() -> None:
    found = compare_laws(budgets(6, 0.003, seed=4), ("chinchilla", "kaplan-n"))
    errors = {score.law: score.rolling for score in found.scores}
    assert errors["chinchilla"] is not None
    assert errors["kaplan-n"] is not None
    assert errors["chinchilla"].origins == 4
    assert errors["chinchilla"].median < 0.02 < errors["kaplan-n"].median
    assert dataclasses.asdict(errors["chinchilla"])["most"] >= errors["chinchilla"].median


def test_a_law_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    fit_law(synthetic_runs(20), draws=2).law.write(tmp_path / "law.json")
    text = (tmp_path / "law.json").read_text()
    (tmp_path / "law.json").write_text(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(NapkinError, match=r"version 1.*fit it again"):
        read_law(tmp_path / "law.json")
