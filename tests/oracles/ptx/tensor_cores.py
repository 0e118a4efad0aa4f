"""Instructions of a whole warp: ldmatrix and mma.sync, by the layouts of the PTX ISA ("Matrix Fragments for mma")."""

import numpy as np

from oracles.ptx.machine import Machine, Mask
from oracles.ptx.numbers import Numbers, decode
from oracles.ptx.program import Address, Instruction, Operand, PtxError, Vector

_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE // 4, _LANE % 4


def load_matrices(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """ldmatrix: eight lanes name the rows of a matrix of 8 × 8 numbers of 16 bits; each lane gets two neighbours."""
    if instruction.modifiers[:3] != ("sync", "aligned", "m8n8") or instruction.types != ("b16",):
        raise PtxError("the instruction is not known here")
    target, source = instruction.operands
    assert isinstance(target, Vector)
    assert isinstance(source, Address)
    count = len(target.items)
    warps = machine.warps(mask)
    addresses = machine.gather(source.base, "u64", mask).astype(np.int64).reshape(-1, 32) + source.offset
    rows = machine.shared.load(addresses[:, : 8 * count].ravel(), warps[:, : 8 * count].ravel(), 16)
    matrices = rows.view(np.uint16).reshape(-1, count, 8, 8)
    if "trans" in instruction.modifiers:
        matrices = matrices.swapaxes(2, 3)
    pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, 32)
    for place, register in enumerate(target.items):
        machine.scatter(register, pairs[:, place].ravel(), mask)


def multiply_accumulate(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """mma.sync: D = A · B + C for each warp, in fp32 of exact products and sums that are rounded once.

    How a GPU rounds within the sum is not documented; it is within the error of sums in fp32.
    """
    shape = instruction.modifiers[2]
    of_sum, kind, kind_of_b, of_added = instruction.types
    if (of_sum, of_added) != ("f32", "f32") or kind != kind_of_b or (kind, shape) not in _DEPTHS:
        raise PtxError("the instruction is not known here")
    target, *factors, added = instruction.operands
    machine.warps(mask)
    depth = _DEPTHS[kind, shape]
    fragments = [_fragment(machine, each, kind, mask) for each in factors]
    left = _matrix(fragments[0], (16, depth), *_places_of_left(depth, kind))
    right = _matrix(fragments[1], (depth, 8), *_places_of_right(depth, kind))
    row = np.stack([_GROUP, _GROUP, _GROUP + 8, _GROUP + 8], axis=1)
    column = np.stack([2 * _MEMBER, 2 * _MEMBER + 1] * 2, axis=1)
    total = (left @ right + _matrix(_fragment(machine, added, "f32", mask), (16, 8), row, column)).astype(np.float32)
    assert isinstance(target, Vector)
    for place, register in enumerate(target.items):
        machine.scatter(register, total[:, row[:, place], column[:, place]].ravel().view(np.uint32), mask)


_DEPTHS = {("bf16", "m16n8k16"): 16, ("f16", "m16n8k16"): 16, ("bf16", "m16n8k8"): 8, ("f16", "m16n8k8"): 8,
           ("tf32", "m16n8k8"): 8, ("tf32", "m16n8k4"): 4}  # fmt: skip
"""Products of each sum by types and shape."""


def _fragment(machine: Machine, operand: Operand, kind: str, mask: Mask | None) -> Numbers:
    """The numbers that each lane holds of a matrix: [warps, lanes, numbers]."""
    assert isinstance(operand, Vector)
    raw = np.stack([machine.gather(each, "b32", mask) for each in operand.items], axis=1)
    if kind == "tf32":
        # The last 13 bits are not looked at.
        raw, kind = raw & np.uint32(0xFFFFE000), "f32"
    numbers = decode(raw.view(np.uint32 if kind == "f32" else np.uint16), kind)
    return numbers.astype(np.float64).reshape(-1, 32, numbers.shape[1])


def _places_of_left(depth: int, kind: str) -> tuple[Numbers, Numbers]:
    """The row and column of each number that a lane holds of the left matrix, [lanes, numbers]."""
    inner = _inner(depth, kind)
    rows = [_GROUP + 8 * half for _ in inner for half in range(2) for _ in range(2 if kind != "tf32" else 1)]
    columns = [column for pair in inner for _ in range(2) for column in pair]
    return np.stack(rows, axis=1), np.stack(columns, axis=1)


def _places_of_right(depth: int, kind: str) -> tuple[Numbers, Numbers]:
    rows = [row for pair in _inner(depth, kind) for row in pair]
    return np.stack(rows, axis=1), np.stack([_GROUP] * len(rows), axis=1)


def _inner(depth: int, kind: str) -> list[list[Numbers]]:
    """Which of the products each lane's registers are of, register by register: 16 bits are two neighbours."""
    if kind == "tf32":
        return [[_MEMBER + start] for start in range(0, depth, 4)]
    return [[2 * _MEMBER + start, 2 * _MEMBER + 1 + start] for start in range(0, depth, 8)]


def _matrix(fragment: Numbers, shape: tuple[int, int], rows: Numbers, columns: Numbers) -> Numbers:
    result = np.empty((len(fragment), *shape))
    result[:, rows, columns] = fragment
    return result
