"""Operations that numba does not have: pointers, loads and stores, 64-byte vectors, prefetching, calls by address.

Nothing here is checked. An address is a plain integer; the caller guarantees that the bytes named in the docstring
belong to a buffer that stays alive during the call. In a compiled function `u8_at(address)[i]` reads and writes number
i of an array, which must be aligned as its numbers are; loads and stores need no alignment. Vectors are LLVM's: a
processor without 64-byte registers runs the same code in several steps.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

from llvmlite import ir
from numba import extending, types

_I1, _I8, _I32, _I64, _I128 = (ir.IntType(bits) for bits in (1, 8, 32, 64, 128))
_BLOCK = ir.VectorType(_I8, 64)
_ENTRIES = ir.VectorType(_I64, 8)
_SCANNER = ir.FunctionType(_I64, [_I64] * 7)

_Generated = tuple[Any, Callable[..., Any]]


def intrinsic(function: Callable[..., _Generated]) -> Callable[..., Any]:
    """numba's decorator `intrinsic`, for functions that a runtime type checker may have wrapped."""
    return extending.intrinsic(unwrap(function))


def _pointer(kind: Any, llvm_kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], llvm_kind.as_pointer())

    def pointer(typing_context: Any, address: Any) -> Any:
        return types.CPointer(kind)(types.int64), generate

    return intrinsic(pointer)


i8_at = _pointer(types.int8, _I8)
u8_at = _pointer(types.uint8, _I8)
u16_at = _pointer(types.uint16, ir.IntType(16))
i32_at = _pointer(types.int32, _I32)
u32_at = _pointer(types.uint32, _I32)
i64_at = _pointer(types.int64, _I64)
u64_at = _pointer(types.uint64, _I64)
f32_at = _pointer(types.float32, ir.FloatType())


@intrinsic
def load_u8(typing_context: Any, address: Any) -> _Generated:
    """The byte at `address`, as int64. Reads 1 byte."""
    return types.int64(types.int64), _loader(_I8, zero_extend=True)


@intrinsic
def load_u32(typing_context: Any, address: Any) -> _Generated:
    """The uint32 at `address`, as int64. Reads 4 bytes."""
    return types.int64(types.int64), _loader(_I32, zero_extend=True)


@intrinsic
def load_i64(typing_context: Any, address: Any) -> _Generated:
    """The int64 at `address`. Reads 8 bytes."""
    return types.int64(types.int64), _loader(_I64)


@intrinsic
def load_u64(typing_context: Any, address: Any) -> _Generated:
    """The uint64 at `address`. Reads 8 bytes."""
    return types.uint64(types.int64), _loader(_I64)


@intrinsic
def store_u8(typing_context: Any, address: Any, value: Any) -> _Generated:
    """Store the low byte of an int64 at `address`. Writes 1 byte."""
    return types.void(types.int64, types.int64), _storer(_I8, truncate=True)


@intrinsic
def store_u32(typing_context: Any, address: Any, value: Any) -> _Generated:
    """Store the low half of an int64 at `address`. Writes 4 bytes."""
    return types.void(types.int64, types.int64), _storer(_I32, truncate=True)


@intrinsic
def store_i64(typing_context: Any, address: Any, value: Any) -> _Generated:
    """Store an int64 at `address`. Writes 8 bytes."""
    return types.void(types.int64, types.int64), _storer(_I64)


@intrinsic
def store_u64(typing_context: Any, address: Any, value: Any) -> _Generated:
    """Store a uint64 at `address`. Writes 8 bytes."""
    return types.void(types.int64, types.uint64), _storer(_I64)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> _Generated:
    """Prefetch the cache line at `address`. Reads nothing: any integer is allowed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = _declared(builder, "llvm.prefetch.p0", kind)
        # For reading, keep in all cache levels, data cache.
        flags = [ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], _I8.as_pointer()), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def trailing_zeros(typing_context: Any, bits: Any) -> _Generated:
    """The index of the lowest set bit of a uint64; 64 if none is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(_I1, 0))

    return types.int64(types.uint64), generate


