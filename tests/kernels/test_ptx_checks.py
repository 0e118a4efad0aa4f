"""What the PTX oracle must refuse, in kernels of a few lines: races, places of others, and what nothing wrote.

Each kernel is also run as it should be, and then does what it should do.
"""

import pytest
import torch
from torch import Tensor

from oracles.ptx.launches import launch
from oracles.ptx.program import PtxError
from oracles.ptx.small_kernels import kernel

THREADS = 64
START = [
    "mov.u32 %r0, %tid.x;",
    "mov.b32 %r1, global_smem;",
    "mad.lo.s32 %r2, %r0, 4, %r1;",
    "xor.b32 %r3, %r2, {distance};",
    "ld.param.b64 %rd0, [tested_0];",
    "ld.param.b64 %rd1, [tested_1];",
    "mad.wide.u32 %rd0, %r0, 4, %rd0;",
    "mad.wide.u32 %rd1, %r0, 4, %rd1;",
]
"""Thread %r0 has places of its own in shared memory, %r2, and in both tensors; %r3 is another thread's."""


def run(*lines: str, distance: int = 4 * 32, blocks: int = 1, source: Tensor | None = None) -> list[int]:
    """Run a kernel on the numbers 0, 1, …, and return what it has written."""
    source = torch.arange(THREADS, dtype=torch.int32) if source is None else source
    found = torch.full((THREADS,), -1, dtype=torch.int32)
    text = kernel([each.format(distance=distance) for each in START] + list(lines), pointers=2, threads=THREADS)
    launch(text, (blocks,), [("pointer", source), ("pointer", found)], 4 * THREADS)
    return found.tolist()


READ, WRITE = "ld.global.b32 %r4, [%rd0];", "st.global.b32 [%rd1], %r5;"
PUT, BARRIER, WARP_BARRIER, GET = (
    "st.shared.b32 [%r2], %r4;",
    "bar.sync 0;",
    "bar.warp.sync -1;",
    "ld.shared.b32 %r5, [%r3];",
)


def test_a_number_passes_to_another_thread_by_a_barrier_alone() -> None:
    assert run(READ, PUT, BARRIER, GET, WRITE) == [each ^ 32 for each in range(THREADS)]
    with pytest.raises(PtxError, match=r"race: thread \d+ reads .* another thread wrote"):
        run(READ, PUT, GET, WRITE)


def test_a_barrier_of_a_warp_separates_no_other_threads() -> None:
    assert run(READ, PUT, WARP_BARRIER, GET, WRITE, distance=8) == [each ^ 2 for each in range(THREADS)]
    with pytest.raises(PtxError, match="race"):
        run(READ, PUT, WARP_BARRIER, GET, WRITE)


@pytest.mark.parametrize("distance", [8, 4 * 32])
def test_a_place_that_another_thread_reads_is_not_written_before_a_barrier(distance: int) -> None:
    again = [READ, PUT, BARRIER, GET, BARRIER, "st.shared.b32 [%r2], 7;", BARRIER, GET, WRITE]
    assert run(*again, distance=distance) == [7] * THREADS
    with pytest.raises(PtxError, match=r"race: thread \d+ writes .* another thread read"):
        run(*again[:4], *again[5:], distance=distance)


def test_all_readers_of_a_place_are_separated_from_its_writer() -> None:
    put = "st.shared.b32 [%r1], %r4;"
    first = ["setp.eq.b32 %p0, %r0, 0;", READ, f"@%p0 {put}", BARRIER, "ld.shared.b32 %r5, [%r1];"]
    # Of all threads the writer itself reads the place last.
    last = ["@%p0 ld.shared.b32 %r6, [%r1];", f"@%p0 {put}", WRITE]
    assert run(*first, BARRIER, *last) == [0] * THREADS
    with pytest.raises(PtxError, match=r"race: thread 0 writes .* another thread read"):
        run(*first, *last)


def test_two_threads_write_one_place_if_they_write_the_same() -> None:
    read = [BARRIER, "ld.shared.b32 %r5, [%r1];", WRITE]
    assert run("st.shared.b32 [%r1], 5;", *read) == [5] * THREADS
    with pytest.raises(PtxError, match="two threads write different numbers"):
        run("st.shared.b32 [%r1], %r0;", *read)


def test_blocks_do_not_share_a_place_that_one_of_them_changes() -> None:
    block = "mov.u32 %r5, %ctaid.x;"
    with pytest.raises(PtxError, match="race"):
        run(block, WRITE, blocks=2)
    assert run("mov.b32 %r5, 3;", WRITE, blocks=2) == [3] * THREADS
    with pytest.raises(PtxError, match=r"race: thread \d+ writes .* another thread read"):
        run("ld.global.b32 %r5, [%rd1];", "setp.gt.s32 %p0, %r5, 9;", "mov.b32 %r5, 3;", WRITE, blocks=2)


def test_shared_memory_is_written_before_it_is_read_and_ends() -> None:
    with pytest.raises(PtxError, match=r"reads byte \d+ of shared memory, which nothing wrote"):
        run(GET, WRITE)
    with pytest.raises(PtxError, match=r"writes byte 256 of shared memory, which is beyond"):
        run("st.shared.b32 [%r2+4], %r0;")
    with pytest.raises(PtxError, match="not a multiple of 4"):
        run("st.shared.b32 [%r2+2], %r0;")


