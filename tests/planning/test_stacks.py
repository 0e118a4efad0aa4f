"""Other programs' steps: exchanges of experts by brute force, bytes that ranks keep beside published ones, files."""

import dataclasses
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from napkin.accounting.pipeline_simulation import StageSeconds
from napkin.errors import NapkinError
from napkin.hardware.ceilings import efficiency_of
from napkin.hardware.cluster import LINE_SHARE, Group, Interconnect, interconnect_of, node_of
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.layouts.costs import choice_of
from napkin.planning.layouts.exchange import destinations, exchange_seconds
from napkin.planning.layouts.rank_bytes import RankBytes
from napkin.planning.layouts.stack import NAPKIN, Exchange, Stack, find_stack, read_stack, stacks
from napkin.planning.layouts.stack_plan import plan_stack, stack_costs
from napkin.planning.layouts.stages import Sends, expert_sends, replicas_of_experts, shards_of, tensor_sends
from napkin.recipe.layout import Layout, layout_of
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig

MODEL = ModelConfig(
    vocab_size=256, d_model=64, n_heads=4, n_layers=2, context_length=64, n_experts=8, experts_per_token=2, d_expert=32
)
LINKS = Interconnect(100e9, 10e9, 2, 0.0, 0.0, 0.0)


def _drawn(group: Group, k: int, n_experts: int, limit: int | None) -> tuple[float, float]:
    """The same expectations, over every choice of experts there is; a token of rank 0 on node 0, and of each other."""
    nodes, ranks = [], []
    per_rank = n_experts // group.size
    limit = limit or group.nodes
    for own in range(group.size):
        for allowed in itertools.combinations(range(group.nodes), min(limit, group.nodes)):
            experts = [e for e in range(n_experts) if e // per_rank // group.per_node in allowed]
            for chosen in itertools.combinations(experts, k):
                to_ranks = {e // per_rank for e in chosen}
                to_nodes = {rank // group.per_node for rank in to_ranks}
                nodes.append(len(to_nodes - {own // group.per_node}))
                ranks.append(len(to_ranks - {own}))
    return sum(nodes) / len(nodes), sum(ranks) / len(ranks)


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_expected_nodes_and_ranks_are_those_of_every_choice_of_experts(k: int, limit: int | None) -> None:
    group = Group(per_node=2, nodes=4)
    model = dataclasses.replace(MODEL, n_experts=16, experts_per_token=k)
    assert destinations(model, group, limit) == pytest.approx(_drawn(group, k, 16, limit))


def test_tokens_sent_once_per_node_take_the_network_for_fewer_bytes_than_copies() -> None:
    group = Group(per_node=2, nodes=2)
    by_node = sum(exchange_seconds(LINKS, group, MODEL, 1e6, Exchange(sends="nodes"), 2))
    copies = sum(exchange_seconds(LINKS, group, MODEL, 1e6, Exchange(sends="copies"), 2))
    other_nodes, _ = destinations(MODEL, group)
    assert by_node == pytest.approx(2 * 1e6 * MODEL.d_model * 2 * other_nodes / LINKS.network_bandwidth)
    # Of two copies half cross the network.
    assert copies == pytest.approx(2 * 1e6 * MODEL.d_model * 2 * 2 * 0.5 / LINKS.network_bandwidth)
    assert by_node < copies


def test_dispatch_in_fp8_takes_half_as_long_as_combining_in_bf16() -> None:
    exchange = Exchange(sends="nodes", dispatch_bytes=1, combine_bytes=2)
    dispatch, combine = exchange_seconds(LINKS, Group(2, 4), MODEL, 1e6, exchange, 2)
    assert combine == pytest.approx(2 * dispatch)


def test_a_network_reaches_its_fitted_share_at_the_usual_rate_and_more_of_a_slower_one() -> None:
    device = find_device("H100")
    node, efficiency = node_of(device), efficiency_of(device)
    assert efficiency.usual_network is not None

    def share(network: float) -> float:
        links = interconnect_of(device, dataclasses.replace(node, network_bandwidth=network), efficiency)
        assert links is not None
        return links.network_bandwidth / network

    assert share(efficiency.usual_network) == pytest.approx(efficiency.network_share)
    rates = [share(efficiency.usual_network / 2**n) for n in range(6)]
    assert rates == sorted(rates)
    assert rates[-1] < LINE_SHARE


def test_experts_can_be_divided_among_ranks_of_tensor_too() -> None:
    config = ParallelismConfig(tensor=2, pipeline=8, expert=32, whole_experts=True)
    layout = layout_of(config, 256)
    assert (layout.data, layout.expert_parts) == (16, 32)
    with pytest.raises(NapkinError, match="data · shard, which is 16"):
        layout_of(dataclasses.replace(config, whole_experts=False), 256)


def test_every_stack_says_where_it_stands_written(tmp_path: Path) -> None:
    assert stacks()["napkin"] == NAPKIN
    for name, stack in stacks().items():
        assert stack.name == name
        assert stack.source or name == "napkin"
        assert stack.memory is None or stack.memory.kept["none"].d_model > stack.memory.kept["full"].d_model


def test_a_file_changes_fields_of_the_stack_that_it_is_like(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('like = "nemo"\nsending = 1.2\n[exchange]\ndispatch_bytes = 1\n')
    ours, nemo = read_stack(path), find_stack("nemo")
    changed = dataclasses.replace(nemo.exchange, dispatch_bytes=1.0)
    assert ours == dataclasses.replace(nemo, name="ours", sending=1.2, exchange=changed)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('like = "nimo"', "like: 'nimo'"),
        ("fuse = true", "did you mean fuses?"),
        ("[exchange]\nsend = 1", "exchange.sends"),
        ("sending = -1", "sending"),
        ("fuses = 3", "fuses"),
        ("[memory]\nweight_bytes = 2", "memory"),
    ],
)
def test_a_wrong_file_is_refused_in_a_line_that_names_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(NapkinError, match=named.replace("?", r"\?")) as refused:
        find_stack(path)
    assert "\n" not in str(refused.value)


def test_layouts_of_sharded_contexts_and_of_replicated_experts_hold_each_parameter_once() -> None:
    assert shards_of(Layout(context=8)) == (1, 1)
    assert shards_of(Layout(context=8), over_context=True) == (8, 8)
    random.seed(0)
    for _ in range(50):
        tensor, context, data = (2 ** random.randrange(3) for _ in range(3))
        expert = 2 ** random.randrange(int(math.log2(tensor * context * data)) + 1)
        layout = Layout(tensor=tensor, context=context, data=data, expert=expert, whole_experts=True)
        assert expert * replicas_of_experts(layout) == layout.world_size


def test_what_hides_behind_products_is_all_but_the_first_piece_and_behind_another_micro_batch_all_that_fits() -> None:
    compute = StageSeconds(forward=4.0, backward_input=4.0, backward_weight=4.0)
    links = dataclasses.replace(LINKS, slowdown=0.25, multiprocessors=132)

    whole, pieces = Sends(), Sends()
    tensor_sends(NAPKIN, links, 4, whole, compute, 1.0, 2.0)
    overlapping = dataclasses.replace(NAPKIN, overlaps_tensor=True)
    tensor_sends(overlapping, links, 4, pieces, compute, 1.0, 2.0)
    assert whole.exposed["tensor"] == [1.0, 2.0]
    assert pieces.exposed["tensor"] == pytest.approx([0.25 + 0.25 * 0.75, 0.5 + 0.25 * 1.5])
    # 22 of 132 multiprocessors send: computing takes 132 / 110 as long, and hides 14.4 s of what is sent.
    exchange = Exchange(behind_other_micro_batch=True, multiprocessors=22)
    for sent in (2.0, 10.0):
        sends = Sends()
        longer = expert_sends(exchange, links, sends, compute, sent, sent)
        assert longer.forward + longer.of("backward") == pytest.approx(12 * 0.2)
        assert sum(sends.exposed["expert"]) == pytest.approx(max(0.0, 2 * sent - 14.4))


SMALL = ModelConfig(
    vocab_size=512, d_model=128, n_heads=4, n_layers=4, context_length=128, tie_embeddings=False, d_ff=384
)


def _planned_bytes(stack: Stack, **training: Any) -> RankBytes:
    recipe = Recipe(
        model=SMALL,
        training=TrainingConfig(batch_size=8, micro_batch_size=1, parallelism="ddp", **training),
        parallelism=ParallelismConfig(data=8, shard_optimizer=True),
    )
    return plan_stack(recipe, "8xH100", stack).ranks[0]


def test_weights_that_are_fp8_alone_take_the_bytes_of_their_copies_and_nothing_more() -> None:
    nemo = find_stack("nemo")
    in_blocks = 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128)
    outside = 2 * 512 * 128 + 128
    planned = _planned_bytes(nemo, precision="fp8")
    assert planned.parameters == 2 * outside
    assert planned.gathered == 2 * in_blocks
    assert nemo.memory is not None
    memory = dataclasses.replace(nemo.memory, fp8_copies_only=False)
    both = _planned_bytes(dataclasses.replace(nemo, memory=memory), precision="fp8")
    assert both.total - planned.total == 2 * in_blocks


def test_blocks_whose_activations_wait_in_the_host_keep_none_on_the_device() -> None:
    megatron = find_stack("megatron")
    assert megatron.memory is not None
    memory = dataclasses.replace(megatron.memory, offloaded_blocks=3)
    kept = [
        _planned_bytes(dataclasses.replace(megatron, memory=each)).activations for each in (megatron.memory, memory)
    ]
    assert kept[1] == pytest.approx(kept[0] / 4)


@pytest.mark.parametrize("weights_first", [True, False])
def test_a_checkpoint_of_torch_stops_before_the_last_product_where_weights_multiply_what_it_reads(
    weights_first: bool,
) -> None:
    class Products(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += func is torch.ops.aten.mm.default
            return func(*args, **kwargs or {})

    up, down = (torch.randn(shape, requires_grad=True) for shape in ((8, 16), (16, 8)))

    def expert(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.silu(x @ up)
        return x + ((inner * weight) @ down if weights_first else (inner @ down) * weight)

    numbers = []
    for checkpointed in (False, True):
        x, weight = torch.randn(4, 8, requires_grad=True), torch.rand(4, 1, requires_grad=True)
        with Products() as products:
            y = checkpoint(expert, x, weight, use_reentrant=False) if checkpointed else expert(x, weight)
            y.sum().backward()
        numbers.append(products.number)
    assert numbers[1] - numbers[0] == (1 if weights_first else 2)


def test_recomputation_that_stops_leaves_out_the_last_products_of_experts_and_the_way_back_of_tokens() -> None:
    recipe = Recipe(
        model=dataclasses.replace(MODEL, d_model=256, d_expert=512, context_length=256),
        training=TrainingConfig(batch_size=8, micro_batch_size=1, parallelism="ddp", recompute="full"),
        parallelism=ParallelismConfig(data=8, expert=4, whole_experts=True),
    )
    stops = find_stack("automodel")
    goes_on = dataclasses.replace(stops, stops_recomputation=False)
    costs = [stack_costs(recipe, "8xH100", stack) for stack in (stops, goes_on)]
    size = choice_of(costs[0].resolved).size
    ((block, _),) = costs[0].blocks
    again = [each.seconds(block, size, "full", False).recompute for each in costs]
    rows = [row for row, _, _ in costs[0].rows(block, size, "full") if row.phase == "recompute"]
    last = [row for row in rows if row.contraction and "grouped" in row.operator and row.contraction[2] == 256]
    assert len(last) == 1
    assert again[1] - again[0] == pytest.approx(costs[0]._row_seconds(last[0]))
    sent = [plan_stack(recipe, "8xH100", stack).stages[0].sends.exposed["expert"] for stack in (stops, goes_on)]
    _, back = exchange_seconds(costs[0].interconnect, Group(4, 1), costs[0].model, 256, stops.exchange, 2)
    assert sent[0][0] == sent[1][0]
    assert sent[1][1] - sent[0][1] == pytest.approx(costs[0].model.n_layers * back)
