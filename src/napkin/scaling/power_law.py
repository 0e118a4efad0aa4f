"""y = K · Π xᵢ^eᵢ by least squares of logarithms, with Student's intervals: best sizes, learning rates, batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from napkin.errors import NapkinError
from napkin.scaling.fitted_law import LEVEL, Interval
from napkin.scaling.robust_fit import Values


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law."""

    constant: Interval
    exponents: dict[str, Interval]
    """By variable."""
    points: int
    scatter: float
    """Standard deviation of log y about the law."""
    _theta: Values
    _covariance: Values
    _quantile: float

    def predict(self, **variables: float) -> Interval:
        """y where the law's curve runs, with the interval of the curve (not of a single new point)."""
        if set(variables) != set(self.exponents):
            raise NapkinError(
                f"the law needs {', '.join(self.exponents)}, and gets {', '.join(variables) or 'nothing'}"
            )
        if any(not 0 < value < 1e40 for value in variables.values()):
            raise NapkinError("a power law predicts for numbers above 0 alone: give such ones")
        row = np.array([1.0, *(np.log(variables[name]) for name in self.exponents)])
        middle = float(row @ self._theta)
        half = self._quantile * float(np.sqrt(max(row @ self._covariance @ row, 0.0)))
        return Interval(float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half)))


def fit_power_law(y: Sequence[float] | Values, **variables: Sequence[float] | Values) -> PowerLaw:
    """Fit y = K · x₁^e₁ · x₂^e₂ ….

    Args:
        y: [points], above 0.
        variables: [points] each, above 0, by name.

    Raises:
        NapkinError: for fewer points than coefficients + 1, numbers that are not above 0, and variables that do not
            vary or vary together.
    """
    from scipy.special import stdtrit

    names = list(variables)
    columns = np.array([np.asarray(variables[name], dtype=np.float64) for name in names])
    values = np.asarray(y, dtype=np.float64)
    if (
        not names
        or not np.isfinite(columns).all()
        or not np.isfinite(values).all()
        or min(columns.min(initial=1), values.min(initial=1)) <= 0
    ):
        raise NapkinError("a power law is fitted to numbers above 0 alone: leave others out")
    coefficients = len(names) + 1
    if len(values) < coefficients + 1:
        raise NapkinError(
            f"a power law of {', '.join(names)} needs {coefficients + 1} points, {len(values)} are given: add some"
        )
    logs = np.log(columns)
    centres = logs.mean(axis=1)
    design = np.column_stack([np.ones(len(values)), (logs - centres[:, None]).T])
    if np.linalg.matrix_rank(design, tol=1e-6 * float(np.sqrt(len(values)))) < coefficients:
        raise NapkinError(
            f"{', '.join(names)} do not vary, or only together: a power law needs points that differ in each"
        )
    theta, *_ = np.linalg.lstsq(design, np.log(values), rcond=None)
    residuals = np.log(values) - design @ theta
    freedom = len(values) - coefficients
    variance = float(residuals @ residuals) / freedom
    covariance = variance * np.linalg.inv(design.T @ design)
    # Back from the centre to 1 of each variable.
    shift = np.eye(coefficients)
    shift[0, 1:] = -centres
    theta, covariance = shift @ theta, shift @ covariance @ shift.T
    quantile = float(stdtrit(freedom, (1 + LEVEL) / 2))
    half = quantile * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    constant, *exponents = (
        Interval(float(at), float(at - by), float(at + by)) for at, by in zip(theta, half, strict=True)
    )
    return PowerLaw(
        Interval(*(float(np.exp(np.clip(at, -700, 700))) for at in (constant.estimate, constant.low, constant.high))),
        dict(zip(names, exponents, strict=True)),
        len(values),
        float(np.sqrt(variance)),
        theta,
        covariance,
        quantile,
    )
