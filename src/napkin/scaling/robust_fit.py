"""Fits of log losses by Huber's loss, many at once: starts, bootstrap draws and left-out runs are rows of one batch.

The model of a log loss is y = s · log Σₖ exp(Xₖ·θ): a sum of powers of parameters and tokens, each power a term, is
linear in θ inside the exponentials. s is 1, or exp of the last coefficient of θ.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Residuals of the log loss beyond this count linearly (Hoffmann et al. 2022, appendix D.3)."""

_MOST_STEPS = 300
_SMALLEST_STEP = 1e-7
_SMALLEST_GAIN = 1e-6
_LONGEST_STEP = 3.0


@dataclass(frozen=True)
class SumOfTerms:
    """The terms of a model of log losses."""

    designs: Values
    """[terms, runs, coefficients]: the logarithm of term k for run n is `designs[k, n] @ θ`."""
    outer_exponent: bool = False
    """Whether the sum is raised to exp of one more coefficient, the last of θ."""
    offsets: Values | None = None
    """[terms, runs], added to the logarithms: what does not depend on θ."""

    @property
    def n_coefficients(self) -> int:
        """Length of θ."""
        return self.designs.shape[2] + self.outer_exponent

    def log_losses(self, theta: Values) -> Values:
        """[batch, coefficients] → [batch, runs]."""
        return self._evaluate(theta)[0]

    def with_jacobian(self, theta: Values) -> tuple[Values, Values]:
        """[batch, coefficients] → predictions [batch, runs] and their derivatives [batch, runs, coefficients]."""
        predicted, shares, scale = self._evaluate(theta)
        # A batched product per run: [runs, batch, terms] @ [runs, terms, coefficients].
        jacobian = np.matmul(shares.transpose(2, 0, 1), self.designs.transpose(1, 0, 2)).transpose(1, 0, 2)
        if self.outer_exponent:
            # d/dt of exp(t) · log Σ is the prediction itself.
            return predicted, np.concatenate([jacobian * scale[:, None, None], predicted[:, :, None]], axis=2)
        return predicted, jacobian

    def _evaluate(self, theta: Values) -> tuple[Values, Values, Values]:
        inner, scale = theta, np.ones(len(theta))
        if self.outer_exponent:
            inner, scale = theta[:, :-1], np.exp(np.clip(theta[:, -1], -20, 20))
        exponents = np.matmul(self.designs, inner.T).transpose(2, 0, 1)  # [batch, terms, runs]
        if self.offsets is not None:
            exponents = exponents + self.offsets
        largest = exponents.max(axis=1, keepdims=True)
        terms = np.exp(exponents - largest)
        total = terms.sum(axis=1, keepdims=True)
        predicted = (np.log(total) + largest)[:, 0] * scale[:, None]
        return predicted, terms / total, scale


def huber(residuals: Values, delta: float) -> Values:
    """Huber's loss of each residual: r²/2 up to `delta`, then linear."""
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta))


def fit_batch(
    model: SumOfTerms, log_losses: Values, weights: Values, starts: Values, *, delta: float = HUBER_DELTA
) -> tuple[Values, Values]:
    """Minimise Σ weight · huber(residual) from each start: Levenberg and Marquardt on iteratively reweighted squares.

    Args:
        model: of the runs.
        log_losses: [runs], or [batch, runs].
        weights: [batch, runs], not negative.
        starts: [batch, coefficients].
        delta: where Huber's loss becomes linear.

    Returns:
        θ [batch, coefficients] and the minima [batch].
    """
    theta, cost = starts.copy(), np.full(len(starts), np.inf)
    rows = np.arange(len(starts))
    state = _Search(model, log_losses, weights, starts, delta)
    for _ in range(_MOST_STEPS):
        settled = state.step()
        theta[rows], cost[rows] = state.theta, state.cost
        if settled.any():
            rows = rows[~settled]
            state.keep(~settled)
        if not len(rows):
            break
    return theta, cost


