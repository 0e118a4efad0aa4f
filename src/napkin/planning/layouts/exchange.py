"""Seconds of sending tokens to experts of other ranks and back.

A token goes to `experts_per_token` experts, chosen at random, on at most `nodes_per_token` nodes. An all-to-all carries
a copy for each of them. Where a token crosses the network once for each node, it takes the network for

    tokens · d_model · bytes · E[other nodes] / bandwidth

and the link, at the same time, for its way to each rank of these nodes that has an expert of it.
"""

import math

from napkin.hardware.cluster import Group, Interconnect
from napkin.model.config import ModelConfig
from napkin.planning.layouts.stack import Exchange


def exchange_seconds(
    interconnect: Interconnect, group: Group, model: ModelConfig, tokens: float, exchange: Exchange, number_bytes: float
) -> tuple[float, float]:
    """Seconds of dispatching `tokens` of each rank, and of combining what comes back.

    `number_bytes` are those of a number in the products' format, which 2 bytes of an exchange stand for.
    """
    if group.size == 1:
        return 0.0, 0.0
    scale = number_bytes / 2
    return (
        _one_way(interconnect, group, model, tokens, exchange, scale * exchange.dispatch_bytes),
        _one_way(interconnect, group, model, tokens, exchange, scale * exchange.combine_bytes),
    )


def _one_way(
    interconnect: Interconnect, group: Group, model: ModelConfig, tokens: float, exchange: Exchange, each: float
) -> float:
    copy = tokens * model.d_model * each
    if exchange.sends == "copies":
        return interconnect.seconds("all_to_all", copy * model.experts_per_token, group)
    nodes, ranks = destinations(model, group, exchange.nodes_per_token)
    link, network = interconnect.link_bandwidth, interconnect.network_bandwidth
    if exchange.link_share is not None and interconnect.datasheet_link_bandwidth:
        link = exchange.link_share * interconnect.datasheet_link_bandwidth
    if exchange.network_share is not None and interconnect.datasheet_network_bandwidth:
        network = exchange.network_share * interconnect.datasheet_network_bandwidth
    hop = interconnect.network_hop_seconds if nodes else interconnect.link_hop_seconds
    return interconnect.start_seconds + hop + max(copy * nodes / network, copy * ranks / link)


def destinations(model: ModelConfig, group: Group, nodes_per_token: int | None = None) -> tuple[float, float]:
    """The expected numbers of other nodes, and of other ranks, that a token is sent to.

    With experts drawn at random, s of n experts have none of a token's k with probability C(n - s, k) / C(n, k).
    """
    k = model.experts_per_token
    of_node, of_rank = model.n_experts / group.nodes, model.n_experts / group.size
    within = min(group.nodes, nodes_per_token or group.nodes)
    among = within * of_node
    nodes = within * (1 - _none_of(among, of_node, k))
    ranks = within * group.per_node * (1 - _none_of(among, of_rank, k))
    return nodes * (group.nodes - 1) / group.nodes, ranks * (group.size - 1) / group.size


def _none_of(among: float, group: float, k: int) -> float:
    """The probability that none of k experts among so many is in a group of them."""
    if among - group < k:
        return 0.0 if among - group < 1 else math.prod(max(0.0, 1 - group / (among - i)) for i in range(k))
    return math.prod(1 - group / (among - i) for i in range(k))
