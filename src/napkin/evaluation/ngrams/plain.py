"""Interpolated modified Kneser-Ney over bytes, by its definition; the compiled model is tested against it.

A document is its bytes between two marks; the mark is 255, a byte that UTF-8 never has. Every n-gram inside such a
sequence is counted, n from 2 to the order. For a shorter gram g, the count c(g) is the number of different symbols that
precede it, since what matters is in how many contexts it is a continuation; only grams that begin with a mark, which
nothing precedes, are counted as often as they occur (Kneser & Ney 1995). With h a context, h' the same without its
first symbol, and N_i(h) the number of symbols that occur i times after h (three or more for the last),

    p(w | h)  = max(c(hw) - D(c(hw)), 0) / sum over v of c(hv) + gamma(h) · p(w | h')
    gamma(h)  = (D1 N_1(h) + D2 N_2(h) + D3 N_3(h)) / sum over v of c(hv)

and p(w) without a context is interpolated with 1/256. For a context that never occurred, p(w | h) = p(w | h'). The
discounts of an order follow from how many of its grams have counts 1 to 4, n_1 to n_4 (Chen & Goodman 1998):

    Y = n_1 / (n_1 + 2 n_2),    D_i = i - (i + 1) · Y · n_(i+1) / n_i
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

MARK = 255
MOST_ORDER = 8


def discounts_of(counts_of_counts: Sequence[int]) -> tuple[float, float, float]:
    """D1, D2 and D3 from the numbers of grams with counts 1 to 4; 1/2, 1 and 3/2 where these do not determine them."""
    n1, n2, n3, n4 = counts_of_counts
    if not (n1 and n2 and n3):
        return 0.5, 1.0, 1.5
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # With few grams the formula may give negative discounts.
    return found if min(found) >= 0 else (0.5, 1.0, 1.5)


class PlainKneserNey:
    """The model in dictionaries.

    >>> model = PlainKneserNey([b"abab", b"abc"], order=3)
    >>> round(sum(model.probability(b"ab", symbol) for symbol in range(256)), 12)
    1.0
    """

    def __init__(self, documents: Sequence[bytes], order: int) -> None:
        self.order = order
        sequences = [bytes([MARK, *document, MARK]) for document in documents if document]
        raw = [
            Counter(each[i : i + n] for each in sequences for i in range(len(each) - n + 1)) for n in range(order + 1)
        ]
        counts: list[Counter[bytes]] = [Counter() for _ in range(order)] + [raw[order]]
        for n in range(1, order):
            counts[n] = Counter(gram[1:] for gram in raw[n + 1])
            if n > 1:
                counts[n] |= Counter({gram: times for gram, times in raw[n].items() if gram[0] == MARK})
        self._counts = counts
        self._after: list[defaultdict[bytes, list[int]]] = []
        self._discounts = []
        for table in counts:
            after: defaultdict[bytes, list[int]] = defaultdict(list)
            for gram, times in table.items():
                after[gram[:-1]].append(times)
            self._after.append(after)
            of_counts = Counter(table.values())
            self._discounts.append(discounts_of([of_counts[i] for i in (1, 2, 3, 4)]))

    def probability(self, context: bytes, symbol: int) -> float:
        """The probability of a symbol after a context, of which the last `order - 1` symbols count."""
        found = 1 / 256
        for n in range(1, min(self.order, len(context) + 1) + 1):
            h = context[len(context) - n + 1 :]
            if h not in self._after[n]:
                break
            times, discounts = self._after[n][h], self._discounts[n]
            gamma = sum(discounts[min(each, 3) - 1] for each in times) / sum(times)
            count = self._counts[n][h + bytes([symbol])]
            seen = (count - discounts[min(count, 3) - 1]) / sum(times) if count else 0.0
            found = seen + gamma * found
        return found
