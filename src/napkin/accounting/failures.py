"""Failures over a long run: how often they come, how often to write a checkpoint, and how much time remains useful.

Failures are independent of each other and of the run's age: the time between two of them is exponential with mean M. A
run computes for an interval τ, pauses for C while a checkpoint is taken, and so on; W after the pause the checkpoint is
durable. A failure ends what is being done, at a restart too; R later the run continues from the last durable
checkpoint. All times are in seconds.
"""

import math
from dataclasses import dataclass

PUBLISHED_FAILURES = 419
PUBLISHED_DAYS = 54
PUBLISHED_DEVICES = 16_384
"""Llama 3 405B, on H100: unexpected interruptions in a snapshot of its pre-training. Of 466 interruptions the other 47
were planned. "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.4 and table 5."""

DEVICE_HOURS_PER_FAILURE = PUBLISHED_DEVICES * PUBLISHED_DAYS * 24 / PUBLISHED_FAILURES
"""Hours of one device, with its part of host, network and software: 50,677, which is 5.8 years."""

RESTART_MINUTES = 10.0
"""Minutes from a failure to the next step: it is noticed, the node replaced, processes start and load the checkpoint.
An assumption; Llama 3's run was effective for more than 90% of its time (section 3.3.4), so that its 466 interruptions
took less than 17 minutes each, with the work lost. A rank that hangs is noticed after `training.rank_timeout`."""

STORAGE_BYTES_PER_SECOND = 1e9
"""Rate at which a node writes to storage until it is durable. An assumption: about what one NVMe drive keeps up, and
what the storage of Llama 3's cluster sustained for each node: 2 TB/s for 2,048 nodes (section 3.3.1)."""

HOST_BYTES_PER_SECOND = 25e9
"""Rate from a device to its host where the catalogue has no bandwidth: what PCIe 4.0 x16 reaches of its 32 GB/s."""

NEARLY_BEST = 0.01
"""Intervals that cost at most this much more time than the best one are as good in practice."""


def mtbf_of_devices(n_devices: int, *, device_hours_per_failure: float = DEVICE_HOURS_PER_FAILURE) -> float:
    """Seconds between two failures of a run that any of its devices can interrupt, on average.

    By default at the rate of the Llama 3 run (`DEVICE_HOURS_PER_FAILURE`): every 3.1 hours on its 16,384 devices. That
    rate includes hosts, network and software; a young cluster, or consumer hardware, may fail several times as often.

    >>> round(mtbf_of_devices(16_384) / 3600, 2)
    3.09
    """
    return device_hours_per_failure * 3600 / n_devices


def young_interval(pause_seconds: float, mtbf_seconds: float) -> float:
    """The best seconds of work between two checkpoints, to first order: √(2·C·M).

    Young 1974, "A first order approximation to the optimum checkpoint interval". Too long by about
    2/3·C.

    >>> young_interval(300, 24 * 3600) / 60
    120.0
    """
    return math.sqrt(2 * pause_seconds * mtbf_seconds)


def daly_interval(pause_seconds: float, mtbf_seconds: float) -> float:
    """The best seconds of work between two checkpoints: √(2·C·M)·(1 + √(C/2M)/3 + (C/2M)/9) - C, and M from C = 2·M on.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps". With it, the expected
    time is within 0.02% of the least possible for any C up to M, and within 0.15% beyond.

    >>> round(daly_interval(300, 24 * 3600) / 60)
    117
    """
    if pause_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = pause_seconds / (2 * mtbf_seconds)
    return young_interval(pause_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause_seconds


@dataclass(frozen=True)
class FailureModel:
    """A run that writes checkpoints and is interrupted by failures; all figures are in seconds."""

    mtbf_seconds: float
    """M: between two failures, on average."""
    pause_seconds: float
    """C: training waits so long for each checkpoint."""
    write_seconds: float = 0.0
    """W: from the end of the pause until the checkpoint is durable, while training goes on."""
    restart_seconds: float = 60 * RESTART_MINUTES
    """R: from a failure until training continues."""

    def cycle_seconds(self, interval_seconds: float) -> float:
        """Seconds from one checkpoint to the next; one is written at a time, so the next one waits for it."""
        return max(interval_seconds, self.write_seconds) + self.pause_seconds

    def expected_seconds(self, useful_seconds: float, interval_seconds: float) -> float:
        """Expected wall-clock seconds of `useful_seconds` of work, with a checkpoint after each `interval_seconds` of
        it: Ts/τ · M · e^((R + W)/M) · (e^((τ + C)/M) - 1); infinite where it cannot be represented.

        Daly 2006, the complete model, for which W is 0. Until s seconds pass without a failure, M·(e^(s/M) - 1) are
        expected. From one durable checkpoint to the next it takes τ + C without a failure, and after one R + τ + C + W
        without another: W acts like a longer restart.
        """
        mtbf = self.mtbf_seconds
        try:
            lost = math.exp((self.restart_seconds + self.write_seconds) / mtbf)
            segment = mtbf * lost * math.expm1(self.cycle_seconds(interval_seconds) / mtbf)
        except OverflowError:
            return math.inf
        return useful_seconds / interval_seconds * segment

    def goodput(self, interval_seconds: float) -> float:
        """The part of the elapsed time that is useful: neither pause, nor lost and repeated, nor restart."""
        return 1 / self.expected_seconds(1.0, interval_seconds)

    @property
    def best_interval(self) -> float:
        """Seconds of work between two checkpoints with the highest goodput: Daly's, or longer where writing one takes
        longer. Neither R nor W change where the minimum is."""
        return max(daly_interval(self.pause_seconds, self.mtbf_seconds), self.write_seconds)

    @property
    def longest_interval(self) -> float:
        """The longest interval that costs at most `NEARLY_BEST` more time than the best one."""
        low = high = max(self.best_interval, 1e-9)
        allowed = (1 + NEARLY_BEST) * self.expected_seconds(1.0, low)
        if math.isinf(allowed):
            return low
        while self.expected_seconds(1.0, high) <= allowed:
            low, high = high, 2 * high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.expected_seconds(1.0, middle) <= allowed else (low, middle)
        return low


def failure_model(
    *,
    n_devices: int,
    copied_bytes: float,
    written_bytes: float,
    writing_nodes: int,
    host_bandwidth: float | None = None,
    background: bool = True,
    mtbf_hours: float | None = None,
    restart_minutes: float = RESTART_MINUTES,
) -> FailureModel:
    """The failures of a run on so many devices.

    Args:
        n_devices: any of them interrupts all.
        copied_bytes: of one device's part of a checkpoint, which is copied into host memory.
        written_bytes: of a whole checkpoint.
        writing_nodes: nodes that write it together, at `STORAGE_BYTES_PER_SECOND` each.
        host_bandwidth: bytes per second from a device to its host; None is `HOST_BYTES_PER_SECOND`.
        background: whether training waits for the copy alone; otherwise for the write.
        mtbf_hours: between two failures of all devices together; None is by the rate of `mtbf_of_devices`.
        restart_minutes: from a failure until training continues.
    """
    write = written_bytes / (writing_nodes * STORAGE_BYTES_PER_SECOND)
    copy = copied_bytes / (host_bandwidth or HOST_BYTES_PER_SECOND)
    return FailureModel(
        mtbf_seconds=mtbf_of_devices(n_devices) if mtbf_hours is None else 3600 * mtbf_hours,
        pause_seconds=copy if background else write,
        write_seconds=write if background else 0.0,
        restart_seconds=60 * restart_minutes,
    )
