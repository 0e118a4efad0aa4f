"""Addresses as pointers. Nothing is checked: the caller keeps the numbers there alive."""

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


f32_at = _pointer(types.float32, ir.FloatType())
i64_at = _pointer(types.int64, ir.IntType(64))
u32_at = _pointer(types.uint32, ir.IntType(32))
i32_at = _pointer(types.int32, ir.IntType(32))
i8_at = _pointer(types.int8, ir.IntType(8))
u8_at = _pointer(types.uint8, ir.IntType(8))
