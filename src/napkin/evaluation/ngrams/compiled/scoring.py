"""The bits that an n-gram model gives to texts, compiled.

For each order there is the number of the context that the last symbols are, or none. A gram that is found there has the
number of the context of the next order that it will be: no context is ever looked up by its symbols.
"""

import math

import numpy as np

from napkin.evaluation.ngrams.compiled.counting import f64_at
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import i64_at, u8_at, u32_at

MARK = 255
_NONE = 0xFFFFFFFF


@CompiledFunction
def score(tables, order, begin, text, n_bytes, bits, states):
    """Write the bits of each document, which are between marks, and return their number; marks are not scored.

    Of each order, `tables` has the addresses of firsts, symbols, seen, gammas and following; `begin` is the context of
    order 2 that is the mark alone. `states` are int64 [order + 2].
    """
    table, symbols, result, state = i64_at(tables), u8_at(text), f64_at(bits), i64_at(states)
    n_documents, total = -1, 0.0
    for i in range(n_bytes):
        symbol = symbols[i]
        if symbol == MARK:
            if n_documents >= 0:
                result[n_documents] = total
            n_documents, total = n_documents + 1, 0.0
            for k in range(order + 2):
                state[k] = -1
            state[1], state[2] = 0, begin
            continue
        probability = 1 / 256
        # The contexts of the symbol that follows, one order later: kept until this order's has been read.
        following = 0
        for k in range(1, order + 1):
            context = state[k]
            state[k] = following
            following = -1
            if context < 0:
                for rest in range(k + 1, order + 1):
                    state[rest] = -1
                break
            row = 5 * k
            first_of, symbol_of = i64_at(table[row]), u8_at(table[row + 1])
            low, high = first_of[context], first_of[context + 1]
            end = high
            while low < high:
                middle = (low + high) // 2
                if symbol_of[middle] < symbol:
                    low = middle + 1
                else:
                    high = middle
            seen = 0.0
            if low < end and symbol_of[low] == symbol:
                seen = f64_at(table[row + 2])[low]
                if k < order:
                    found = np.int64(u32_at(table[row + 4])[low])
                    following = -1 if found == _NONE else found
            probability = seen + f64_at(table[row + 3])[context] * probability
        total -= math.log2(probability)
    return max(0, n_documents)
