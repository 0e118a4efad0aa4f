"""Options for plans of runs that failures interrupt."""

from dataclasses import dataclass

from napkin.errors import NapkinError

_MOST = 1e9


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """How often something fails, and what a failure costs."""

    mtbf_hours: float | None = None
    """Mean time between failures of all devices together, in hours; None is the rate of the Llama 3 405B run."""
    restart_minutes: float | None = None
    """From a failure until training continues; None is 10 minutes."""

    def refuse_impossible(self) -> None:
        """Raise NapkinError for hours or minutes that cannot be."""
        hours, minutes = self.mtbf_hours, self.restart_minutes
        if hours is not None and not 0 < hours <= _MOST:
            raise NapkinError(f"--mtbf-hours is {hours}: use a number above 0, up to {_MOST:.0e}")
        if minutes is not None and not 0 <= minutes <= _MOST:
            raise NapkinError(f"--restart-minutes is {minutes}: use a number from 0 to {_MOST:.0e}")
