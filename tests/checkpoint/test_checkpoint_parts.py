"""Parts of tensors: whatever layout has written them, every other reads what torch itself would give its ranks."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from napkin.checkpoint.shard_files import copy_files_into, first_fault, tensor_files, write_tensors
from napkin.checkpoint.sharded_writer import assign_shards, assigned_parts
from napkin.distributed.ranks import RankInfo, Ranks
from napkin.optim.saved_state import local, part_like
from napkin.optim.tensor_parts import Box, Parts, parts_of

HEIGHTS = {"stacked": (8, 4, 4), "stacked.bias": (8, 4, 4), "stack of stacked": (4, 4)}
"""Divisible among the tensor ranks of all layouts."""


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"vector": (7,), "matrix": (9, 6), "experts": (4, 3, 5), "number": ()}
    shapes |= {"stacked": (16, 3), "stacked.bias": (16,), "stack of stacked": (2, 8, 3)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


Layout = tuple[tuple[int, ...], dict[str, tuple[Placement, ...]], int]
"""Sizes of a mesh, how each tensor is divided on it, and the number of tensor ranks."""


def fsdp(*sizes: int) -> Layout:
    """Rows on the last dimension of the mesh, copies on the others."""
    placements = (*[Replicate()] * (len(sizes) - 1), Shard(0))
    return sizes, {name: placements for name, tensor in tensors().items() if tensor.ndim}, 1


def fsdp_and_tensor(shards: int, ranks: int) -> Layout:
    """As torch divides parameters that are divided among tensor ranks already."""
    rows, columns = (_StridedShard(0, split_factor=ranks), Shard(0)), (Shard(0), Shard(1))
    divided = {"vector": (Shard(0), Replicate()), "matrix": columns, "experts": columns}
    divided |= {"stacked": rows, "stacked.bias": rows, "stack of stacked": (Shard(0), Shard(1))}
    return (shards, ranks), divided, ranks


def anything(seed: int) -> Layout:
    """Each dimension of the mesh divides any dimension of a tensor, or none."""
    draw = random.Random(seed)
    sizes = tuple(draw.choice((1, 2, 3)) for _ in range(draw.choice((1, 2, 3))))
    divided = {
        name: tuple(draw.choice([Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]) for _ in sizes)
        for name, tensor in tensors().items()
    }
    return sizes, divided, 1


LAYOUTS: dict[str, Layout] = {
    "one": ((1,), {}, 1),
    "fsdp": fsdp(4),
    "hsdp": fsdp(2, 3),
    "tensor": ((2,), {"matrix": (Shard(1),), "stacked": (Shard(0),), "stacked.bias": (Shard(0),)}, 2),
    "tensor 4": ((4,), {"matrix": (Shard(0),), "stacked": (Shard(0),), "stack of stacked": (Shard(1),)}, 4),
    "fsdp and tensor": fsdp_and_tensor(2, 2),
    "unevenly": fsdp_and_tensor(3, 2),
    "more ranks than rows": fsdp(11),
    **{f"anything {seed}": anything(seed) for seed in range(4)},
}


@contextlib.contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[Any]:
    """The mesh of a layout as one of its ranks has it; nothing is sent."""
    sizes, _, _ = layout
    world_size = torch.Size(sizes).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def in_order_of_ranks(name: str, whole: Tensor, ranks: int) -> Tensor:
    """Stacked matrices as tensor ranks have them: the first rank's part of each, then the second's."""
    if name not in HEIGHTS:
        return whole
    dimension = max(0, whole.ndim - 2)
    matrices = [matrix.chunk(ranks, dimension) for matrix in whole.split(HEIGHTS[name], dimension)]
    return torch.cat([matrix[rank] for rank in range(ranks) for matrix in matrices], dimension)


def divided(layout: Layout, mesh: Any, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tensors, divided by torch."""
    _, placements, ranks = layout
    made: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        ordered = in_order_of_ranks(name, tensor, ranks)
        if name in placements:
            ordered = distribute_tensor(ordered, mesh, placements[name], src_data_rank=None)
        made[name] = ordered
    return made


def parts(named: dict[str, Tensor], ranks: int) -> Parts:
    return {name: parts_of(tensor, heights=HEIGHTS.get(name, ()), ranks=ranks) for name, tensor in named.items()}


class Gathered(Ranks):
    """A rank whose turn comes after all others have said what they gather."""

    def __init__(self, rank: int, values: list[Any]) -> None:
        super().__init__(RankInfo(rank, max(1, len(values))))
        self.values = values

    def all_gather(self, value: Any) -> list[Any]:
        return self.values


