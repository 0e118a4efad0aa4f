"""Programs of the user's own on many ranks: their bytes beside those of real ranks, and their figures by hand."""

import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import napkin
from napkin.accounting.counting import count
from napkin.accounting.ledger import CollectiveCall
from napkin.errors import NapkinError
from napkin.planning.programs.agreement import require_agreement
from peers import peer
from reliability.harness import Napkin

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rank_programs.py"
ROWS, WIDTH, INNER = 8, 32, 64


Metered = Callable[..., float]


@pytest.fixture
def metered(tmp_path: Path, server: subprocess.Popen[str]) -> Metered:
    """The largest error of the planned bytes of any rank, in percent, after printing each rank's."""

    def run(*names: str, ranks: str = "2") -> float:
        argv = [str(SCRIPT), *names, "--ranks", ranks]
        folder = str(SCRIPT.parent)
        program = f"import runpy, sys; sys.argv = {argv!r}; sys.path.insert(0, {folder!r}); "
        done = Napkin(tmp_path, server).run(program=program + "runpy.run_path(sys.argv[0], run_name='__main__')")
        assert done.status == 0, done.errors
        printed = done.out.read_text()
        print(printed)
        _columns, _rule, *rows = [line for line in printed.splitlines() if line.startswith("|")]
        assert len(rows) == len(names) * len(ranks.split(","))
        return float(printed.rpartition(" ")[2].strip().removesuffix("%"))

    return run


@pytest.mark.thorough
def test_planned_bytes_are_those_of_real_ranks(metered: Metered) -> None:
    assert metered("plain_fsdp_uneven") <= 0.1


@pytest.mark.torture
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_planned_bytes_of_plain_programs_are_those_of_real_ranks(metered: Metered, ranks: str) -> None:
    names = ["plain_fsdp_uneven", "plain_fsdp_bf16_accumulated", "plain_tensor", "plain_ddp", "plain_experts"]
    assert metered(*names, "plain_pipeline", ranks=ranks) <= 0.1


@pytest.mark.peers
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_planned_bytes_of_foreign_models_are_those_of_real_ranks(metered: Metered, ranks: str) -> None:
    peer("transformers")
    names = ["llama_fsdp", "llama_fsdp_bf16", "llama_tensor", "llama_fsdp_tensor", "mixtral_fsdp", "qwen_moe_fsdp"]
    names += ["gpt2_fsdp_accumulated", "gpt2_ddp", "t5_fsdp", "vit_fsdp_uneven"]
    assert metered(*names, ranks=ranks) <= 0.1


class Layer(nn.Module):
    """Two products, and the mean of squares as the loss."""

    def __init__(self, rows: int = INNER) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, rows, bias=False), nn.Linear(rows, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def parts_of(model: Any) -> tuple[nn.Module, Any, Tensor]:
    return model, torch.optim.AdamW(model.parameters()), torch.randn(ROWS, WIDTH)


def fsdp() -> Any:
    return parts_of(fully_shard(Layer()))


def fsdp_uneven() -> Any:
    """45 rows on 16 ranks: 15 of 3 rows, and one without."""
    return parts_of(fully_shard(Layer(45)))


def tensor_within_data() -> Any:
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(Layer().to("cuda"), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return parts_of(fully_shard(model, mesh=mesh["data"]))


def alone() -> Any:
    return parts_of(Layer())


def test_one_rank_is_what_count_says() -> None:
    counted = count(Layer(), torch.randn(ROWS, WIDTH), optimizer=torch.optim.AdamW)
    planned = napkin.plan_program(alone).rank(0).ledger
    assert (planned.flops, planned.peak_bytes) == (counted.flops, counted.peak_bytes)
    assert planned.resident_bytes == counted.resident_bytes


@pytest.mark.thorough
def test_collectives_of_fsdp_are_those_of_the_closed_form() -> None:
    plan = napkin.plan_program(fsdp, on="4xH100")
    (each,) = plan.ranks
    whole = 4 * 2 * WIDTH * INNER
    sums = {of.operation: of for of in each.collectives}
    assert each.stands_for == each.traced == (0, 1, 2, 3)
    # The root keeps what its forward pass gathered.
    assert (sums["all_gather"].calls, sums["all_gather"].data_bytes) == (1, whole)
    assert (sums["reduce_scatter"].calls, sums["reduce_scatter"].data_bytes) == (1, whole)
    assert each.communication.bytes == 2 * 3 / 4 * whole
    # Blocks of the caching allocator are whole multiples of 512 bytes, as these are.
    assert dict(each.ledger.peak_by_category)["parameters"] == whole // 4
    time = each.time
    assert time is not None
    assert plan.seconds == time.seconds == time.price.seconds + time.exposed_seconds
    assert plan.fits
    assert plan.imbalance["flops"] == 1


@pytest.mark.thorough
def test_of_many_ranks_those_that_differ_are_traced_and_stand_for_the_others() -> None:
    plan = napkin.plan_program(fsdp_uneven, ranks=16)
    assert [each.stands_for for each in plan.ranks] == [tuple(range(15)), (15,)]
    assert len([rank for each in plan.ranks for rank in each.traced]) < 16
    everyone = {rank: plan.rank(rank) for rank in range(16)}
    parameters = {rank: dict(each.ledger.peak_by_category)["parameters"] for rank, each in everyone.items()}
    # 32 rows of the second product are two on each.
    assert parameters[0] == parameters[14] == 4 * (3 * WIDTH + 2 * 45)
    assert parameters[15] == 4 * (2 * 45)
    assert "of 16 ranks were traced" in plan.notes[0]


@pytest.mark.thorough
def test_both_dimensions_of_a_mesh_divide_the_work() -> None:
    plan = napkin.plan_program(tensor_within_data, on="16xH100")
    (each,) = plan.ranks
    assert each.stands_for == tuple(range(16))
    assert each.ledger.flops == 2 * 2 * ROWS * WIDTH * INNER * 3 // 2 - 2 * ROWS * WIDTH * INNER // 2
    sizes = {(of.operation, of.group_size) for of in each.collectives}
    assert ("all_reduce", 2) in sizes
    assert ("all_gather", 8) in sizes


class Attention(nn.Module):
    """Causal attention of one head, to keys and values of its own or to its queries themselves."""

    def __init__(self, *, one_tensor: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 16 if one_tensor else 48)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)[:, None]
        query, key, value = projected.chunk(3, -1) if projected.shape[-1] == 48 else (projected,) * 3
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()


def ring(*, one_tensor: bool = False) -> Any:
    """Sequences of 256 positions that ranks divide among them."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Attention(one_tensor=one_tensor).to("cuda", torch.bfloat16)

    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    sequences = torch.randn(2, 256, 16, device="cuda", dtype=torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters()), sequences, step


@pytest.mark.parametrize("one_tensor", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_context_parallelism_attends_to_half_of_the_pairs_of_other_ranks(one_tensor: bool) -> None:
    plan = napkin.plan_program(lambda: ring(one_tensor=one_tensor), on="2xH100")
    # Own queries and keys, of which a mask hides half; of the other rank's, half of either.
    pairs = 128 * 128 + 64 * 128
    assert {each.ledger.attention_flops for each in plan.ranks} == {3 * 2 * 2 * 2 * 16 * pairs}
    assert all((each.ledger.reserved_bytes or 0) >= each.ledger.peak_bytes for each in plan.ranks)


class Routed(nn.Module):
    """Tokens go to the rank that a router chooses, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, dist.get_world_size()), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(1).indices.flatten()
        sent = torch.zeros(dist.get_world_size(), dtype=torch.int64).scatter_add(0, chosen, torch.ones_like(chosen))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        world = dist.group.WORLD
        assert world is not None
        tokens = all_to_all_single_autograd(x[chosen.argsort()], here, there, world)
        return all_to_all_single_autograd(self.expert(tokens), there, here, world).square().mean()


