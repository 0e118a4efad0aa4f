"""wgmma: products of four warps whose factors lie in shared memory, by the layouts of the PTX ISA.

A product is computed when it begins. Until its group has been waited for, nobody may write what it reads, and its
result may be added to by other products alone.
"""

import numpy as np

from oracles.ptx.machine import Machine, Mask
from oracles.ptx.memory import Threads
from oracles.ptx.numbers import Numbers, decode
from oracles.ptx.program import Address, Immediate, Instruction, Operand, PtxError, Register, Vector

_THREADS = 128
_ROWS, _DEPTH = 64, 16
_CHUNK = 16
"""Bytes that lie side by side in every layout: eight numbers of 16 bits."""


def multiply_in_group(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """Run wgmma.mma_async, its fence, and the instructions that divide products into groups and wait for these."""
    groups = _groups(machine, mask)
    match instruction.modifiers:
        case ("fence", "sync", "aligned"):
            pass
        case ("commit_group", "sync", "aligned"):
            machine.products.commit()
        case ("wait_group", "sync", "aligned"):
            machine.products.wait(int(machine.raw(instruction.operands[0])))
            machine.shared.release(machine.products.done)
        case ("mma_async", "sync", "aligned", shape, "f32", "bf16" | "f16" as kind, _):
            _multiply(machine, instruction, mask, groups, int(shape.removeprefix("m64n").partition("k")[0]), kind)
        case _:
            raise PtxError("the instruction is not known here")


def _groups(machine: Machine, mask: Mask | None) -> Threads:
    """The active threads, [groups, 128]: whole groups of four warps."""
    active = machine.active(mask)
    if (
        len(active) % _THREADS
        or (active.reshape(-1, _THREADS) // _THREADS != active[::_THREADS, None] // _THREADS).any()
    ):
        raise PtxError("not all threads of a group of four warps are there")
    return active.reshape(-1, _THREADS)


def _multiply(
    machine: Machine, instruction: Instruction, mask: Mask | None, groups: Threads, columns: int, kind: str
) -> None:
    target, left, right, added, *settings = instruction.operands
    scales, transposed = settings[:2], [int(machine.raw(each)) for each in settings[2:]]
    if any(each != Immediate(1) for each in scales) or not isinstance(target, Vector):
        raise PtxError("the instruction is not known here")
    if isinstance(left, Vector):
        factor = _from_registers(machine, left, kind, mask)
    else:
        factor = _from_memory(machine, left, groups, mask, _ROWS, kind, transposed=bool(transposed[0]))
    other = _from_memory(machine, right, groups, mask, columns, kind, transposed=bool(transposed[-1]))
    total = factor @ other.swapaxes(1, 2)
    lane, place = np.arange(_THREADS)[:, None], np.arange(columns // 2)
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (place // 2 % 2)
    column = place // 4 * 8 + lane % 4 * 2 + place % 2
    adds = (
        machine.gather(added, "pred", mask)
        if isinstance(added, Register)
        else np.full(groups.size, machine.raw(added) != 0)
    )
    result = total[:, row, column].reshape(-1, columns // 2)
    names = [each.name for each in target.items if isinstance(each, Register)]
    with machine.products.adding_to(names):
        for number, register in enumerate(target.items):
            if adds.any():
                before = machine.gather(register, "f32", mask).astype(np.float64)
                result[:, number] += np.where(adds, before, 0.0)
            machine.scatter(register, result[:, number].astype(np.float32).view(np.uint32), mask)


def _from_registers(machine: Machine, left: Vector, kind: str, mask: Mask | None) -> Numbers:
    """The left factor of 64 × 16, of which each warp holds 16 rows as for mma.m16n8k16."""
    raw = np.stack([machine.gather(each, "b32", mask) for each in left.items], axis=1)
    numbers = decode(np.ascontiguousarray(raw).view(np.uint16), kind).astype(np.float64).reshape(-1, _THREADS, 8)
    lane, place = np.arange(_THREADS)[:, None], np.arange(8)
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (place // 2 % 2)
    column = lane % 4 * 2 + place % 2 + 8 * (place // 4)
    factor = np.empty((len(numbers), _ROWS, _DEPTH))
    factor[:, row, column] = numbers
    return factor


def _from_memory(
    machine: Machine, descriptor: Operand, groups: Threads, mask: Mask | None, rows: int, kind: str, *, transposed: bool
) -> Numbers:
    """A factor of rows × 16 at the place that a descriptor says: [groups, rows, 16].

    Chunks of 16 bytes lie along the depth, or of a transposed factor along the rows. Eight lines of one, two, four or
    eight chunks are a block, in which bits of a line's number are mixed into that of the chunk; the descriptor has the
    bytes from one block to the next along the lines ("stride") and, where they are needed, along the chunks.
    """
    words = machine.gather(descriptor, "u64", mask).reshape(-1, _THREADS)
    if (words != words[:, :1]).any():
        raise PtxError("the threads of a group have different descriptors")
    word = words[:, 0].astype(np.int64)
    start, leading, stride = (((word >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    modes = np.unique((word >> 62) & 3)
    if len(modes) != 1 or ((word >> 49) & 7).any() or not modes[0]:
        raise PtxError("a descriptor of this kind is not known here")
    across = {1: 8, 2: 4, 3: 2}[int(modes[0])]
    lines, chunks = (_DEPTH, rows // 8) if transposed else (rows, _DEPTH // 8)
    line, chunk = np.arange(lines)[:, None], np.arange(chunks)
    offset = (line % 8 * across + chunk % across) * _CHUNK
    at = start[:, None, None] + offset + line // 8 * stride[:, None, None]
    at = at + chunk // across * leading[:, None, None]
    # Bits 7 … 9 of an address are mixed into bits 4 … 6, as many as a line has of them.
    at ^= (at >> 3) & ((across - 1) << 4)
    threads = np.repeat(groups[:, 0], lines * chunks)
    data = machine.shared.load_for_product(at.ravel(), threads, _CHUNK, machine.products.group)
    numbers = decode(data.view(np.uint16), kind).astype(np.float64).reshape(len(groups), lines, chunks * 8)
    return numbers.swapaxes(1, 2) if transposed else numbers


def store_matrices(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """stmatrix: the counterpart of ldmatrix."""
    if instruction.modifiers[:3] != ("sync", "aligned", "m8n8") or instruction.types != ("b16",):
        raise PtxError("the instruction is not known here")
    target, source = instruction.operands
    assert isinstance(target, Address)
    assert isinstance(source, Vector)
    count = len(source.items)
    warps = machine.warps(mask)
    pairs = np.stack([machine.gather(each, "b32", mask).reshape(-1, 32) for each in source.items], axis=1)
    matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, count, 8, 8)
    if "trans" in instruction.modifiers:
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
    addresses = machine.gather(target.base, "u64", mask).astype(np.int64).reshape(-1, 32) + target.offset
    rows = matrices.reshape(-1, 8).view(np.uint8)
    machine.shared.store(addresses[:, : 8 * count].ravel(), warps[:, : 8 * count].ravel(), rows)
