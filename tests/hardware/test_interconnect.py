"""Collectives against a simulation that moves every chunk of a ring, hop by hop."""

import dataclasses
import math

import pytest

from napkin.hardware.ceilings import efficiency_of
from napkin.hardware.cluster import Group, Interconnect, Operation, interconnect_of, node_of
from napkin.hardware.device_file import find_device

PLAIN = Interconnect(100e9, 10e9, 8, start_seconds=0, link_hop_seconds=1e-6, network_hop_seconds=5e-6)


def simulated_ring_all_gather(group: Group, data_bytes: float, net: Interconnect) -> float:
    """Each rank passes on one chunk per round; in a round all hops run at once, and the slowest ends it.

    There is a ring per device of a node, each of which leaves the node through another device's adapter, so that a
    hop between nodes moves its ring's part over one adapter while hops within a node divide the link among the rings.
    """
    n, rings = group.size, group.per_node
    chunk = data_bytes / n / rings
    seconds = 0.0
    for _ in range(n - 1):
        within = chunk * rings / net.link_bandwidth if group.per_node > 1 else 0.0
        between = chunk / net.network_bandwidth if group.nodes > 1 else 0.0
        seconds += max(within, between)
    return seconds


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_a_large_all_gather_takes_what_a_simulated_ring_takes(per_node: int, nodes: int) -> None:
    group, size = Group(per_node, nodes), 10e9
    if group.size == 1:
        assert PLAIN.seconds("all_gather", size, group) == 0
        return
    no_hops = dataclasses.replace(PLAIN, link_hop_seconds=0.0, network_hop_seconds=0.0)
    assert no_hops.seconds("all_gather", size, group) == pytest.approx(simulated_ring_all_gather(group, size, no_hops))
    scattered = no_hops.seconds("reduce_scatter", size, group)
    assert no_hops.seconds("all_reduce", size, group) == pytest.approx(2 * scattered)


def test_a_small_all_gather_takes_the_hops_of_a_ring() -> None:
    net = Interconnect(100.0, 100.0, 4, start_seconds=1.0, link_hop_seconds=10.0, network_hop_seconds=1000.0)
    # 12 ranks have 11 hops to the last one: 2 between 3 nodes, and 9 within them.
    assert net.seconds("all_gather", 1e-9, Group(4, 3)) == pytest.approx(1 + 2 * 1000 + 9 * 10)
    assert net.seconds("reduce_scatter", 1e-9, Group(4, 1)) == pytest.approx(1 + 3 * 10)


def test_a_small_all_reduce_over_many_nodes_takes_a_tree_and_a_large_one_a_ring() -> None:
    group = Group(8, 128)
    small, large = PLAIN.seconds("all_reduce", 8, group), PLAIN.seconds("all_reduce", 8e9, group)
    assert small == pytest.approx(2 * (7e-6 + 7 * 5e-6), rel=0.01)
    assert large == pytest.approx(2 * 8e9 / 80e9, rel=0.02)
    ring_hops = 2 * (127 * 5e-6 + (1024 - 128) * 1e-6)
    assert small < ring_hops


def test_an_all_to_all_is_bound_by_what_leaves_the_node() -> None:
    net = dataclasses.replace(PLAIN, link_hop_seconds=0.0, network_hop_seconds=0.0)
    assert net.seconds("all_to_all", 8e9, Group(8)) == pytest.approx(7e9 / 100e9)
    assert net.seconds("all_to_all", 16e9, Group(8, 2)) == pytest.approx(8e9 / 10e9)


def test_a_message_between_nodes_is_slower_than_one_within() -> None:
    within, between = (PLAIN.seconds("send", 1e6, group) for group in (Group(2), Group(1, 2)))
    assert within == pytest.approx(1e-6 + 1e6 / 100e9)
    assert between == pytest.approx(5e-6 + 1e6 / 10e9)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"])
def test_more_bytes_take_longer_and_one_rank_or_no_bytes_take_nothing(operation: Operation) -> None:
    for group in (Group(2), Group(8), Group(8, 4), Group(1, 4)):
        seconds = [PLAIN.seconds(operation, 10.0**power, group) for power in range(11)]
        assert seconds == sorted(set(seconds))
        assert PLAIN.seconds(operation, 0, group) == 0
    assert PLAIN.seconds(operation, 1e9, Group(1)) == 0


def test_groups_with_a_stride_are_spread_over_nodes() -> None:
    assert PLAIN.group(8) == Group(8, 1)
    assert PLAIN.group(64) == Group(8, 8)
    assert PLAIN.group(16, stride=8) == Group(1, 16)
    assert PLAIN.group(4, stride=2) == Group(4, 1)
    assert PLAIN.group(8, stride=16) == Group(1, 8)


def test_an_h100_node_has_nearly_its_links_bandwidth_between_nodes_with_all_adapters_and_a_ninth_with_one() -> None:
    device = find_device("H100")
    net = interconnect_of(device, node_of(device), efficiency_of(device))
    assert net is not None
    whole, one = net.ring_bandwidth(Group(8, 4)), net.ring_bandwidth(Group(1, 4))
    assert whole == pytest.approx(min(net.link_bandwidth, 8 * one))
    assert math.isclose(one, efficiency_of(device).network_share * 50e9)


def test_a_bridge_connects_two_cards_so_more_go_through_the_host() -> None:
    card = find_device("A100-PCIe-80GB")
    net = interconnect_of(card, node_of(card), efficiency_of(card))
    assert net is not None
    assert card.host_bandwidth is not None
    assert net.link_bandwidth == efficiency_of(card).link_share * card.host_bandwidth
    alone = dataclasses.replace(card, link=None, link_bandwidth=None, host_link=None, host_bandwidth=None)
    assert interconnect_of(alone, node_of(alone), efficiency_of(alone)) is None
