"""What each instruction does to all threads of a mask: arithmetic, memory, and exchange within a warp."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from oracles.ptx.machine import Machine, Mask
from oracles.ptx.memory import Threads
from oracles.ptx.numbers import (
    Numbers,
    bit_field,
    bits_of,
    decode,
    divided,
    encode,
    flushed,
    fused_multiply_add,
    permuted_bytes,
    rounded_to_f16_towards_zero,
    rounded_to_fp8,
    shifted,
)
from oracles.ptx.program import Address, Instruction, Name, PtxError, Register, Vector
from oracles.ptx.tensor_cores import load_matrices, multiply_accumulate
from oracles.ptx.warpgroups import multiply_in_group, store_matrices


def execute(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """Run one instruction that does not change the way of threads."""
    handler = _HANDLERS.get(instruction.opcode)
    if handler is None:
        raise PtxError("the instruction is not known here")
    handler(machine, instruction, mask)


def _load(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    space, kind, items = _access(instruction)
    target, source = instruction.operands
    assert isinstance(source, Address)
    if space == "param":
        assert isinstance(source.base, Name)
        machine.write(target, np.asarray(machine.arguments[source.base.name], np.uint64), mask)
        return
    registers = target.items if isinstance(target, Vector) else (target,)
    size = bits_of(kind) // 8
    memory = machine.memory if space == "global" else machine.shared
    found = memory.load(_addresses(machine, source, mask), machine.active(mask), size * items)
    for place, register in enumerate(registers):
        assert isinstance(register, Register)
        raw = _joined(found[:, place * size : (place + 1) * size])
        machine.scatter(register, encode(decode(raw, kind), kind, machine.program.width(register)), mask)


def _store(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    space, kind, items = _access(instruction)
    target, source = instruction.operands
    assert isinstance(target, Address)
    values = source.items if isinstance(source, Vector) else (source,)
    assert len(values) == items
    raws = [machine.gather(each, f"b{bits_of(kind)}", mask) for each in values]
    data = np.stack(raws, axis=1).view(np.uint8)
    memory = machine.memory if space == "global" else machine.shared
    memory.store(_addresses(machine, target, mask), machine.active(mask), data)


def _access(instruction: Instruction) -> tuple[str, str, int]:
    """The space, the type and the number of items of a load or a store."""
    space = instruction.modifiers[0].partition("::")[0]
    items = next((int(each[1:]) for each in instruction.modifiers if each in ("v2", "v4")), 1)
    hints = set(instruction.modifiers[1:]) - {"v2", "v4", instruction.types[-1]}
    if space not in ("param", "global", "shared") or hints:
        raise PtxError("the instruction is not known here")
    return space, instruction.types[-1], items


def _addresses(machine: Machine, address: Address, mask: Mask | None) -> Threads:
    return machine.gather(address.base, "u64", mask).astype(np.int64) + address.offset


def _joined(data: Numbers) -> Numbers:
    """The numbers whose bytes these are, [threads, bytes]."""
    return np.ascontiguousarray(data).view(f"u{data.shape[1]}")[:, 0]


def _copy(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """cp.async: bytes beyond those that are read become zero."""
    match instruction.modifiers:
        case ("async", "commit_group"):
            machine.shared.commit(machine.active(mask))
        case ("async", "wait_group"):
            machine.shared.wait(machine.active(mask), int(machine.raw(instruction.operands[0])))
        case ("async", "ca" | "cg", "shared", "global"):
            target, source, size, *read = instruction.operands
            assert isinstance(target, Address)
            assert isinstance(source, Address)
            threads, n_bytes = machine.active(mask), int(machine.raw(size))
            reads = machine.gather(read[0], "u32", mask) if read else np.full(len(threads), n_bytes)
            if not np.isin(reads, (0, n_bytes)).all():
                raise PtxError("a copy of a part is not known here")
            data = np.zeros((len(threads), n_bytes), np.uint8)
            whole = reads > 0
            if whole.any():
                data[whole] = machine.memory.load(_addresses(machine, source, mask)[whole], threads[whole], n_bytes)
            machine.shared.begin_copy(_addresses(machine, target, mask), threads, data)
        case _:
            raise PtxError("the instruction is not known here")


def _move(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """mov, which also divides a register into a vector, and puts one together."""
    target, source = instruction.operands
    kind = instruction.types[-1]
    if isinstance(target, Vector):
        raw, width = machine.read(source, kind), bits_of(kind) // len(target.items)
        for place, register in enumerate(target.items):
            machine.write(register, (raw >> raw.dtype.type(place * width)) & raw.dtype.type(2**width - 1), mask)
    elif isinstance(source, Vector):
        width = bits_of(kind) // len(source.items)
        parts = [machine.read(item, f"u{width}").astype(np.uint64) for item in source.items]
        joined = [part << np.uint64(place * width) for place, part in enumerate(parts)]
        machine.write(target, functools.reduce(np.bitwise_or, joined), mask)
    else:
        machine.write(target, machine.read(source, kind), mask)


def _convert(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    to, of = instruction.types
    target, *sources = instruction.operands
    roundings = set(instruction.modifiers) - {to, of}
    known = {"rna"} if to == "tf32" else {"rzi"} if to[0] in "su" and of[0] == "f" else {"rn"}
    known |= {"satfinite"} if to in ("e4m3x2", "e5m2x2") else {"rz"} if (to, of) == ("f16", "f32") else set()
    if roundings - known:
        raise PtxError("the instruction is not known here")
    assert isinstance(target, Register)
    width = machine.program.width(target)
    if to in ("bf16x2", "f16x2"):
        upper, lower = (encode(machine.read(each, of), to[:-2], 32) for each in sources)
        machine.write(target, (upper << np.uint32(16)) | lower, mask)
        return
    if to in ("e4m3x2", "e5m2x2"):
        upper, lower = (rounded_to_fp8(machine.read(each, of), to[:-2]) for each in sources)
        machine.write(target, (upper << np.uint16(8)) | lower, mask)
        return
    numbers = machine.read(sources[0], of)
    if "rz" in roundings:
        numbers = rounded_to_f16_towards_zero(numbers)
    if to == "tf32":
        # To nearest, ties away from zero.
        machine.write(target, (numbers.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000), mask)
        return
    if to[0] in "su" and of[0] == "f":
        limits = np.iinfo(f"{'i' if to[0] == 's' else 'u'}{bits_of(to) // 8}")
        whole = np.trunc(np.nan_to_num(numbers.astype(np.float64)))
        numbers = np.clip(whole, limits.min, limits.max)
    machine.write(target, encode(numbers, to, width), mask)


def _arithmetic(compute: Callable[..., Numbers]) -> Callable[[Machine, Instruction, Mask | None], None]:
    """An operation whose operands and result have one type."""

    def handler(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
        kind = instruction.types[-1]
        _check_modifiers(instruction, {kind, "lo", "rn", "full", "approx", "ftz", "relu"})
        target, *sources = instruction.operands
        if kind in ("f16x2", "bf16x2"):
            halves = [machine.read(each, "b32") for each in sources]
            parts = [_of_halves(compute, halves, shift, kind[:-2]) for shift in (0, 16)]
            machine.write(target, parts[0] | (parts[1] << np.uint32(16)), mask)
            return
        numbers = [machine.read(each, kind) for each in sources]
        if kind in ("f16", "bf16"):
            # Exact in fp64, or far from the middle between two results.
            numbers = [each.astype(np.float64) for each in numbers]
        if "ftz" in instruction.modifiers:
            numbers = [flushed(each) for each in numbers]
        result = compute(*numbers)
        if "ftz" in instruction.modifiers:
            result = flushed(result.astype(np.float32))
        if "relu" in instruction.modifiers:
            result = np.maximum(result, 0)
        assert isinstance(target, Register)
        machine.write(target, encode(result, kind, machine.program.width(target)), mask)

    return handler


def _of_halves(compute: Callable[..., Numbers], pairs: list[Numbers], shift: int, kind: str) -> Numbers:
    """An operation on the lower or upper halves of pairs, in fp64 and rounded once."""
    numbers = [decode(each >> np.uint32(shift), kind).astype(np.float64) for each in pairs]
    return encode(compute(*numbers), kind, 32)


def _check_modifiers(instruction: Instruction, known: set[str]) -> None:
    if set(instruction.modifiers) - known:
        raise PtxError("the instruction is not known here")


def _add_product(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    return fused_multiply_add(a, b, c) if a.dtype == np.float32 else a * b + c


def _multiply(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """mul and mad, also to twice the width."""
    if "wide" not in instruction.modifiers:
        (_PRODUCT if instruction.opcode == "mul" else _SUM_OF_PRODUCT)(machine, instruction, mask)
        return
    kind = instruction.types[-1]
    _check_modifiers(instruction, {kind, "wide"})
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    target, a, b, *c = instruction.operands
    result = decode(encode(machine.read(a, kind), kind, 64), wide) * decode(
        encode(machine.read(b, kind), kind, 64), wide
    )
    if c:
        result = result + machine.read(c[0], wide)
    machine.write(target, encode(result, wide, bits_of(wide)), mask)


def _shift(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    kind = instruction.types[-1]
    target, number, by = instruction.operands
    result = shifted(
        machine.read(number, kind), machine.read(by, "u32"), bits_of(kind), left=instruction.opcode == "shl"
    )
    machine.write(target, encode(result, kind, bits_of(kind)), mask)


def _extract(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    kind = instruction.types[-1]
    target, number, start, length = instruction.operands
    fields = machine.read(start, "u32"), machine.read(length, "u32")
    result = bit_field(machine.read(number, kind), *fields, bits_of(kind), signed=kind[0] == "s")
    machine.write(target, encode(result, kind, bits_of(kind)), mask)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~_unordered(a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | _unordered(a, b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~_unordered(a, b),
    "nan": lambda a, b: _unordered(a, b),
}


def _unordered(a: Numbers, b: Numbers) -> Numbers:
    return (a != a) | (b != b)


def _compare(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    kind = instruction.types[-1]
    _check_modifiers(instruction, {kind, instruction.modifiers[0]})
    target, a, b = instruction.operands
    machine.write(target, _COMPARISONS[instruction.modifiers[0]](machine.read(a, kind), machine.read(b, kind)), mask)


def _select(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    kind = f"b{bits_of(instruction.types[-1])}"
    target, a, b, condition = instruction.operands
    machine.write(target, np.where(machine.raw(condition), machine.read(a, kind), machine.read(b, kind)), mask)


def _permute(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    target, *sources = instruction.operands
    if instruction.modifiers != ("b32",):
        raise PtxError("the instruction is not known here")
    machine.write(target, permuted_bytes(*np.broadcast_arrays(*(machine.read(each, "b32") for each in sources))), mask)


def _exchange(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """shfl.sync of all lanes of a warp."""
    target, source, lane, clamp, members = instruction.operands
    if int(machine.raw(clamp)) & 31 != 31 or int(machine.raw(members)) & 2**32 - 1 != 2**32 - 1:
        raise PtxError("an exchange within a part of a warp is not known here")
    warps = machine.warps(mask)
    numbers = machine.gather(source, "b32", mask).reshape(-1, 32)
    given = np.broadcast_to(machine.gather(lane, "b32", mask).reshape(-1, 32), warps.shape).astype(np.int64)
    match instruction.modifiers[1]:
        case "bfly":
            lanes = (warps % 32) ^ given
        case "idx":
            lanes = given % 32
        case _:
            raise PtxError("the instruction is not known here")
    machine.scatter(target, np.take_along_axis(numbers, lanes, axis=1).ravel(), mask)


def _meet(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    """bar.warp.sync; barriers of a block change the way of threads."""
    if instruction.modifiers != ("warp", "sync") or int(machine.raw(instruction.operands[0])) & 2**32 - 1 != 2**32 - 1:
        raise PtxError("the instruction is not known here")
    machine.clock.pass_warp_barrier(machine.warps(mask).ravel())


def _fence(machine: Machine, instruction: Instruction, mask: Mask | None) -> None:
    if instruction.modifiers != ("proxy", "async", "shared::cta"):
        raise PtxError("the instruction is not known here")
    machine.shared.fence(machine.active(mask))


_PRODUCT = _arithmetic(np.multiply)
_SUM_OF_PRODUCT = _arithmetic(_add_product)


def _in_fp64(function: Callable[[Numbers], Numbers]) -> Callable[[Numbers], Numbers]:
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


_HANDLERS: dict[str, Callable[[Machine, Instruction, Mask | None], None]] = {
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "mov": _move,
    "cvt": _convert,
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _multiply,
    "mad": _multiply,
    "fma": _SUM_OF_PRODUCT,
    "div": _arithmetic(lambda a, b: a / b if a.dtype == np.float32 else divided(a, b)[0]),
    "rem": _arithmetic(lambda a, b: divided(a, b)[1]),
    "neg": _arithmetic(np.negative),
    "abs": _arithmetic(np.abs),
    "min": _arithmetic(np.fmin),
    "max": _arithmetic(np.fmax),
    "and": _arithmetic(np.bitwise_and),
    "or": _arithmetic(np.bitwise_or),
    "xor": _arithmetic(np.bitwise_xor),
    "not": _arithmetic(np.invert),
    "ex2": _arithmetic(_in_fp64(np.exp2)),
    "lg2": _arithmetic(_in_fp64(np.log2)),
    "sqrt": _arithmetic(_in_fp64(np.sqrt)),
    "rsqrt": _arithmetic(_in_fp64(lambda x: 1 / np.sqrt(x))),
    "rcp": _arithmetic(_in_fp64(lambda x: 1 / x)),
    "shl": _shift,
    "shr": _shift,
    "bfe": _extract,
    "setp": _compare,
    "selp": _select,
    "prmt": _permute,
    "bar": _meet,
    "shfl": _exchange,
    "ldmatrix": load_matrices,
    "mma": multiply_accumulate,
    "wgmma": multiply_in_group,
    "stmatrix": store_matrices,
    "fence": _fence,
}
