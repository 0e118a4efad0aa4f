"""Operations that numba does not have: pointers, loads and stores, 64-byte vectors, prefetching, calls by address.

Nothing here is checked. An address is a plain integer; the caller guarantees that the bytes named below belong to a
buffer that stays alive during the call. In a compiled function `u8_at(address)[i]` reads and writes number i of an
array, which must be aligned as its numbers are; loads and stores need no alignment. Vectors are LLVM's: a processor
without 64-byte registers runs the same code in several steps.
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, unwrap
from typing import Any

from llvmlite import ir

from napkin.machine_code.compiled_function import Deferred

_I1, _I8, _I16, _I32, _I64, _I128 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128))
_BLOCK = ir.VectorType(_I8, 64)
_ENTRIES = ir.VectorType(_I64, 8)
_SCANNER = ir.FunctionType(_I64, [_I64] * 7)


def operation(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what writes the LLVM instructions of a function of that signature, by numba's names, as in
    "int64(int64, float32)": emit(builder, *values) returns the value, a list of values for a tuple, or what it likes
    where the result is void."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def make() -> Any:
            from numba import extending, types
            from numba.core import sigutils

            returned: Any
            arguments, returned = sigutils.normalize_signature(signature)

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                if returned is types.void:
                    return context.get_dummy_value()
                return context.make_tuple(builder, signature.return_type, value) if isinstance(value, list) else value

            def typed(typing_context: Any, *given: Any) -> Any:
                return returned(*arguments), generate

            # A runtime type checker may have wrapped it. numba counts the parameters.
            typed = unwrap(typed)
            names = ["typing_context", *(f"argument_{i}" for i in range(len(arguments)))]
            typed.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])
            return extending.intrinsic(typed)

        return Deferred(make)

    return decorate


def _pointer(kind: str, llvm_kind: Any) -> Any:
    return operation(f"CPointer({kind})(int64)")(
        lambda builder, address: builder.inttoptr(address, llvm_kind.as_pointer())
    )


i8_at = _pointer("int8", _I8)
u8_at = _pointer("uint8", _I8)
u16_at = _pointer("uint16", _I16)
i32_at = _pointer("int32", _I32)
u32_at = _pointer("uint32", _I32)
i64_at = _pointer("int64", _I64)
u64_at = _pointer("uint64", _I64)
f32_at = _pointer("float32", ir.FloatType())
f64_at = _pointer("float64", ir.DoubleType())


# What writes the instructions of operations calls these.


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load a value from an address of any alignment."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, address: Any, value: Any) -> None:
    """Store a value at an address of any alignment."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def called(builder: Any, name: str, result: Any, arguments: Sequence[Any], fastmath: Sequence[str] = ()) -> Any:
    """The result of a function of LLVM's."""
    signature = ir.FunctionType(result, [each.type for each in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, arguments, fastmath=fastmath)


# A number at an address, narrow ones as int64: its low bits are stored.
load_u8 = operation("int64(int64)")(lambda b, address: b.zext(load(b, address, _I8), _I64))
load_u32 = operation("int64(int64)")(lambda b, address: b.zext(load(b, address, _I32), _I64))
load_i64 = operation("int64(int64)")(lambda b, address: load(b, address, _I64))
load_u64 = operation("uint64(int64)")(lambda b, address: load(b, address, _I64))
store_u8 = operation("void(int64, int64)")(lambda b, at, value: store(b, at, b.trunc(value, _I8)))
store_u32 = operation("void(int64, int64)")(lambda b, at, value: store(b, at, b.trunc(value, _I32)))
store_i64 = operation("void(int64, int64)")(store)
store_u64 = operation("void(int64, uint64)")(store)

trailing_zeros = operation("int64(uint64)")(lambda b, bits: b.cttz(bits, ir.Constant(_I1, 0)))
"""The index of the lowest set bit of a uint64; 64 if none is set."""
leading_zeros = operation("int64(uint64)")(lambda b, bits: b.ctlz(bits, ir.Constant(_I1, 0)))
"""The number of zeros above the highest set bit of a uint64; 64 if none is set."""
set_bits = operation("int64(uint64)")(lambda b, bits: b.ctpop(bits))
"""The number of set bits of a uint64."""


@operation("void(int64)")
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at `address`. Reads nothing: any integer is allowed."""
    # For reading, keep in all cache levels, data cache.
    flags = [ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)]
    called(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.inttoptr(address, _I8.as_pointer()), *flags])


@operation("uint64(uint64, uint64)")
def folded_product(builder: Any, first: Any, second: Any) -> Any:
    """The upper half of the 128-bit product of two uint64, xor its lower half."""
    product = builder.mul(builder.zext(first, _I128), builder.zext(second, _I128))
    upper = builder.trunc(builder.lshr(product, ir.Constant(_I128, 64)), _I64)
    return builder.xor(upper, builder.trunc(product, _I64))


@operation("UniTuple(uint64, 9)(int64)")
def block_masks(builder: Any, address: Any) -> Any:
    """Nine masks of the 64 bytes at `address`, bit i for byte i; those that are not used cost nothing. Reads 64 bytes.

    In order: ASCII letters, ASCII digits, the space, ASCII white space (including the space), the apostrophe, bytes of
    non-ASCII characters, line feed and carriage return, the slash, and ASCII capitals.
    """
    block = load(builder, address, _BLOCK)

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
        builder.or_(*(builder.icmp_unsigned("==", block, each(ord(end))) for end in "\n\r")),
        builder.icmp_unsigned("==", block, each(ord("/"))),
        between(block, ord("A"), ord("Z")),
    ]
    return [builder.bitcast(mask, _I64) for mask in masks]


@operation("int64(int64, int64)")
def find_in_bucket(builder: Any, address: Any, key: Any) -> Any:
    """Find the one of the 8 uint64 at `address` whose high 40 bits are `key`, and return its low 24 bits.

    2^32 - 1 if there is none; there must be at most one. Reads 64 bytes. Branch-free, as the position is unpredictable.
    """
    entries = load(builder, address, _ENTRIES)
    first = builder.insert_element(ir.Constant(_ENTRIES, ir.Undefined), key, ir.Constant(_I32, 0))
    keys = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, 8), [0] * 8))
    same = builder.icmp_unsigned("==", builder.lshr(entries, ir.Constant(_ENTRIES, [24] * 8)), keys)
    mask = builder.zext(builder.bitcast(same, _I8), _I64)
    # If there is none, some entry is loaded in vain; a minimum over the vector would take twice as long.
    place = builder.and_(builder.cttz(mask, ir.Constant(_I1, 0)), ir.Constant(_I64, 7))
    entry = load(builder, builder.add(address, builder.shl(place, ir.Constant(_I64, 3))), _I64)
    none = builder.icmp_unsigned("==", mask, ir.Constant(_I64, 0))
    value = builder.and_(entry, ir.Constant(_I64, 2**24 - 1))
    return builder.select(none, ir.Constant(_I64, 2**32 - 1), value)


@operation("int64(int64)")
def least_of_16(builder: Any, address: Any) -> Any:
    """The least of the 16 uint32 at `address`. Reads 64 bytes."""
    numbers = load(builder, address, ir.VectorType(_I32, 16))
    return builder.zext(called(builder, "llvm.vector.reduce.umin.v16i32", _I32, [numbers]), _I64)


@operation("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def call_scanner(builder: Any, scanner: Any, *arguments: Any) -> Any:
    """Call the scanner whose machine code is at address `scanner`; its contract is in tokenizer/numba/scanners.py."""
    return builder.call(builder.inttoptr(scanner, _SCANNER.as_pointer()), arguments)


@operation("int64(int64, int64)")
def call_with_state(builder: Any, function: Any, state: Any) -> Any:
    """Call the compiled function of one argument whose machine code is at address `function`."""
    kind = ir.FunctionType(_I64, [_I64])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [state])


@operation("int64(int64, int64, int64, int64)")
def call_with_three(builder: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call the C function of three integers or pointers that is at address `function`; an int is its low 32 bits."""
    kind = ir.FunctionType(_I64, [_I64, _I64, _I64])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [first, second, third])
