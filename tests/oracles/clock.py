"""A clock that no machine can hurry or hold up."""


class Clock:
    """Stands for the module `time`: goes on by so many seconds with each reading, and as far as it is told to."""

    def __init__(self, seconds_per_reading: float = 1.0) -> None:
        self.now, self.seconds_per_reading = 0.0, seconds_per_reading

    def perf_counter(self) -> float:
        self.now += self.seconds_per_reading
        return self.now


class ProcessorClock:
    """Stands for the module `time` where a call is timed: each takes so many seconds of the processor, of which this
    process has one part and `others` processes have as many parts each."""

    def __init__(self, seconds_per_call: float, *, others: int = 0) -> None:
        self.seconds_per_call, self.others = seconds_per_call, others
        self.processor = self.now = 0.0
        self._in_call = False

    def perf_counter(self) -> float:
        if self._in_call:
            self.processor += self.seconds_per_call
            self.now += (1 + self.others) * self.seconds_per_call
        self._in_call = not self._in_call
        return self.now

    def thread_time(self) -> float:
        return self.processor

    def process_time(self) -> float:
        return self.processor
