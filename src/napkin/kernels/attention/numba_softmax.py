"""The softmax of a row of scores and its gradient, in vectors of 16 float32, compiled: rows of some dozens of keys, for
which a compiled plain loop would compute most numbers one by one.

A row is float32, as many numbers as a multiple of 32, of which a query sees one run: from `first` to before `end`. What
is beside the run may be anything and becomes 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from napkin.kernels.numba_numbers import narrow_bits, power_of_e
from napkin.kernels.products.numba_dots import constants, fused, looped, spread
from napkin.machine_code.pointers import called, load, operation, store

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_LANES = 16
_FLOATS, _INDICES = ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)


@operation("UniTuple(float32, 2)(int64, int64, int64, int64, float32)")
def exponentiate_scores(builder: Any, row: Any, n: Any, first: Any, end: Any, factor: Any) -> list[Any]:
    """row = e^(factor · row - the largest of that), from first to end; returns that largest, and the sum of the
    exponentials."""
    unseen, of_all = constants(_FLOATS, float("-inf")), spread(builder, factor, _LANES)
    seen = _seen(builder, first, end)

    def largest(at: Any, index: Any, before: Any) -> Any:
        scaled = builder.select(seen(index), builder.fmul(load(builder, at, _FLOATS), of_all), unseen)
        store(builder, at, scaled)
        return builder.select(builder.fcmp_ordered(">", scaled, before), scaled, before)

    halves = _over_vectors(builder, row, n, unseen, largest)
    larger = builder.select(builder.fcmp_ordered(">", *halves), *halves)
    top = called(builder, "llvm.vector.reduce.fmax.v16f32", _F32, (larger,))
    tops = spread(builder, top, _LANES)

    def exponentiate(at: Any, index: Any, before: Any) -> Any:
        power = power_of_e(builder, builder.fsub(load(builder, at, _FLOATS), tops))
        power = builder.select(seen(index), power, constants(_FLOATS, 0.0))
        store(builder, at, power)
        return builder.fadd(before, power)

    return [top, _summed(builder, _over_vectors(builder, row, n, constants(_FLOATS, 0.0), exponentiate))]


@operation("void(int64, int64, float32, int64)")
def narrow_scaled(builder: Any, row: Any, n: Any, factor: Any, to: Any) -> None:
    """The n numbers of bf16 at `to` = factor · row."""
    of_all = spread(builder, factor, _LANES)

    def narrow(at: Any, index: Any, before: Any) -> Any:
        bits = narrow_bits(builder, builder.fmul(load(builder, at, _FLOATS), of_all))
        store(builder, builder.add(to, builder.mul(index, index.type(2))), bits)
        return before

    _over_vectors(builder, row, n, constants(_FLOATS, 0.0), narrow)


@operation("float32(int64, int64, int64, int64, int64, float32, float32)")
def weigh_again(builder: Any, row: Any, slope: Any, n: Any, first: Any, end: Any, factor: Any, logsumexp: Any) -> Any:
    """row = e^(factor · row - logsumexp), the weights, from first to end, where alone the weights' gradient `slope` is
    kept; returns the sum of weights · slope."""
    factors, sums = spread(builder, factor, _LANES), spread(builder, logsumexp, _LANES)
    seen, nothing, between = _seen(builder, first, end), constants(_FLOATS, 0.0), builder.sub(slope, row)

    def weigh(at: Any, index: Any, before: Any) -> Any:
        is_seen, of_slope = seen(index), builder.add(at, between)
        exponent = builder.fsub(builder.fmul(load(builder, at, _FLOATS), factors), sums)
        weight = builder.select(is_seen, power_of_e(builder, exponent), nothing)
        kept = builder.select(is_seen, load(builder, of_slope, _FLOATS), nothing)
        store(builder, at, weight)
        store(builder, of_slope, kept)
        return builder.call(fused(builder, _FLOATS), [weight, kept, before])

    return _summed(builder, _over_vectors(builder, row, n, nothing, weigh))


@operation("void(int64, int64, int64, int64, int64, int64, int64, int64, float32, float32)")
def narrow_pair(
    builder: Any,
    weights: Any,
    slopes: Any,
    factors: Any,
    n: Any,
    row_bytes: Any,
    narrow_slopes: Any,
    paired_weights: Any,
    paired_slopes: Any,
    along: Any,
    next_along: Any,
) -> None:
    """Of two rows of weights and of their gradients, row_bytes apart: the gradients of scores, weight · (slope - along)
    · factor, as bf16, half of row_bytes apart; and the weights and those as the pairs of bf16 in each column."""
    alongs = [spread(builder, each, _LANES) for each in (along, next_along)]
    to_slopes, to_factors = builder.sub(slopes, weights), builder.sub(factors, weights)
    half = builder.ashr(row_bytes, row_bytes.type(1))

    def pair(at: Any, index: Any, before: Any) -> Any:
        # Of both rows, first the weights, then the gradients of scores.
        narrow: list[list[Any]] = [[], []]
        to = builder.add(narrow_slopes, builder.mul(index, index.type(2)))
        for place, to_row, of_row in zip(
            (at, builder.add(at, row_bytes)), (to, builder.add(to, half)), alongs, strict=True
        ):
            weight = load(builder, place, _FLOATS)
            slope, factor = (load(builder, builder.add(place, each), _FLOATS) for each in (to_slopes, to_factors))
            slope = builder.fmul(builder.fmul(weight, builder.fsub(slope, of_row)), factor)
            for of_both, numbers in zip(narrow, (weight, slope), strict=True):
                of_both.append(narrow_bits(builder, numbers))
            store(builder, to_row, narrow[1][-1])
        for to_pairs, rows in zip((paired_weights, paired_slopes), narrow, strict=True):
            one, other = (builder.zext(row, _INDICES) for row in rows)
            both = builder.or_(one, builder.shl(other, constants(_INDICES, 16)))
            store(builder, builder.add(to_pairs, builder.mul(index, index.type(4))), both)
        return before

    _over_vectors(builder, weights, n, constants(_FLOATS, 0.0), pair)


def _over_vectors(builder: Any, row: Any, n: Any, start: Any, body: Callable[[Any, Any, Any], Any]) -> list[Any]:
    """Two values after `value = body(address, index of the first number, value)` for the vectors of a row in turns."""

    def both(pair: Any, values: Sequence[Any]) -> list[Any]:
        first = builder.mul(pair, n.type(2 * _LANES))
        indices = first, builder.add(first, n.type(_LANES))
        return [
            body(builder.add(row, builder.mul(index, n.type(4))), index, value)
            for index, value in zip(indices, values, strict=True)
        ]

    return looped(builder, builder.ashr(n, n.type(5)), [start, start], both)


def _seen(builder: Any, first: Any, end: Any) -> Callable[[Any], Any]:
    """What says, for the vector from an index on, which of its numbers are from first to before end."""

    def of_all(number: Any) -> Any:
        return spread(builder, builder.trunc(number, _I32), _LANES)

    length = of_all(builder.sub(end, first))
    from_first = builder.sub(constants(_INDICES, list(range(_LANES))), of_all(first))

    def seen(index: Any) -> Any:
        # One comparison for both ends: what is before the first is a large number without its sign.
        return builder.icmp_unsigned("<", builder.add(from_first, of_all(index)), length)

    return seen


def _summed(builder: Any, halves: Sequence[Any]) -> Any:
    """The sum of the numbers of two vectors, in any order."""
    total = builder.fadd(*halves)
    return called(builder, "llvm.vector.reduce.fadd.v16f32", _F32, [_F32(-0.0), total], fastmath=("reassoc",))