class Telling(Ranks):
    """A rank that only tells what it gathers."""

    def all_gather(self, value: Any) -> list[Any]:
        self.told = value
        return [value]


def write(folder: Path, layout: Layout) -> None:
    """What all ranks write, one after the other."""
    told: list[Any] = []
    for rank in range(torch.Size(layout[0]).numel()):
        with rank_of(layout, rank) as mesh:
            teller = Telling(RankInfo())
            assign_shards(teller, {"model.safetensors": parts(divided(layout, mesh, tensors()), layout[2])})
            told.append(teller.told)
    for rank in range(len(told)):
        with rank_of(layout, rank) as mesh:
            here = {"model.safetensors": parts(divided(layout, mesh, tensors()), layout[2])}
            for name, named in assigned_parts(assign_shards(Gathered(rank, told), here), here).items():
                assert not (folder / name).exists()
                write_tensors(folder / name, named)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        write(folder / name, layout)
    return folder


def files(folder: Path) -> list[Path]:
    return [folder / name for name in tensor_files("model", sorted(path.name for path in folder.iterdir()))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_writes_every_number_once_and_in_the_files_that_the_first_one_announces(
    written: Path, name: str
) -> None:
    assert sorted(files(written / name)) == sorted((written / name).iterdir())
    stored = sum(tensor.numel() for path in files(written / name) for tensor in load_file(path).values())
    assert stored == sum(tensor.numel() for tensor in tensors().values())


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_reads_of_any_other_what_torch_gives_its_ranks(written: Path, name: str) -> None:
    layout = LAYOUTS[name]
    for rank in range(torch.Size(layout[0]).numel()):
        with rank_of(layout, rank) as mesh:
            expected = divided(layout, mesh, tensors())
            for other in LAYOUTS:
                empty = divided(layout, mesh, {name: torch.zeros_like(each) for name, each in tensors().items()})
                copy_files_into(parts(empty, layout[2]), files(written / other))
                for key, tensor in expected.items():
                    assert torch.equal(local(empty[key]), local(tensor)), (other, key, rank)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_takes_the_part_of_a_whole_tensor_that_torch_gives_it(name: str) -> None:
    layout = LAYOUTS[name]
    for rank in range(torch.Size(layout[0]).numel()):
        with rank_of(layout, rank) as mesh:
            for key, tensor in divided(layout, mesh, tensors()).items():
                whole = in_order_of_ranks(key, tensors()[key], layout[2])
                assert torch.equal(part_like(tensor, whole), local(tensor))


# torch tells that its reader is alone.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_reads_the_same(written: Path, name: str) -> None:
    theirs = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load_with_torch(theirs, storage_reader=HuggingFaceStorageReader(str(written / name)), no_dist=True)
    for key, tensor in tensors().items():
        assert torch.equal(theirs[key], tensor), key


def fault_by_counting(boxes: list[Box], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The specification of `first_fault`."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[tuple(slice(*ends) for ends in zip(box.offsets, box.ends, strict=True))] += 1
    return next((at for at in itertools.product(*map(range, shape)) if counts[at] != 1), None)


def test_the_first_index_that_is_in_no_box_or_in_two_is_found() -> None:
    draw, found = random.Random(0), 0
    for _ in range(500):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 3)))
        boxes = [Box((0,) * len(shape), shape)]
        # Cut boxes in two, which are a division of the whole, and change one of them now and then.
        for _ in range(draw.randint(0, 5) if shape else 0):
            box, dimension = boxes.pop(draw.randrange(len(boxes))), draw.randrange(len(shape))
            at = draw.randint(0, box.sizes[dimension])
            for start, size in ((0, at), (at, box.sizes[dimension] - at)):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dimension] += start
                sizes[dimension] = size
                boxes += [Box(tuple(offsets), tuple(sizes))] * (size > 0)
        if shape and draw.random() < 0.5:
            box, dimension = boxes.pop(), draw.randrange(len(shape))
            offsets = list(box.offsets)
            offsets[dimension] = draw.randint(0, shape[dimension] - box.sizes[dimension])
            boxes += [Box(tuple(offsets), box.sizes)] * draw.randint(0, 2)
        expected = fault_by_counting(boxes, shape)
        assert first_fault(boxes, shape) == expected, (boxes, shape)
        found += expected is not None
    assert 75 < found < 375
