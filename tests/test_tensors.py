"""Tensors are windows onto storages."""

import itertools
import random

import torch

from napkin.tensors import inspect, storage_bytes, view_obstacle


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
    for _ in range(20):
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
