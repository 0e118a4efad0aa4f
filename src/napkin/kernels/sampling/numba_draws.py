"""Drawing a token from a row of logits, compiled: what top-k and top-p keep is found without sorting the row.

Both keep the first tokens of the row in the order of falling logits and, among equal ones, of their ids. Where they end
is found by buckets of equal width: the numbers and weights of a bucket are added up, and only the bucket in which the
end lies is looked at again, in narrower buckets, until a few tokens are left to sort. No more than the weights of the
row, in float64, and the ids of one bucket are written.
"""

from math import log
from typing import Any

import numpy as np
from llvmlite import ir

from napkin.kernels.numba_numbers import FASTMATH, larger
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import called, f32_at, f64_at, i32_at, i64_at, operation

COLUMNS = 5
"""Numbers that say how a row is drawn: temperature, top_k, top_p, min_p and the uniform number."""

BUCKETS = 2048
_FEW = 48
"""Tokens that are sorted one by one."""
_PART = 256
"""Tokens of a row that are looked at together when one of them is searched."""
_LOG2_E = 1.4426950408889634
_LN_2 = (0.693147180369123816490, 1.90821492927058770002e-10)
"""ln 2 in two parts, of which multiples of the first are exact."""
_SMALLEST = -708.0
"""e^x is a normal float64 down to here, and 0 below: nothing so unlikely is ever drawn."""
_MAGIC = 1.5 * 2.0**52
"""A whole number added to it stands in the lowest bits of the sum."""

_F64, _I64 = ir.DoubleType(), ir.IntType(64)


@operation("float64(float64)")
def _exponential(builder: Any, x: Any) -> Any:
    """e^x of float64 that is not above 0, within 2 units in the last place. A call of the C library would not run in
    vectors."""

    def call(name: str, *arguments: Any) -> Any:
        return called(builder, name, _F64, arguments)

    is_zero = builder.fcmp_ordered("<", x, _F64(_SMALLEST))
    x = builder.select(is_zero, _F64(0), x)
    whole = call("llvm.rint.f64", builder.fmul(x, _F64(_LOG2_E)))
    r = call("llvm.fmuladd.f64", whole, _F64(-_LN_2[0]), x)
    r = call("llvm.fmuladd.f64", whole, _F64(-_LN_2[1]), r)
    # Taylor's series to r^13, |r| up to ln(2)/2: the first term left out is below 2^-57 of the sum.
    factors, factorial = [], 1
    for power in range(14):
        factorial *= max(power, 1)
        factors.append(1 / factorial)
    p = _F64(factors[-1])
    for factor in reversed(factors[:-1]):
        p = call("llvm.fmuladd.f64", p, r, _F64(factor))
    # Conversions of float64 to integers run in vectors on few processors, additions on all.
    bits = builder.bitcast(builder.fadd(whole, _F64(_MAGIC)), _I64)
    power = builder.bitcast(builder.shl(builder.add(bits, _I64(1023)), _I64(52)), _F64)
    return builder.select(is_zero, _F64(0), builder.fmul(p, power))


@jitted_with(fastmath=FASTMATH)
def _extremes(logits, n):
    """The largest and the least of n float32; NaN if one is NaN."""
    z = f32_at(logits)
    largest = negative = np.float32(-np.inf)
    for j in range(n):
        largest = larger(largest, z[j])
        negative = larger(negative, -z[j])
    return largest, -negative


@jitted_with(fastmath=FASTMATH)
def _first_of(logits, n, largest):
    """The first of n tokens that has the largest logit."""
    z, start = f32_at(logits), 0
    while start + _PART < n:
        of_part = z[start]
        for j in range(start, start + _PART):
            of_part = larger(of_part, z[j])
        if of_part == largest:
            break
        start += _PART
    while z[start] < largest:
        start += 1
    return start


@jitted_with(fastmath=FASTMATH)
def _weigh(logits, n, largest, temperature, weights):
    """weights = e^((logits - largest) / temperature), of n logits; their sum."""
    z, w = f32_at(logits), f64_at(weights)
    total = 0.0
    for j in range(n):
        w[j] = _exponential((np.float64(z[j]) - largest) / temperature)
        total += w[j]
    return total


@jitted_with(fastmath=FASTMATH)
def _end_of_first(logits, weights, n, largest, least, temperature, most, mass, buckets, ids):
    """The logit of the last of the first tokens and its id, where the next one would be the first that is after `most`
    tokens, or after weights that add up to `mass`, which are above 0.

    The buffers hold two float64 per bucket and n int32.
    """
    z, w, sums, chosen = f32_at(logits), f64_at(weights), f64_at(buckets), i32_at(ids)
    high, low = np.float64(largest), np.float64(least)
    # Where the least logits have no weight, buckets that reach down to them would be too wide.
    bottom = high + 2 * _SMALLEST * temperature
    if low < bottom < high:
        low = bottom
    n_left, all_left, n_before, before = n, True, 0.0, 0.0
    while n_left > _FEW and high > low:
        factor = (BUCKETS - 1) / (high - low)
        for b in range(2 * BUCKETS):
            sums[b] = 0.0
        for i in range(n_left):
            j = np.int64(i if all_left else chosen[i])
            place = 2 * np.int64(min((high - z[j]) * factor, BUCKETS - 1.0))
            sums[place] += w[j]
            sums[place + 1] += 1.0
        b = 0
        while b < BUCKETS and n_before + sums[2 * b + 1] < most and before + sums[2 * b] < mass:
            before += sums[2 * b]
            n_before += sums[2 * b + 1]
            b += 1
        if b == BUCKETS:
            return least, n
        first = high
        high, low = -np.inf, np.inf
        n_found = 0
        for i in range(n_left):
            j = np.int64(i if all_left else chosen[i])
            chosen[n_found] = j
            if np.int64(min((first - z[j]) * factor, BUCKETS - 1.0)) == b:
                n_found += 1
                high, low = max(high, np.float64(z[j])), min(low, np.float64(z[j]))
        n_left, all_left = n_found, False
    if all_left:
        for i in range(n):
            chosen[i] = i
    if high > low:
        for i in range(1, n_left):
            j, k = chosen[i], i
            while k > 0 and z[chosen[k - 1]] < z[j]:
                chosen[k] = chosen[k - 1]
                k -= 1
            chosen[k] = j
    last = chosen[0]
    for i in range(n_left):
        if n_before >= most or before >= mass:
            break
        last = chosen[i]
        n_before += 1.0
        before += w[last]
    return z[last], np.int64(last)


