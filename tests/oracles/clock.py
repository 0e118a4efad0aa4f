"""A clock that no machine can hurry or hold up."""


class Clock:
    """Stands for the module `time`: goes on by so many seconds with each reading, and as far as it is told to."""

    def __init__(self, seconds_per_reading: float = 1.0) -> None:
        self.now, self.seconds_per_reading = 0.0, seconds_per_reading

    def perf_counter(self) -> float:
        self.now += self.seconds_per_reading
        return self.now
