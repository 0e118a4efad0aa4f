"""Tensors are windows onto storages."""

import copy
import itertools
import random
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

from napkin import tensors
from napkin.tensors import _HUGE_PAGES, inspect, on_huge_pages, storage_bytes, view_obstacle, zeros_side_by_side


def test_bytes_of_a_4_by_8_fp32_tensor_are_128() -> None:
    assert inspect(torch.zeros(4, 8)).bytes == 128


def test_a_gpt3_feed_forward_matrix_in_fp32_is_2304_mib() -> None:
    matrix = torch.empty(12288 * 4, 12288, device="meta")
    assert inspect(matrix).bytes == 2415919104 == 2304 * 2**20


def test_views_share_a_storage_and_count_once() -> None:
    tensor = torch.zeros(32, 32)
    assert storage_bytes([tensor, tensor.T, tensor[3:], tensor.view(-1)]) == 4096
    assert storage_bytes([tensor, tensor.clone()]) == 8192


def test_a_small_slice_keeps_its_whole_storage_alive() -> None:
    row = torch.zeros(1000, 1000)[7]
    report = inspect(row)
    assert (report.bytes, report.storage_bytes, report.offset) == (4000, 4_000_000, 7000)


def test_who_shares_the_storage_is_found() -> None:
    tensor = torch.zeros(6, 5)
    column = tensor[:, 1]
    assert inspect(tensor).shared_with == ("Tensor (6,), strides (5,), 24 B",)
    assert inspect(column).shared_with == ("Tensor (6, 5), strides (5, 1), 120 B",)
    del column
    assert inspect(tensor).shared_with == ()


def test_an_obstacle_is_named_just_where_view_fails() -> None:
    shapes = [(24,), (-1, 4), (6, 4), (2, 12), (8, 3), (3, 2, 4), (2, 3, 4), (4, 3, 2), (5,), (-1, -1)]
    for order, shape in itertools.product(itertools.permutations(range(3)), shapes):
        tensor = torch.zeros(2, 3, 4).permute(order)
        try:
            tensor.view(shape)
            works = True
        except RuntimeError:
            works = False
        assert (view_obstacle(tensor, shape) is None) == works, (order, shape)


def test_the_report_reads_as_lines() -> None:
    text = str(inspect(torch.zeros(2, 3, dtype=torch.bfloat16).T))
    assert "bf16" in text
    assert "not contiguous" in text
    assert "fails: dimensions 0 and 1 cannot be merged: stride 1 is not 2 · 3" in text


def test_what_several_tensors_share_is_what_writing_to_one_changes_in_another() -> None:
    draw = random.Random(0)
    for _ in range(6):
        storage = torch.zeros(240, dtype=torch.uint8)
        views = {"whole": storage}
        for number in range(4):
            dtype = draw.choice([torch.uint8, torch.int16, torch.float32])
            part = storage[draw.choice([0, 4, 16, 100]) :]
            part = part[: len(part) // 4 * 4].view(dtype)
            rows = part[: len(part) // 6 * 6].view(-1, 6)
            shapes = [part[::3], rows.T[1:4], rows[1:, ::2], part[:1].expand(5), part[5:5], rows]
            views[f"v{number}"] = draw.choice(shapes)
        views["apart"] = torch.zeros(7)
        report = inspect(**views)
        assert report.storages == (tuple(name for name in views if name != "apart"), ("apart",))
        assert report.storage_bytes == 240 + 28
        found = {(one, other): shared for one, other, shared in report.overlaps}
        for one, other in itertools.combinations(views, 2):
            touched = []
            for name in (one, other):
                storage.zero_()
                views["apart"].zero_()
                # All bits of each element, whatever its format.
                last = views[name]
                ones = torch.full((last.element_size(),), 255, dtype=torch.uint8).view(last.dtype)
                if last.numel():
                    torch.as_strided(last, *once(last)).copy_(ones)
                touched.append(storage.bool() if name != "apart" else torch.zeros(240, dtype=torch.bool))
            assert found.get((one, other), 0) == int((touched[0] & touched[1]).sum())
    matrix = torch.zeros(3, 2)
    assert "tensor 1 and tensor 2 share 8 bytes" in str(inspect(matrix, matrix[1]))


def once(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides with each element once."""
    return tuple(n if s else min(n, 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True)), tensor.stride()


@pytest.mark.skipif(not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text(), reason="there are no huge pages")
def test_a_model_on_huge_pages_is_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_SMALLEST_ON_HUGE_PAGES", 1)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(40, 30), nn.Linear(30, 7)).to(torch.bfloat16)
    first, second, last = (cast(nn.Linear, each) for each in model)
    second.weight, last.bias = first.weight, nn.Parameter(torch.arange(7.0))
    whole = torch.arange(60)
    model.register_buffer("whole", whole)
    model.register_buffer("part", whole[7:47].view(5, 8).T)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    places = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    assert on_huge_pages(model) is model
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    moved = [each.data_ptr() for each in (*model.parameters(), *model.buffers())]
    assert not places.intersection(moved)
    # Side by side, on lines of their own.
    assert max(moved[:-2]) - min(moved[:-2]) < 64 * 60
    assert all(address % 64 == 0 for address in moved[:-2])
    # What was shared is shared.
    assert first.weight is second.weight
    cast(Any, model.whole)[7] = -1
    assert cast(Any, model.part)[0, 0] == -1
    kept = copy.deepcopy(model)
    assert torch.equal(kept[0].weight, before["0.weight"])  # pyright: ignore


def test_large_zeros_stand_side_by_side_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3, 5), (0, 4), (7,)]
    small = zeros_side_by_side(shapes, torch.bfloat16, "cpu")
    monkeypatch.setattr("napkin.tensors._SMALLEST_ON_HUGE_PAGES", 1)
    large = zeros_side_by_side(shapes, torch.bfloat16, "cpu")
    for found in (small, large):
        assert [(tuple(each.shape), each.dtype, bool(each.any())) for each in found] == [
            (shape, torch.bfloat16, False) for shape in shapes
        ]
    if _HUGE_PAGES.exists() and "[never]" not in _HUGE_PAGES.read_text():
        assert large[0].data_ptr() % 2**21 == 0
        assert large[2].data_ptr() == large[0].data_ptr() + 64
    large[0].fill_(1)
    assert not large[2].any()
    with FakeTensorMode():
        assert all(is_fake(each) for each in zeros_side_by_side(shapes, torch.bfloat16, "cpu"))