def routed() -> Any:
    model = Routed()
    return model, torch.optim.AdamW(model.parameters()), torch.randn(ROWS, WIDTH)


def test_routed_tokens_are_distributed_evenly_which_the_plan_says() -> None:
    plan = napkin.plan_program(routed, on="2xH100")
    (sums,) = plan.ranks[0].collectives
    # Numbers of tokens, tokens there and back, and the gradient back: the batch itself needs none.
    assert (sums.operation, sums.calls) == ("all_to_all", 4)
    assert sums.data_bytes == 2 * 8 + 3 * 4 * ROWS * WIDTH
    assert any("evenly" in note for note in plan.notes)


def failing() -> Any:
    raise ValueError("no such data")


def returns_nothing() -> None: ...


def offloaded() -> Any:
    return parts_of(fully_shard(Layer(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def reads_a_value() -> Any:
    model, optimizer, batch = alone()
    return model, optimizer, batch, lambda model, optimizer, batch: model(batch).item()


def disagreeing() -> Any:
    """Rank 1 sums less than the others, which torch would wait for without end."""
    model, optimizer, batch = alone()

    def step(model: Any, optimizer: Any, batch: Tensor) -> None:
        dist.all_reduce(torch.zeros(2 - dist.get_rank()))
        model(batch).backward()

    return model, optimizer, batch, step


def waits_for_an_object() -> Any:
    if dist.get_rank() == 0:
        dist.recv_object_list([None], src=1)
    return alone()


@pytest.mark.parametrize(
    ("build", "arguments", "told"),
    [
        (failing, {}, r"building of failing raises ValueError at test_program_plan.py:\d+ on rank 0: no such data"),
        (returns_nothing, {}, "returns nothing: return the module, its optimizer and a batch"),
        (offloaded, {"on": "2xH100", "ranks": None}, r"has CPUOffloadPolicy: .* leave `offload_policy` out"),
        (reads_a_value, {}, "reads values"),
        (disagreeing, {}, r"collective 1 .* is all_reduce of 8 B on rank 0 and all_reduce of 4 B on rank 1"),
        (waits_for_an_object, {}, "rank 0 waits for an object that rank 1 never sends"),
        (alone, {"ranks": 0}, "ranks is 0"),
        (alone, {"on": "4xH100"}, "2 ranks on 4 devices"),
        (alone, {"most_traced": 0}, "most_traced is 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_planned_is_named_in_one_line(build: Any, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(NapkinError, match=told) as raised:
        napkin.plan_program(build, **{"ranks": 2, **arguments})
    assert "\n" not in str(raised.value)


def test_messages_must_match() -> None:
    sent = CollectiveCall("send", 8, (0, 1), peer=1)
    received = CollectiveCall("receive", 8, (0, 1), peer=0)
    require_agreement({0: [sent], 1: [received]}, of="a step")
    with pytest.raises(NapkinError, match="message 1 from rank 0 to rank 1 is 8 B and received as 4 B"):
        require_agreement({0: [sent], 1: [dataclasses.replace(received, data_bytes=4)]}, of="a step")
    with pytest.raises(NapkinError, match=r"message 1 .* is 8 B and never received"):
        require_agreement({0: [sent], 1: []}, of="a step")


def test_nothing_of_the_process_is_changed() -> None:
    before = os.environ.copy(), torch.get_rng_state(), nn.Module._apply, dist.init_process_group
    napkin.plan_program(fsdp, ranks=2)
    assert os.environ.copy() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert nn.Module._apply is before[2]
    assert dist.init_process_group is before[3]
    assert not dist.is_initialized()