def test_a_kernel_keeps_to_its_tensors() -> None:
    copy = [READ, "mov.b32 %r5, %r4;", WRITE]
    rows = torch.arange(2 * THREADS, dtype=torch.int32)
    assert run(*copy, source=rows[32:96]) == list(range(32, 96))
    with pytest.raises(PtxError, match="thread 63 reads byte 256 of a storage of 256 bytes"):
        run("ld.global.b32 %r5, [%rd0+4];", WRITE)
    with pytest.raises(PtxError, match=r"reads byte 124 of a storage of 512 bytes, which belongs to no tensor"):
        run("ld.global.b32 %r5, [%rd0+-4];", WRITE, source=rows[32:96])
    with pytest.raises(PtxError, match=r"reads byte 4 .* which belongs to no tensor"):
        run(*copy, source=rows[::2])
    with pytest.raises(PtxError, match="where no tensor is"):
        run("mov.b64 %rd0, 64;", *copy)


COPY = "cp.async.ca.shared.global [%r2], [%rd0], 0x4, %r7;"
ALL, COMMIT, WAIT = "mov.b32 %r7, 4;", "cp.async.commit_group;", "cp.async.wait_group 0;"


def test_a_copy_arrives_when_its_thread_has_waited_and_for_others_behind_a_barrier() -> None:
    assert run(ALL, COPY, COMMIT, WAIT, BARRIER, GET, WRITE) == [each ^ 32 for each in range(THREADS)]
    assert run("mov.b32 %r7, 0;", COPY, COMMIT, WAIT, BARRIER, GET, WRITE) == [0] * THREADS
    for too_early in ([ALL, COPY, COMMIT, BARRIER], [ALL, COPY, WAIT, BARRIER]):
        with pytest.raises(PtxError, match="an asynchronous copy is on its way"):
            run(*too_early, GET, WRITE)
    with pytest.raises(PtxError, match="an asynchronous copy is on its way"):
        run(ALL, COPY, COMMIT, "cp.async.wait_group 1;", BARRIER, GET, WRITE)
    with pytest.raises(PtxError, match="race"):
        run(ALL, COPY, COMMIT, WAIT, GET, WRITE)
    assert run(ALL, COPY, COMMIT, COMMIT, "cp.async.wait_group 1;", BARRIER, GET, WRITE)[:2] == [32, 33]


def test_a_copy_does_not_begin_while_others_read() -> None:
    before = ["st.shared.b32 [%r2], %r0;", BARRIER, GET]
    after = [ALL, COPY, COMMIT, WAIT, BARRIER, GET, WRITE]
    assert run(*before, BARRIER, *after) == [each ^ 32 for each in range(THREADS)]
    with pytest.raises(PtxError, match=r"race: thread \d+ writes .* another thread read"):
        run(*before, *after)


LOOP = ["mov.b32 %r5, 0;", "mov.b32 %r6, 0;", "$L__again:", "add.s32 %r6, %r6, 1;", "add.s32 %r5, %r5, %r6;",
        "setp.lt.s32 %p0, %r6, %r0;", "@%p0 bra $L__again;"]  # fmt: skip


def test_threads_part_and_meet_again() -> None:
    expected = [max(1, each * (each + 1) // 2) for each in range(THREADS)]
    assert run(*LOOP, WRITE) == expected
    # They meet at the barrier, and at what only a whole warp can do.
    assert run(*LOOP, BARRIER, "shfl.sync.idx.b32 %r5, %r5, 0, 31, -1;", WRITE) == [1] * 32 + [32 * 33 // 2] * 32


def test_a_loop_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracles.ptx.machine.MOST_STEPS", 1000)
    assert run(*LOOP, WRITE)[:3] == [1, 1, 3]
    with pytest.raises(PtxError, match="tested has not ended after 1000 instructions"):
        run(*LOOP[:-1], "bra $L__again;")


def test_what_only_some_threads_do_is_done_by_them() -> None:
    some = ["mov.b32 %r5, 9;", "setp.lt.u32 %p0, %r0, 2;", "@!%p0 bra $L__end;", "mov.b32 %r5, %r0;", "$L__end:"]
    assert run(*some, WRITE) == [0, 1] + [9] * (THREADS - 2)
    with pytest.raises(PtxError, match="not all threads of a warp are there"):
        run(*some[:3], "shfl.sync.idx.b32 %r5, %r5, 0, 31, -1;", *some[4:], WRITE)
    with pytest.raises(PtxError, match="thread 0 waits at a barrier to which not all of its block come"):
        run(*some[:3], BARRIER, *some[4:], WRITE)
    with pytest.raises(PtxError, match="thread 0 waits at a barrier"):
        run("mov.b32 %r5, 9;", "setp.lt.u32 %p0, %r0, 32;", "@!%p0 bra $L__end;", BARRIER, "$L__end:", WRITE)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(PtxError, match=r"tested, line \d+, tanh.approx.f32 %r5, %r0: the instruction is not known"):
        run("tanh.approx.f32 %r5, %r0;")
    with pytest.raises(PtxError, match="not known"):
        run("add.sat.s32 %r5, %r0, 1;")
    with pytest.raises(PtxError, match="%r9 is read before it is written"):
        run("add.s32 %r5, %r9, 1;", "mov.b32 %r9, 1;")
    # A register that nothing writes holds any number.
    assert run("setp.eq.b32 %p0, %r0, 99;", "selp.b32 %r5, %r9, 4, %p0;", WRITE) == [4] * THREADS