@jitted_with(fastmath=FASTMATH)
def _keep_first(logits, weights, n, end, last):
    """Make weights 0 after the first tokens, which end at that logit and id; the sum of the others."""
    z, w = f32_at(logits), f64_at(weights)
    total = 0.0
    for j in range(n):
        kept = w[j] if z[j] > end or (z[j] == end and j <= last) else 0.0
        w[j] = kept
        total += kept
    return total


@jitted_with(fastmath=FASTMATH)
def _keep_likely(weights, n, least):
    """Make those of n weights 0 that are below the least; the sum of the others."""
    w = f64_at(weights)
    total = 0.0
    for j in range(n):
        kept = w[j] if w[j] >= least else 0.0
        w[j] = kept
        total += kept
    return total


@jitted_with(fastmath=FASTMATH)
def _keep(logits, n, temperature, top_k, top_p, min_p, largest, least, weights, buffer):
    """The weights of a row, 0 for tokens that top_k, top_p and min_p leave out; their sum. The buffer holds
    2 · BUCKETS float64 and n int32."""
    ids = buffer + 8 * 2 * BUCKETS
    total = _weigh(logits, n, largest, temperature, weights)
    if top_k < n:
        end, last = _end_of_first(logits, weights, n, largest, least, temperature, top_k, np.inf, buffer, ids)
        total = _keep_first(logits, weights, n, end, last)
    if top_p < 1:
        end, last = _end_of_first(logits, weights, n, largest, least, temperature, np.inf, top_p * total, buffer, ids)
        total = _keep_first(logits, weights, n, end, last)
    if min_p > 0:
        total = _keep_likely(weights, n, min_p)
    return total


@jitted_with(fastmath=FASTMATH)
def _sum(weights, start, stop):
    w = f64_at(weights)
    total = 0.0
    for j in range(start, stop):
        total += w[j]
    return total


@jitted_with()
def _drawn(weights, n, uniform):
    """The first token at which the sum of weights exceeds that part of their whole sum, and its probability."""
    w = f64_at(weights)
    total = 0.0
    for start in range(0, n, _PART):
        total += _sum(weights, start, min(start + _PART, n))
    # Rounding up to the whole sum would find none.
    wanted = min(uniform * total, total * (1 - 2.0**-52))
    passed, start = 0.0, 0
    # The last part is not asked: sums that were added in another order could leave the draw beyond it.
    while start + _PART < n:
        after = passed + _sum(weights, start, start + _PART)
        if after > wanted:
            break
        passed = after
        start += _PART
    token = start
    for j in range(start, min(start + _PART, n)):
        if w[j] > 0:
            token = j
            passed += w[j]
            if passed > wanted:
                break
    return token, w[token] / total


@CompiledFunction
def draw_rows(logits, settings, tokens, logprobs, start, stop, n, buffer):
    """Draw a token, int64, from each row from start to stop of logits, float32 [rows, n], and the log-probability with
    which it was drawn, float64; the token is -1 where a logit is infinite or NaN.

    settings are float64 [rows, COLUMNS]; with a top_k of 1 the first of the largest logits is taken. The buffer holds
    3 · n + 4 · BUCKETS float32.
    """
    token_of, logprob_of = i64_at(tokens), f64_at(logprobs)
    for i in range(start, stop):
        row, of_row = logits + 4 * n * i, f64_at(settings + 8 * COLUMNS * i)
        largest, least = _extremes(row, n)
        token_of[i], logprob_of[i] = -1, 0.0
        if not (least > -np.inf and largest < np.inf):
            continue
        if of_row[1] == 1:
            token_of[i] = _first_of(row, n, largest)
            continue
        weights = buffer
        _keep(row, n, of_row[0], of_row[1], of_row[2], of_row[3], largest, least, weights, buffer + 8 * n)
        token, probability = _drawn(weights, n, of_row[4])
        token_of[i], logprob_of[i] = token, log(probability)


@CompiledFunction
def probability_rows(logits, settings, probabilities, finite, start, stop, n, buffer):
    """Write the probabilities, float64 [rows, n], with which `draw_rows` draws the tokens of each row from start to
    stop; finite, int64, is 0 where a logit is infinite or NaN. The buffer holds n + 4 · BUCKETS float32."""
    finite_of = i64_at(finite)
    for i in range(start, stop):
        row, of_row, weights = logits + 4 * n * i, f64_at(settings + 8 * COLUMNS * i), probabilities + 8 * n * i
        largest, least = _extremes(row, n)
        finite_of[i] = 0
        if least > -np.inf and largest < np.inf:
            finite_of[i] = 1
            total = _keep(row, n, of_row[0], of_row[1], of_row[2], of_row[3], largest, least, weights, buffer)
            p = f64_at(weights)
            for j in range(n):
                p[j] /= total
