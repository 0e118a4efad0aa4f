"""Which tile a launch takes, and what a file of tuned tiles must be to count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.kernels.triton_tiles import (
    ELEMENTWISE,
    AttentionTile,
    BlockTile,
    Choice,
    Device,
    all_choices,
    attention_tile,
    forced,
    keep_choices,
    load_choices,
    tuned,
)

DEVICE = Device("NVIDIA H100 80GB HBM3", "9.0", "3.8.0", "0123456789abcdef")
CHOICE = Choice("swiglu", "bfloat16", 4096, "", {"block": 2048, "warps": 8}, 10.5, 12.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))


def test_choices_are_kept_for_their_device_and_replace_those_of_the_same_key() -> None:
    other = Choice("adamw", "float32", 1, "", {"block": 512, "warps": 4}, 1.0, 1.0)
    faster = Choice("swiglu", "bfloat16", 4096, "", {"block": 4096, "warps": 8}, 9.0, 12.0)
    keep_choices(DEVICE, [CHOICE, other])
    keep_choices(DEVICE, [faster])
    kept = load_choices(DEVICE)
    assert kept is not None
    assert kept.choices == [faster, other]
    assert all_choices() == [kept]
    assert load_choices(Device(DEVICE.name, DEVICE.capability, "3.9.0", DEVICE.kernels)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "rm -rf"},
        {"tile": {"block": 2048}},
        {"tile": {"block": 2048, "warps": 8, "stages": 2}},
        {"tile": {"block": 1000, "warps": 8}},
        {"tile": {"block": 2**20, "warps": 8}},
        {"tile": {"block": 0, "warps": 8}},
        {"tile": {"block": "2048", "warps": 8}},
        {"width": -1},
        {"microseconds": 0},
        {"dtype": "b" * 300},
    ],
    ids=str,
)
def test_a_file_with_an_impossible_choice_counts_as_none(change: dict[str, Any]) -> None:
    path = keep_choices(DEVICE, [CHOICE])
    text = json.loads(path.read_text())
    text["choices"][0] |= change
    path.write_text(json.dumps(text))
    assert load_choices(DEVICE) is None
    assert all_choices() == []


@pytest.mark.parametrize("text", ["", "[", "{}", "null", "[" * 100_000])
def test_a_damaged_file_counts_as_none_and_is_replaced(text: str) -> None:
    path = keep_choices(DEVICE, [CHOICE])
    path.write_text(text)
    assert load_choices(DEVICE) is None
    keep_choices(DEVICE, [CHOICE])
    assert load_choices(DEVICE) is not None


def test_a_launch_takes_the_tile_that_is_tried_and_else_the_default() -> None:
    x = torch.zeros(2)
    assert tuned("swiglu", ELEMENTWISE, x, 4096) == ELEMENTWISE
    with forced("swiglu", BlockTile(128, 2)):
        assert tuned("swiglu", ELEMENTWISE, x, 4096) == BlockTile(128, 2)
        assert tuned("gelu", ELEMENTWISE, x, 1) == ELEMENTWISE
    assert tuned("swiglu", ELEMENTWISE, x, 4096) == ELEMENTWISE


def test_attention_has_a_default_for_every_width_of_head() -> None:
    for head_dim in (1, 64, 65, 128, 200, 256):
        query = torch.zeros(1, 1, 1, head_dim, dtype=torch.bfloat16)
        for bounded in (False, True):
            assert isinstance(attention_tile("forward", query, bounded=bounded, is_causal=True), AttentionTile)
