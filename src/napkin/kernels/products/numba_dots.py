"""Sums of products of integers in vectors of 32 bytes, in the instructions that the processor has: LLVM's, written by
those who emit operations for compiled functions.

Where a processor has VNNI, one instruction multiplies 32 unsigned by 32 signed bytes and adds each four products to
int32; with AVX2 alone three do. Others run the same sums in LLVM's plain vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from napkin.machine_code.compiled_function import jitted_with, processor_features
from napkin.machine_code.pointers import called, operation, store

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_SUMS = ir.VectorType(_I32, 8)
F32X8 = ir.VectorType(_F32, 8)

AHEAD = 16384
"""Bytes ahead of those that are multiplied that rows are fetched, one line after the other: four rows side by side, as
they are read, are not what the processor foresees. It is memory's latency of 100 ns and more, times its rate."""


def prefetch(builder: Any, address: Any) -> None:
    """Fetch the cache line at an address ahead of its use. Reads nothing: any integer is allowed."""
    place = builder.inttoptr(address, _I8.as_pointer())
    # For reading, into the second level of data caches: the few lines that the first can wait for are then free for
    # what is read now, which takes up to a third less time.
    called(builder, "llvm.prefetch.p0", ir.VoidType(), (place, _I32(0), _I32(2), _I32(1)))


_fetch_line = operation("void(int64)")(prefetch)


@jitted_with(inline="always")
def fetch(address, n_bytes):
    """`prefetch` the lines of so many bytes from an address on, in a compiled function."""
    for at in range(0, n_bytes, 64):
        _fetch_line(address + at)


def fetch_ahead(builder: Any, address: Any, n_bytes: int) -> None:
    """`prefetch` the lines that are read `AHEAD` bytes after so many from an address on."""
    ahead = builder.add(address, address.type(AHEAD))
    for line in range(0, n_bytes, 64):
        prefetch(builder, builder.add(ahead, address.type(line)))


def plus(builder: Any, address: Any, index: Any, step: int) -> Any:
    """The address so many steps of bytes after another."""
    return builder.add(address, builder.mul(index, address.type(step)))


def apart(builder: Any, first: Any, step: Any, n: int) -> list[Any]:
    """n addresses, a step apart."""
    return [builder.add(first, builder.mul(step, first.type(i))) for i in range(n)]


def store_apart(builder: Any, to: Any, step: Any, numbers: Any) -> None:
    """Store the numbers of a vector, a step of bytes apart."""
    for i, place in enumerate(apart(builder, to, step, numbers.type.count)):
        store(builder, place, builder.extract_element(numbers, _I32(i)))


def constants(kind: Any, values: Any) -> Any:
    """A vector of constants: of one for all, or of a list."""
    return ir.Constant(kind, values if isinstance(values, list) else [values] * kind.count)


def spread(builder: Any, number: Any, n: int) -> Any:
    """A vector with a number n times."""
    kind = ir.VectorType(number.type, n)
    alone = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(alone, alone, constants(ir.VectorType(_I32, n), 0))


def fused(builder: Any, kind: Any) -> Any:
    """The function a · b + c of vectors of float32, one instruction where the processor has it."""
    name, signature = f"llvm.fmuladd.v{kind.count}f32", ir.FunctionType(kind, [kind] * 3)
    return builder.module.globals.get(name) or ir.Function(builder.module, signature, name)