class _Search:
    """The rows of a batch that have not settled yet."""

    def __init__(self, model: SumOfTerms, log_losses: Values, weights: Values, starts: Values, delta: float) -> None:
        self.model, self.weights, self.delta = model, weights, delta
        self.log_losses = np.broadcast_to(log_losses, weights.shape)
        self.theta = starts.copy()
        self.residuals, self.jacobian, self.cost = self._at(self.theta)
        self.damping = np.full(len(starts), 1e-2)
        self.idle = np.zeros(len(starts), dtype=np.int64)

    def _at(self, theta: Values) -> tuple[Values, Values, Values]:
        predicted, jacobian = self.model.with_jacobian(theta)
        residuals = predicted - self.log_losses
        return residuals, jacobian, (self.weights * huber(residuals, self.delta)).sum(1)

    def keep(self, rows: NDArray[np.bool_]) -> None:
        for name in ("weights", "log_losses", "theta", "residuals", "jacobian", "cost", "damping", "idle"):
            setattr(self, name, getattr(self, name)[rows])

    def step(self) -> NDArray[np.bool_]:
        """Take a step where it lowers the cost, and say which rows have settled."""
        effective = self.weights * np.minimum(1.0, self.delta / np.maximum(np.abs(self.residuals), 1e-300))
        weighted = (self.jacobian * effective[:, :, None]).transpose(0, 2, 1)
        gradient = np.matmul(weighted, self.residuals[:, :, None])
        curvature = np.matmul(weighted, self.jacobian)
        diagonal = np.einsum("bpp->bp", curvature)
        ridge = self.damping[:, None] * diagonal + 1e-12 * diagonal.max(1, keepdims=True) + 1e-30
        ridge = ridge[:, :, None] * np.eye(curvature.shape[1])
        step = np.clip(-np.linalg.solve(curvature + ridge, gradient)[:, :, 0], -_LONGEST_STEP, _LONGEST_STEP)
        residuals, jacobian, cost = self._at(self.theta + step)
        better = cost < self.cost
        gain = np.where(better, (self.cost - cost) / np.maximum(self.cost, 1e-300), 0.0)
        self.theta = np.where(better[:, None], self.theta + step, self.theta)
        self.residuals = np.where(better[:, None], residuals, self.residuals)
        self.jacobian = np.where(better[:, None, None], jacobian, self.jacobian)
        self.cost = np.where(better, cost, self.cost)
        self.damping = np.clip(np.where(better, self.damping / 4, self.damping * 5), 1e-12, 1e9)
        self.idle = np.where(better & (gain < _SMALLEST_GAIN), self.idle + 1, np.where(better, 0, self.idle))
        return (self.idle >= 3) | (self.damping > 1e8) | (np.abs(step).max(1) < _SMALLEST_STEP)


def polish(
    model: SumOfTerms, log_losses: Values, theta: Values, *, weights: Values | None = None, delta: float = HUBER_DELTA
) -> Values:
    """The minimum near `theta` [coefficients], to about 10 digits, by BFGS with the exact gradient."""
    from scipy.optimize import minimize

    weight = np.ones(len(log_losses)) if weights is None else weights
    _, scaled = model.with_jacobian(theta[None])
    # In units in which each coefficient moves the predictions about equally.
    units = 1 / np.maximum(np.sqrt(np.einsum("bnp,bnp->p", scaled, scaled)), 1e-12)

    def objective(offset: Values) -> tuple[float, Values]:
        predicted, jacobian = model.with_jacobian((theta + offset * units)[None])
        residuals = predicted[0] - log_losses
        slope = weight * np.clip(residuals, -delta, delta)
        return float((weight * huber(residuals, delta)).sum()) / delta, (slope @ jacobian[0]) * units / delta

    found = minimize(objective, np.zeros(len(theta)), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    return theta + found.x * units


def fit(model: SumOfTerms, log_losses: Values, starts: Values, *, delta: float = HUBER_DELTA) -> Values:
    """θ [coefficients] with the smallest sum of Huber losses that any of the starts [batch, coefficients] leads to."""
    weights = np.ones((len(starts), len(log_losses)))
    found, cost = fit_batch(model, log_losses, weights, starts, delta=delta)
    order = np.argsort(cost, kind="stable")
    # The objective has flat valleys and several minima: the best few are all followed to their end.
    polished = np.array([polish(model, log_losses, found[index], delta=delta) for index in order[:3]])
    costs = huber(model.log_losses(polished) - log_losses, delta).sum(1)
    return polished[int(np.argmin(costs))]
