"""Use of the processor by other processes while something was measured, kept with the measurement.

competition.py finds it out.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

NotNegative = Annotated[float, msgspec.Meta(ge=0)]

MOST_CROWDED = 0.25
"""The largest part of the cores that this process's threads need that other processes may take, in cores."""
MOST_WAITING = 0.05
"""The largest fraction of the time that threads may wait for a core."""
MOST_LOST = 0.2
"""The largest fraction of wall-clock time in which the busiest thread may not run; waiting for other threads of this
process takes less."""


@dataclass(frozen=True)
class Conditions:
    """The use of the processor by other processes while something was timed."""

    cores: Annotated[int, msgspec.Meta(gt=0)]
    """Cores that this process may use."""
    threads: Annotated[int, msgspec.Meta(gt=0)]
    """Threads that it computes with."""
    others: NotNegative
    """Cores, of those, that other processes used on the average, or neighbours of a virtual machine took away."""
    stolen: NotNegative = 0.0
    """Cores, of these, that neighbours of a virtual machine took away."""
    waited: NotNegative | None = None
    """Fraction of the time that a thread was ready and had no core; None where the system does not tell."""
    lost: NotNegative | None = None
    """Fraction of wall-clock time in which the busiest thread did not run; None where nothing was timed."""

    @property
    def crowded(self) -> float:
        """Cores that this process's threads need, and other processes take."""
        return max(0.0, min(self.threads, self.cores) + self.others - self.cores)

    @property
    def busy(self) -> bool:
        """True if other processes slowed down what was timed."""
        if self.crowded > MOST_CROWDED:
            return True
        # With more threads than cores, threads wait for each other.
        alone = self.threads <= self.cores
        return alone and ((self.waited or 0.0) > MOST_WAITING or (self.lost or 0.0) > MOST_LOST)

    def describe(self) -> str:
        """A description such as "other processes used 1.9 of 2 cores"."""
        if self.crowded > MOST_CROWDED:
            return f"other processes used {self.others:.1f} of {self.cores} cores"
        if (self.waited or 0.0) > MOST_WAITING:
            return f"threads waited {self.waited:.0%} of the time for a core"
        return f"threads did not run for {self.lost or 0.0:.0%} of the time"
