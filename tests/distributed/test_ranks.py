"""The rank of a process, its rows of a batch and the weights of its micro-batches; real jobs: tests/reliability."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from napkin.data.batches import Batches
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.distributed.parallel_model import CopiesModel, DDPModel, FSDPModel, ParallelModel
from napkin.distributed.ranks import ALONE, RankInfo, Ranks, rank_info_of
from napkin.errors import NapkinError
from napkin.model.transformer import Transformer
from napkin.optim.narrow_copies import StochasticRounding
from napkin.recipe.layout import Layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import per_device
from napkin.runs.run_folder import RunFolder, is_run
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.training.run import recipe_differences
from napkin.training.signals import Interruption, agree_on_signal
from oracles.tiny_run import MODEL, tiny_recipe, write_tiny_text

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


class InTurn(Ranks):
    """A rank whose sums were made before, by asking all of them."""

    def __init__(self, info: RankInfo, total: int) -> None:
        super().__init__(info)
        self.total = total

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.total)


def test_the_rank_is_what_torchrun_says() -> None:
    assert rank_info_of(TORCHRUN) == RankInfo(rank=5, world_size=8, local_rank=1, local_world_size=4, restart_count=2)


def test_without_torchrun_a_process_is_alone() -> None:
    assert rank_info_of({"PATH": "/bin"}) == rank_info_of({"WORLD_SIZE": "8", "RANK": "3"}) == RankInfo()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"RANK": "x"}, "RANK is 'x', not a number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1', not a number"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "4 of 4 on this machine"),
    ],
)
def test_contradicting_variables_are_refused(change: dict[str, str], told: str) -> None:
    with pytest.raises(NapkinError, match=told):
        rank_info_of({**TORCHRUN, **change})


def test_ranks_share_the_cores_of_their_machine() -> None:
    two_of_four = Ranks(RankInfo(rank=1, world_size=4, local_rank=1, local_world_size=2))
    assert two_of_four.threads(None, 8) == 4
    assert two_of_four.threads(2, 8) == 2
    assert two_of_four.threads(8, 8) == 4
    assert two_of_four.threads(None, 1) == 1
    assert ALONE.threads(None, 8) == 8
    assert ALONE.threads(16, 8) == 16


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_rows_of_all_ranks_are_the_batch_of_one(tmp_path: Path, size: int) -> None:
    write_tiny_text(tmp_path)
    tokens = TokenFile.open(tmp_path / "train.tokens")

    def batches(rows: slice) -> Batches:
        return Batches(tokens, context_length=32, batch_size=4, seed=7, rows=rows)

    whole = batches(slice(None))
    parts = [batches(Layout(data=size).rows(rank, 4)) for rank in range(size)]
    for index in (0, 3, 1000):
        for side in (0, 1):
            assert torch.equal(torch.cat([part[index][side] for part in parts]), whole[index][side])


@pytest.mark.parametrize(("size", "micro_batch_size"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2)])
def test_weighed_micro_batches_make_the_loss_of_the_batch_though_targets_are_ignored(
    size: int, micro_batch_size: int
) -> None:
    model = Transformer(dataclasses.replace(MODEL, vocab_size=16))
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(16, (2, 8, 32), generator=draw)
    # From all to none of a row.
    for row in range(8):
        targets[row, : 4 * row] = -1
    targets[7] = -1
    wanted = model.loss(inputs, targets)
    counted, losses = int((targets >= 0).sum()), []
    for rank in range(size):
        ranks = InTurn(RankInfo(rank, size), counted)
        parallel_model = ParallelModel(model, ranks, Layout(data=size))
        rows = parallel_model.rows(8)
        weights = parallel_model.micro_batch_weights(targets[rows], micro_batch_size)
        parts = zip(inputs[rows].split(micro_batch_size), targets[rows].split(micro_batch_size), weights, strict=True)
        losses.append(sum(model.loss(*part).item() * float(weight) for *part, weight in parts))
    assert sum(losses) / size == pytest.approx(wanted.item(), abs=1e-6)


def test_a_rank_drops_what_no_other_does() -> None:
    model = Transformer(dataclasses.replace(MODEL, vocab_size=16))
    seeds = {
        ParallelModel(model, Ranks(RankInfo(rank, 64)), Layout(data=64)).rank_seed(number)
        for rank in range(64)
        for number in range(100)
    }
    assert len(seeds) == 6400
    assert ParallelModel(model, ALONE, Layout()).rank_seed(5) == 5


def test_one_alone_agrees_with_itself() -> None:
    interruption = Interruption()
    assert agree_on_signal(ALONE, interruption) is None
    interruption.signal = signal.SIGTERM
    assert agree_on_signal(ALONE, interruption) is signal.SIGTERM


@pytest.mark.parametrize(
    ("training", "n_devices", "told"),
    [
        ({"batch_size": 6}, 4, "batch_size 6 does not divide among 4 devices: use a multiple, .* 8"),
        ({"batch_size": 2}, 4, "batch_size 2 does not divide among 4 devices"),
        ({"batch_size": 12, "micro_batch_size": 4}, 2, "each of 2 devices gets 6 sequences"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(training: dict[str, int], n_devices: int, told: str) -> None:
    with pytest.raises(NapkinError, match=told):
        per_device(tiny_recipe(".", **training), n_devices)


def test_a_restarted_job_knows_its_run_by_its_recipe(tmp_path: Path) -> None:
    recipe = tiny_recipe(".")
    resolved = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, vocab_size=257),
        optimizer=recipe.optimizer.resolved,
        training=dataclasses.replace(recipe.training, device="cpu", precision="bf16", threads=3),
    )
    run = tmp_path / "run"
    assert not is_run(run)
    RunFolder.create(run, resolved, ByteTokenizer([SEPARATOR]))
    assert is_run(run)
    assert recipe_differences(recipe, run) == []
    assert recipe_differences(tiny_recipe(".", data_seed=1), run) == ["training.data_seed is 0, not 1"]
    for other in (tiny_recipe("other"), Recipe()):
        assert recipe_differences(other, run)


@pytest.mark.thorough
def test_a_process_alone_loads_nothing_of_the_machinery() -> None:
    loaded = """
import sys
import napkin.cli.train.following, napkin.training.run
machinery = {"napkin.distributed.process_group", "torch.distributed.fsdp", "torch.distributed.tensor"}
print(sorted(machinery & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_are_rounded_independently_and_copies_alike() -> None:
    model = Transformer(dataclasses.replace(MODEL, vocab_size=8))
    value = torch.linspace(1, 2, 999)

    def rounded(seed: int) -> Tensor:
        rounding, target = StochasticRounding(seed), torch.empty_like(value, dtype=torch.bfloat16)
        rounding.begin(3)
        rounding([target], [value.clone()])
        return target

    def are_rounded_alike(kind: type[ParallelModel], layout: Layout) -> bool:
        pair = (ParallelModel(model, Ranks(RankInfo(rank=rank, world_size=2)), layout) for rank in range(2))
        return torch.equal(*(rounded(kind.rounding_seed(each, 5)) for each in pair))  # pyright: ignore[reportArgumentType]

    assert are_rounded_alike(DDPModel, Layout(data=2))
    assert not are_rounded_alike(FSDPModel, Layout(shard=2))
    # Both have the same shard, and whole copies of what tensor parallelism does not divide.
    assert are_rounded_alike(FSDPModel, Layout(data=2))
    assert are_rounded_alike(FSDPModel, Layout(tensor=2))
    assert are_rounded_alike(CopiesModel, Layout(data=2, shard_optimizer=True))
