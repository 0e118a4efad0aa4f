"""Addresses as pointers to numbers: `u8_at(address)[i]`. Nothing is checked; the caller keeps the numbers alive."""

from inspect import unwrap
from typing import Any

from llvmlite import ir
from numba import extending, types


def _pointer(kind: Any, bits: int) -> Any:
    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return extending.intrinsic(unwrap(convert))


u8_at = _pointer(types.uint8, 8)
i32_at = _pointer(types.int32, 32)
i64_at = _pointer(types.int64, 64)
u64_at = _pointer(types.uint64, 64)


def _load_u64(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        number.align = 1
        return number

    return types.uint64(types.int64), generate


load_u64 = extending.intrinsic(unwrap(_load_u64))
"""The eight bytes at an address of any alignment."""
