"""Where an amount of training compute stands: among thresholds of laws, and beside published models.

The figures and their sources are in `training_compute.toml`. Laws count the compute of a whole training, and which
parts belong to it, such as synthetic data or runs that were discarded, is theirs to say: this is arithmetic, not
advice.
"""

import functools
from dataclasses import dataclass

from napkin.accounting.rules import training_flops_rule
from napkin.toml_files import packaged_toml
from napkin.units import format_count, format_share


@dataclass(frozen=True)
class Threshold:
    """An amount of training compute that a law names."""

    flops: float
    name: str
    says: str
    source: str
    in_force: str


@dataclass(frozen=True)
class PublishedTraining:
    """The training of a published model."""

    name: str
    year: int
    parameters: float
    """Parameters that a token is computed with."""
    tokens: float
    source: str
    flops: float = 0.0
    """FLOPs that the source states; 0 where it states none."""

    @property
    def compute(self) -> float:
        """The stated FLOPs, or 6 per parameter and token."""
        return self.flops or training_flops_rule(self.parameters, self.tokens)


@dataclass(frozen=True)
class _Tables:
    thresholds: tuple[Threshold, ...]
    models: tuple[PublishedTraining, ...]


@functools.cache
def _tables() -> _Tables:
    return packaged_toml("napkin.planning", "training_compute.toml", _Tables)


def thresholds() -> tuple[Threshold, ...]:
    """Thresholds of laws, the lowest first."""
    return _tables().thresholds


def published_trainings() -> tuple[PublishedTraining, ...]:
    """Published models by their training compute, the smallest first."""
    return tuple(sorted(_tables().models, key=lambda each: each.compute))


SMALLEST = 1e22
"""FLOPs from which on a plan says where it stands: a tenth of the lowest threshold."""


def thresholds_line(flops: float) -> str:
    """The side of each threshold on which so many FLOPs are.

    >>> thresholds_line(2e25).split("; ")[1]
    'above 1e+25 (systemic risk, EU, from 2025-08-02)'
    """

    def side(each: Threshold) -> str:
        # Laws say "greater than".
        where = "above" if flops > each.flops else f"{format_share(flops / each.flops)} of"
        return f"{where} {each.flops:.0e} ({each.name}, {each.in_force})"

    return "; ".join(map(side, thresholds()))


def nearest_line(flops: float) -> str:
    """The published model whose training compute is nearest, as a ratio."""
    nearest = min(published_trainings(), key=lambda each: abs(each.compute / flops - 1) + abs(flops / each.compute - 1))
    ratio = f"{format_count(flops / nearest.compute)} times"
    how = "as published" if nearest.flops else "6 per parameter and token"
    return f"{ratio} {nearest.name}'s ({nearest.year}) {nearest.compute:.3g} FLOPs, {how}: {nearest.source}"


def standing(flops: float) -> dict[str, object]:
    """The same for programs: each threshold with whether it is exceeded, and the nearest published model."""
    return {
        "thresholds": [{**vars(each), "exceeded": flops > each.flops} for each in thresholds()],
        "published": [
            {**vars(each), "flops": each.compute, "ratio": flops / each.compute} for each in published_trainings()
        ],
    }
