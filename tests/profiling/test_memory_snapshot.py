"""Memory snapshots: as torch's own code reads them, to the byte of the meter; strangers' files are data alone."""

import contextlib
import json
import os
import pickle
import pickletools
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda._memory_viz as memory_viz
from torch import nn

from napkin.accounting.quantities import QuantityRow
from napkin.errors import NapkinError
from napkin.profiling.memory_snapshot import MemorySnapshot, record_snapshot, write_memory_snapshot
from napkin.profiling.plain_pickle import decode_plain_pickle, encode_plain_pickle
from napkin.profiling.snapshot_view import beside_plan, view_snapshot, write_snapshot_page

CPU = torch.device("cpu")


class Recomputing(nn.Module):
    """A block that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return x + checkpoint(lambda given: self.down(torch.relu(self.up(given))), x, use_reentrant=False)


def trained(*, clears_first: bool) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    module = nn.Sequential(Recomputing(), nn.GELU(), Recomputing())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batch = torch.randn(64, 32)

    def step() -> None:
        if clears_first:
            optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
        if not clears_first:
            optimizer.zero_grad()

    for _ in range(3):
        step()
    return module, step


@cache
def example(*, clears_first: bool = False) -> MemorySnapshot:
    module, step = trained(clears_first=clears_first)
    return record_snapshot(step, module, CPU)


def replayed_peak(values: dict[str, Any], device: int = 0) -> int:
    """Brute force: walk back from the blocks in use at the end, keep all sums."""
    blocks = [block for segment in values["segments"] if segment["device"] == device for block in segment["blocks"]]
    now = sum(block["requested_size"] for block in blocks if block["state"].startswith("active"))
    sums = [now]
    for event in reversed(values["device_traces"][device]):
        now += {"alloc": -event["size"], "free_completed": event["size"]}.get(event["action"], 0)
        sums.append(now)
    assert min(sums) >= 0
    return max(sums)


@pytest.mark.parametrize("clears_first", [False, True])
def test_the_peak_of_a_written_snapshot_is_the_meters_to_the_byte(tmp_path: Path, *, clears_first: bool) -> None:
    found = example(clears_first=clears_first)
    for name in ("snapshot.pickle", "snapshot.json"):
        view = view_snapshot(write_memory_snapshot(found, tmp_path / name))
        assert view.peak_bytes == replayed_peak(found.values) == found.measured.peak_bytes
        assert view.fragmentation == 0
        assert sum(place.bytes for place in view.at_peak) == view.peak_bytes
    (tmp_path / "other.json").write_text("kept")
    with pytest.raises(NapkinError, match="exists"):
        write_memory_snapshot(found, tmp_path / "other.json")


def test_python_reads_the_written_pickle_as_what_was_written() -> None:
    values = {**example().values, "numbers": [0, -1, 255, 256, 2**31, -(2**31), 2**63, -(2**63) - 1, 0.1, True, None]}
    data = encode_plain_pickle(values)
    assert pickle.loads(data) == values  # noqa: S301
    assert decode_plain_pickle(data, "written") == values
    for protocol in (2, 3, 4, 5):
        assert decode_plain_pickle(pickle.dumps(values, protocol), "torch's") == values
    # What the viewer of pytorch.org knows.
    known = {"PROTO", "EMPTY_DICT", "EMPTY_LIST", "MEMOIZE", "MARK", "BINUNICODE", "BININT", "BININT1", "BININT2"}
    known |= {"LONG1", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE", "LONG_BINGET", "APPEND", "SETITEMS", "TUPLE", "STOP"}
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= known


def test_torchs_own_pages_and_summaries_take_a_snapshot() -> None:
    values = example().values
    for draw in (memory_viz.trace_plot, memory_viz.segment_plot):
        assert "MemoryViz" in draw(values)
    assert "segments" in memory_viz.segsum(values)
    lines = memory_viz.memory(values, format_flamegraph=lambda text: text).splitlines()
    at_end = sum(int(line.rpartition(" ")[2]) for line in lines)
    assert at_end == sum(segment["total_size"] for segment in values["segments"])


def test_frames_name_the_operator_and_the_module_also_in_the_backward_pass() -> None:
    allocated = [each for each in example().values["device_traces"][0] if each["action"] == "alloc"]
    places = [[(frame["filename"], frame["name"]) for frame in each["frames"]] for each in allocated]
    products = [place for place in places if place and place[0] == ("operator", "aten::addmm")]
    assert len([each for each in products if ("module", "0.up (Linear)") in each]) == 2  # forward and recomputed
    backward = [each for each in places if any("MmBackward0" in name or "AddmmBackward0" in name for _, name in each)]
    assert any(("module", "2.down (Linear)") in each for each in backward)
    assert not [name for each in places for _, name in each if "object at 0x" in name]


@pytest.mark.thorough
def test_a_snapshot_that_torch_made_of_its_profile_is_read(tmp_path: Path) -> None:
    _, step = trained(clears_first=True)
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profiler:
        step()
    values = memory_viz._profile_to_snapshot(profiler)
    device = max(range(len(values["device_traces"])), key=lambda number: len(values["device_traces"][number]))
    for protocol in (2, 4):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(values, protocol))
        view = view_snapshot(path)
        assert view.device == device
        assert view.peak_bytes == brute_force(values, device)
        assert view.events == len(values["device_traces"][device])


def brute_force(values: dict[str, Any], device: int) -> int:
    """The most bytes of blocks of which each is in use from its first to its last event."""
    trace = values["device_traces"][device]
    intervals: list[tuple[int, int, int]] = []
    born: dict[int, tuple[int, int]] = {}
    freed = {event["addr"] for event in trace if event["action"] == "free_completed"}
    for at, event in enumerate(trace):
        if event["action"] == "alloc":
            born[event["addr"]] = (at + 1, event["size"])
        elif event["action"] == "free_completed":
            begin, size = born.pop(event["addr"], (0, event["size"]))
            intervals.append((begin, at + 1, size))
    final: dict[int, int] = {}
    for segment in values["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment["device"] == device and block["state"].startswith("active"):
                final[block.get("address", address)] = block["requested_size"]
            address += block["size"]
    intervals += [(begin, len(trace) + 1, size) for begin, size in born.values()]
    # torch's own conversion of a profile keeps what was freed in the last state.
    intervals += [(0, len(trace) + 1, final[each]) for each in final.keys() - born.keys() - freed]
    return max(sum(size for begin, end, size in intervals if begin <= at < end) for at in range(len(trace) + 1))


@pytest.mark.parametrize("seed", range(5))
def test_histories_of_a_caching_allocator_are_replayed(tmp_path: Path, seed: int) -> None:
    """By the format that torch documents: rounded blocks in segments, a history that begins in the middle."""
    draws = random.Random(seed)
    segments = [(2**33 + 2**24 * number, draws.choice([2**20, 2**21])) for number in range(3)]
    free = [(address + 512 * slot) for address, size in segments for slot in range(size // 512)]
    live: dict[int, int] = {}
    trace: list[dict[str, Any]] = []
    for _ in range(300):
        if live and draws.random() < 0.45:
            address = draws.choice(sorted(live))
            size = live.pop(address)
            free.append(address)
            common = {"addr": address, "size": size, "stream": 0, "frames": []}
            trace += [{"action": action, **common} for action in ("free_requested", "free_completed")]
        else:
            address, size = free.pop(draws.randrange(len(free))), draws.randint(1, 512)
            live[address] = size
            frames = [{"filename": "/x/train.py", "line": draws.randint(1, 9), "name": "forward"}]
            trace.append({"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames})
    kept = trace[draws.randint(0, 100) :]
    blocks = [
        [{"address": a, "size": 512, "requested_size": s, "state": "active_allocated", "frames": []}
         for a, s in live.items() if begin <= a < begin + size]
        for begin, size in segments
    ]  # fmt: skip
    values = {
        "segments": [
            {"device": 0, "address": begin, "total_size": size, "stream": 0, "blocks": of}
            for (begin, size), of in zip(segments, blocks, strict=True)
        ],
        "device_traces": [kept],
    }
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(values))
    view = view_snapshot(path)
    assert view.peak_bytes == brute_force(values, 0) == replayed_peak(values)
    assert view.fragmentation == sum(size for _, size in segments) - view.peak_bytes
    assert {place.name for place in view.at_peak} <= {
        *(f"train.py:{line} forward" for line in range(1, 10)),
        "allocated before the history begins",
    }


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def nested(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


HOSTILE = {
    "runs a command": (pickle.dumps(_Calls(os.system, "touch made"), 4), "STACK_GLOBAL"),
    "runs a command, protocol 2": (pickle.dumps(_Calls(os.system, "touch made"), 2), "GLOBAL"),
    "hidden in a value": (pickle.dumps({"segments": [], "x": _Calls(eval, "1")}, 4), "STACK_GLOBAL"),
    "an old protocol": (b"\x80\x01.", "protocol 1"),
    "a huge integer": (pickle.dumps({"segments": 1 << 2000}, 4), "LONG1|integer has"),
    "an integer of 4 GB": (b"\x80\x04\x8b\xff\xff\xff\x7f", "LONG4"),
    "a string of 8 EB": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f", "a string has"),
    "truncated": (encode_plain_pickle({"segments": [1, 2, 3]})[:-5], "ends early"),
    "nothing": (b"\x80", "ends early"),
    "deep lists": (nested(20_000), "not a memory snapshot"),
    "deep marks": (b"\x80\x04" + b"(" * 1000, "nested deeper"),
    "an empty stack": (b"\x80\x04a.", "has not made"),
    "appends to a number": (b"\x80\x04K\x01K\x02a.", "appends to a int"),
    "a list as a key": (b"\x80\x04}(]K\x01u.", "a list is a key"),
    "an unknown reference": (b"\x80\x04h\x07.", "has not stored"),
    "an unknown instruction": (b"\x80\x04\xf0", "0xf0"),
    "bytes": (pickle.dumps(b"abc", 4), "SHORT_BINBYTES"),
    "a list": (pickle.dumps([1], 4), "the file is a list"),
    "a list that contains itself": (b"\x80\x04}(\x8c\x0ddevice_traces]\x94h\x00au.", "action"),
    "empty": (b"", "neither a pickle"),
    "no JSON": (b"{", "neither a pickle"),
    "deep JSON": (b"[" * 100_000, "neither a pickle"),
    "nothing in it": (b"{}", "no segments and no events"),
    "an address as text": (b'{"device_traces": [[{"action": "alloc", "addr": "x", "size": 1}]]}', r"\[0\].addr is 'x'"),
    "a negative size": (b'{"device_traces": [[{"action": "alloc", "addr": 1, "size": -5}]]}', "size is -5"),
    "a size beyond all memory": (b'{"device_traces": [[{"action": "alloc", "addr": 1, "size": 1e300}]]}', "size is 1e"),
    "an unknown action": (b'{"device_traces": [[{"action": "explode"}]]}', "'explode'"),
    "a device of its own": (b'{"segments": [{"device": 99999999, "address": 0, "total_size": 1}]}', "segments.device"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data, said = HOSTILE[name]
    Path("snapshot.pickle").write_bytes(data)
    with pytest.raises(NapkinError) as refused:
        view_snapshot("snapshot.pickle")
    message = str(refused.value)
    assert re.search(said, message), message
    assert "\n" not in message
    assert "snapshot.pickle" in message
    assert len(message) < 400
    assert not Path("made").exists()


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    data = bytearray(encode_plain_pickle(example().values)[:4000] + encode_plain_pickle(example().values)[-2000:])
    draws = random.Random(0)
    path = tmp_path / "snapshot.pickle"
    for _ in range(60):
        flipped = bytearray(data)
        for _ in range(draws.randint(1, 4)):
            flipped[draws.randrange(2, len(flipped))] = draws.randrange(256)
        path.write_bytes(flipped)
        with contextlib.suppress(NapkinError):
            view_snapshot(path)


def test_the_page_draws_the_peak_and_sets_it_beside_a_plan(tmp_path: Path) -> None:
    view = view_snapshot(write_memory_snapshot(example(), tmp_path / "snapshot.json"))
    table = beside_plan(view, QuantityRow("peak bytes", "bytes", 100, view.peak_bytes))
    assert table[0].exact
    page = write_snapshot_page(view, tmp_path / "page.html", title="<b>", table=table).read_text()
    assert page.count("<svg") == 1
    assert all(place.name in page for place in view.at_peak if place.name.isalnum())
    assert "<b>" not in page
    assert "exact" in page
    with pytest.raises(NapkinError, match="exists"):
        write_snapshot_page(view, tmp_path / "page.html", title="again")
