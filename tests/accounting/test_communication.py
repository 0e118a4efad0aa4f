import dataclasses

import pytest

from napkin.accounting.rank_seconds import Collective, Communication
from napkin.hardware.cluster import Interconnect

NET = Interconnect(100e9, 10e9, 8)


def test_bytes_sent_are_those_that_a_ring_passes_on() -> None:
    def sent(operation: str, world_size: int) -> float:
        """Brute force: who sends which chunk, round by round."""
        rounds = (world_size - 1) * (2 if operation == "all_reduce" else 1)
        return sum(1200 / world_size for _ in range(rounds))

    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        for world_size in (2, 3, 8):
            communication = Communication((Collective(operation, "forward", 1200, 5, world_size),))
            assert communication.bytes == pytest.approx(5 * sent(operation, world_size))


def test_a_pass_takes_the_longer_of_computing_and_sending_and_is_slowed_by_what_overlaps() -> None:
    communication = Communication(
        (Collective("all_gather", "forward", 8e9, 1, 8), Collective("reduce_scatter", "backward", 8e9, 1, 8))
    )
    sending = communication.seconds(NET) / 2
    assert communication.exposed_seconds(NET, forward_seconds=0, backward_seconds=0) == pytest.approx(2 * sending)
    assert communication.exposed_seconds(NET, forward_seconds=1, backward_seconds=1) == 0
    assert communication.exposed_seconds(NET, forward_seconds=sending / 2, backward_seconds=1) == pytest.approx(
        sending / 2
    )
    slowed = dataclasses.replace(NET, slowdown=0.25)
    assert communication.exposed_seconds(slowed, forward_seconds=1, backward_seconds=1) == pytest.approx(0.5 * sending)


def test_no_devices_but_one_send_nothing() -> None:
    assert Communication().bytes == 0
    assert Communication().seconds(NET) == 0
