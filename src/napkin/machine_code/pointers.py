"""Addresses as pointers to numbers: `u8_at(address)[i]` in a compiled function.

Nothing is checked: an address is a plain integer, and the caller keeps the numbers there alive.
"""

from inspect import unwrap
from typing import Any

from llvmlite import ir
from numba import extending, types


def _pointer(kind: Any, llvm_kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], llvm_kind.as_pointer())

    def pointer(typing_context: Any, address: Any) -> Any:
        return types.CPointer(kind)(types.int64), generate

    return extending.intrinsic(unwrap(pointer))


i8_at = _pointer(types.int8, ir.IntType(8))
u8_at = _pointer(types.uint8, ir.IntType(8))
u16_at = _pointer(types.uint16, ir.IntType(16))
i32_at = _pointer(types.int32, ir.IntType(32))
u32_at = _pointer(types.uint32, ir.IntType(32))
i64_at = _pointer(types.int64, ir.IntType(64))
u64_at = _pointer(types.uint64, ir.IntType(64))
f32_at = _pointer(types.float32, ir.FloatType())


def _load_u64(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        number.align = 1
        return number

    return types.uint64(types.int64), generate


load_u64 = extending.intrinsic(unwrap(_load_u64))
"""The eight bytes at an address of any alignment."""