@intrinsic
def leading_zeros(typing_context: Any, bits: Any) -> _Generated:
    """The number of zeros above the highest set bit of a uint64; 64 if none is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(_I1, 0))

    return types.int64(types.uint64), generate


@intrinsic
def folded_product(typing_context: Any, first: Any, second: Any) -> _Generated:
    """The upper half of the 128-bit product of two uint64, xor its lower half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        product = builder.mul(*[builder.zext(argument, _I128) for argument in arguments])
        upper = builder.trunc(builder.lshr(product, ir.Constant(_I128, 64)), _I64)
        return builder.xor(upper, builder.trunc(product, _I64))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def set_bits(typing_context: Any, bits: Any) -> _Generated:
    """The number of set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def block_masks(typing_context: Any, address: Any) -> _Generated:
    """Six masks of the 64 bytes at `address`, bit i for byte i. Reads 64 bytes.

    In order: ASCII letters, ASCII digits, the space, ASCII white space (including the space), the apostrophe, and
    bytes of non-ASCII characters.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block = _load(builder, arguments[0], _BLOCK)

        def each(byte: int) -> Any:
            return ir.Constant(_BLOCK, [byte] * 64)

        def between(vector: Any, first: int, last: int) -> Any:
            return builder.icmp_unsigned("<=", builder.sub(vector, each(first)), each(last - first))

        space = builder.icmp_unsigned("==", block, each(ord(" ")))
        masks = [
            between(builder.or_(block, each(0x20)), ord("a"), ord("z")),
            between(block, ord("0"), ord("9")),
            space,
            builder.or_(space, between(block, ord("\t"), ord("\r"))),
            builder.icmp_unsigned("==", block, each(ord("'"))),
            builder.icmp_unsigned(">=", block, each(0x80)),
        ]
        return context.make_tuple(builder, signature.return_type, [builder.bitcast(mask, _I64) for mask in masks])

    return types.UniTuple(types.uint64, 6)(types.int64), generate


@intrinsic
def find_in_bucket(typing_context: Any, address: Any, key: Any) -> _Generated:
    """Find the one of the 8 uint64 at `address` whose high 40 bits are `key`, and return its low 24 bits.

    2^32 - 1 if there is none; there must be at most one. Reads 64 bytes. Branch-free, as the position is unpredictable.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries = _load(builder, arguments[0], _ENTRIES)
        key = builder.insert_element(ir.Constant(_ENTRIES, ir.Undefined), arguments[1], ir.Constant(_I32, 0))
        keys = builder.shuffle_vector(key, key, ir.Constant(ir.VectorType(_I32, 8), [0] * 8))
        same = builder.icmp_unsigned("==", builder.lshr(entries, _each_entry(24)), keys)
        mask = builder.zext(builder.bitcast(same, _I8), _I64)
        # If there is none, some entry is loaded in vain; a minimum over the vector would take twice as long.
        place = builder.and_(builder.cttz(mask, ir.Constant(_I1, 0)), ir.Constant(_I64, 7))
        address = builder.add(arguments[0], builder.shl(place, ir.Constant(_I64, 3)))
        value = builder.and_(_load(builder, address, _I64), ir.Constant(_I64, 2**24 - 1))
        none = builder.icmp_unsigned("==", mask, ir.Constant(_I64, 0))
        return builder.select(none, ir.Constant(_I64, 2**32 - 1), value)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call_scanner(
    typing_context: Any, scanner: Any, text: Any, start: Any, stop: Any, limit: Any, classes: Any, ends: Any, room: Any
) -> _Generated:
    """Call the scanner whose machine code is at address `scanner`; its contract is in tokenizer/numba/scanners.py."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], _SCANNER.as_pointer()), list(arguments[1:]))

    return types.int64(*[types.int64] * 8), generate


def _each_entry(value: int) -> Any:
    return ir.Constant(_ENTRIES, [value] * 8)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _loader(kind: Any, zero_extend: bool = False) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = _load(builder, arguments[0], kind)
        return builder.zext(value, _I64) if zero_extend else value

    return generate


def _storer(kind: Any, truncate: bool = False) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.trunc(arguments[1], kind) if truncate else arguments[1]
        store = builder.store(value, builder.inttoptr(arguments[0], kind.as_pointer()))
        store.align = 1
        return context.get_dummy_value()

    return generate


def _declared(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
