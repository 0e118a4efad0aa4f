"""Addresses as pointers to numbers, and how 64 bits are mixed. Nothing is checked: the caller keeps arrays alive."""

from inspect import unwrap
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from napkin.machine_code.compiled_function import jitted

_32, _29 = np.uint64(32), np.uint64(29)
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


def _pointer(kind: Any, bits: int) -> Any:
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return extending.intrinsic(unwrap(pointer))


u8_at = _pointer(types.uint8, 8)
u32_at = _pointer(types.uint32, 32)
i64_at = _pointer(types.int64, 64)
u64_at = _pointer(types.uint64, 64)
"""The pointer of an address; it is indexed like an array."""


def _load_u64(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        value.align = 1
        return value

    return types.uint64(types.int64), generate


load_u64 = extending.intrinsic(unwrap(_load_u64))
"""The eight bytes at an address, which need not be aligned."""


@jitted
def mixed(x: Any) -> Any:
    """A bijection of 64 bits after which each bit depends on all (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> _32)) * _FIRST
    x = (x ^ (x >> _29)) * _SECOND
    return x ^ (x >> _32)