def looped(builder: Any, n: Any, values: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """The values after `values = body(index, values)` for index from 0 to n."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index, held = builder.phi(n.type), [builder.phi(each.type) for each in values]
    builder.cbranch(builder.icmp_signed("<", index, n), inside, after)
    builder.position_at_end(inside)
    new = body(index, held)
    following = builder.add(index, n.type(1))
    for phi, first, next_value in zip([index, *held], [n.type(0), *values], [following, *new], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return held


def row_sums(builder: Any, rows: Sequence[Any]) -> Any:
    """The sums of one or four vectors of eight float32, as one or four, each added up in the same order."""

    def added(first: Any, second: Any, one: list[int], other: list[int]) -> Any:
        kind = ir.VectorType(_I32, len(one))
        parts = (builder.shuffle_vector(first, second, constants(kind, places)) for places in (one, other))
        return builder.fadd(*parts)

    four = rows if len(rows) == 4 else list(rows) * 4
    first, second = (
        added(a, b, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]) for a, b in (four[:2], four[2:])
    )
    halves = added(first, second, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
    sums = added(halves, halves, [0, 1, 2, 3], [4, 5, 6, 7])
    return sums if len(rows) == 4 else builder.extract_element(sums, _I32(0))


def folded(builder: Any, total: Any) -> Any:
    """A vector of eight or sixteen float32 as one of eight with the same sum."""
    if total.type.count == 8:
        return total
    halves = [constants(ir.VectorType(_I32, 8), list(range(first, first + 8))) for first in (0, 8)]
    return builder.fadd(*(builder.shuffle_vector(total, total, places) for places in halves))


def add_products(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Each int32 of a total and four products of bytes, unsigned by signed ones, by VNNI."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}"
    given = total, builder.bitcast(unsigned, total.type), builder.bitcast(signed, total.type)
    return called(builder, name, total.type, given)


def byte_dots(builder: Any, planes: Sequence[Any], row_part: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What makes, of a row's 64 signed bytes at an address, Σ bytes · n in int32, of four numbers in each of 16 sums.

    n are integers of 16 bits in planes: their upper bytes, which are signed, and the lower ones, which are not. For
    processors that multiply 64 bytes by VNNI.
    """
    upper, lower = planes
    sums = ir.VectorType(_I32, upper.type.count // 4)
    middle, eights = constants(upper.type, -128), constants(sums, 8)
    # Bytes count from -128: the first factor has to be unsigned.
    beyond = builder.shl(add_products(builder, constants(sums, 0), middle, upper), eights)

    def dots(address: Any) -> Any:
        signed = row_part(address)
        total = add_products(builder, constants(sums, 0), builder.xor(signed, middle), upper)
        total = add_products(builder, builder.shl(total, eights), lower, signed)
        return builder.sub(total, beyond)

    return dots


def nibble_dots(builder: Any, low: Any, high: Any, planes: Sequence[Any]) -> Any:
    """Σ low · n + high · m in int32, of four or eight numbers in each of eight or sixteen sums: each sums four bytes.

    low and high are 32 or 64 bytes from 0 to 15, n and m integers of 16 bits in planes: the upper bytes of n, which are
    signed, its lower ones, which are not, and those of m. Only with AVX-512 they are 64.
    """
    features, n_bytes = processor_features(), low.type.count
    upper_n, lower_n, upper_m, lower_m = planes
    if {"avx512vnni", "avx512vl"} <= features or ("avxvnni" in features and n_bytes == 32):
        sums = ir.VectorType(_I32, n_bytes // 4)
        total = add_products(builder, constants(sums, 0), low, upper_n)
        total = builder.shl(add_products(builder, total, high, upper_m), constants(sums, 8))
        return add_products(builder, add_products(builder, total, lower_n, low), lower_m, high)
    if "avx2" in features:
        of_bytes, of_words = ("avx2.pmadd.ub.sw", "avx2.pmadd.wd")
        if n_bytes == 64:
            of_bytes, of_words = ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")
        words, sums = ir.VectorType(_I16, n_bytes // 2), ir.VectorType(_I32, n_bytes // 4)

        def pairs(unsigned: Any, signed: Any) -> Any:
            # Two products of 15 · 255 and twice as many fit 16 bits.
            return called(builder, f"llvm.x86.{of_bytes}", words, (unsigned, signed))

        upper = builder.add(pairs(low, upper_n), pairs(high, upper_m))
        lower = builder.add(pairs(lower_n, low), pairs(lower_m, high))
        return builder.add(
            *(
                called(builder, f"llvm.x86.{of_words}", sums, (pair, constants(words, weight)))
                for pair, weight in ((upper, 256), (lower, 1))
            )
        )
    wide, words = ir.VectorType(_I32, 32), ir.VectorType(_I16, 32)
    sums = []
    for numbers, upper_plane, lower_plane in ((low, upper_n, lower_n), (high, upper_m, lower_m)):
        upper = builder.shl(builder.sext(upper_plane, words), constants(words, 8))
        whole = builder.sext(builder.or_(upper, builder.zext(lower_plane, words)), wide)
        product = builder.mul(whole, builder.zext(numbers, wide))
        for part in range(4):
            places = [*range(4 * part, 4 * part + 4), *range(16 + 4 * part, 20 + 4 * part)]
            sums.append(builder.shuffle_vector(product, product, constants(_SUMS, places)))
    return _sum(builder, sums)


def word_dots(builder: Any, words: Sequence[Any], others: Sequence[Any]) -> Any:
    """Σ of the products of 16-bit integers, vectors of 16 of them, in int32: eight sums of two from each vector."""

    def pairs(left: Any, right: Any) -> Any:
        # left[2i] · right[2i] + left[2i + 1] · right[2i + 1]: one instruction of x86.
        wide = ir.VectorType(_I32, 16)
        product = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
        even, odd = (
            builder.shuffle_vector(product, product, constants(_SUMS, list(range(first, 16, 2)))) for first in (0, 1)
        )
        return builder.add(even, odd)

    return _sum(builder, [pairs(left, right) for left, right in zip(words, others, strict=True)])


def _sum(builder: Any, parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = builder.add(total, part)
    return total
