"""Count exactly what a text repeats: words become numbers, and n-grams of words become numbers in turn.

The number of an n-gram stands for the pair (number of its first n - 1 words, number of its last word), so that no
n-gram is ever compared word by word, and nothing depends on a hash. An n-gram can occur twice only if both of its
(n-1)-grams do: in ordinary text few are left after the first rounds. Lines and paragraphs are runs of words.

The tables are keyed by random numbers of the process (fields.py of the compiled tokenizer), on which no result depends.
"""

import numpy as np

from napkin.curation.filters.text_counts import REPEATED_N_GRAMS, TOP_N_GRAMS
from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i32_at, i64_at, load_u64, u64_at

# The fields of the counts, int64 each; TOP and REPEATED hold one count per n.
REPEATED_LINES, LINE_CHARACTERS, REPEATED_PARAGRAPHS, PARAGRAPH_CHARACTERS, TOP = range(5)
REPEATED = TOP + len(TOP_N_GRAMS)
N_COUNTS = REPEATED + len(REPEATED_N_GRAMS)

_FIRST_TOP, _LAST_TOP = TOP_N_GRAMS[0], TOP_N_GRAMS[-1]
_FIRST_REPEATED, _LAST = REPEATED_N_GRAMS[0], REPEATED_N_GRAMS[-1]
_SHIFT, _ALL = np.uint64(32), np.uint64(2**64 - 1)


@CompiledFunction
def count_repetition(text, words, n_words, lines, n_lines, numbers, keys, values, key, multiplier, counts):
    """Fill `counts` from the words and lines that `scan_text` wrote.

    `numbers` has room for 6 · (n_words + 1) int32; `keys` (uint64) and `values` (int32) for the smallest power of two
    that is at least 2 · n_words and 2. Seven bytes after the text are read as well.
    """
    room = n_words + 1
    ids, groups = i32_at(numbers), i32_at(numbers + 4 * room)
    active, first = i32_at(numbers + 8 * room), i32_at(numbers + 12 * room)
    occurrences, before = i32_at(numbers + 16 * room), i32_at(numbers + 20 * room)
    count, word = i64_at(counts), i32_at(words)
    slot_keys, slot_values = u64_at(keys), i32_at(values)
    start, odd = np.uint64(key), np.uint64(multiplier)

    _number_words(text, word, n_words, ids, first, occurrences, slot_keys, slot_values, start, odd)
    before[0] = 0
    n_active = 0
    for i in range(n_words):
        before[i + 1] = before[i] + word[3 * i + 2]
        groups[i] = ids[i] if occurrences[ids[i]] > 1 else 0
        if groups[i]:
            active[n_active] = i
            n_active += 1
    groups[n_words] = 0
    for n in range(2, _LAST + 1):
        n_active, top = _number_pairs(
            n, n_words, ids, groups, active, n_active, first, occurrences, slot_keys, slot_values, odd
        )
        if _FIRST_TOP <= n <= _LAST_TOP and top:
            i = first[top]
            count[TOP + n - _FIRST_TOP] = (before[i + n] - before[i] + n - 1) * occurrences[top]
        if n >= _FIRST_REPEATED:
            count[REPEATED + n - _FIRST_REPEATED] = _covered(n, groups, active, n_active, first, before)
    # The buffer after `active` is free by now: a text has no more lines than words.
    _count_runs(i32_at(lines), n_lines, 0, ids, active, slot_keys, slot_values, start, odd, count)
    _count_runs(i32_at(lines), n_lines, 1, ids, active, slot_keys, slot_values, start, odd, count)


@CompiledFunction
def count_repeated_lines(text, words, lines, n_lines, keys, values, key, multiplier, counts):
    """Fill the counts of repeated lines alone: lines are compared word by word, and words get no numbers.

    `keys` and `values` are as in `count_repetition`.
    """
    count, word, line = i64_at(counts), i32_at(words), i32_at(lines)
    slot_keys, slot_values = u64_at(keys), i32_at(values)
    start, odd = np.uint64(key), np.uint64(multiplier)
    mask = _cleared(slot_values, n_lines)
    for k in range(n_lines):
        begin, end = line[4 * k], line[4 * k + 1]
        hashed = start
        for w in range(begin, end):
            hashed = (hashed ^ _hashed_word(text, word[3 * w], word[3 * w + 1], start, odd)) * odd
        slot = _slot(hashed, odd, mask)
        while True:
            number = slot_values[slot]
            if number == 0:
                slot_keys[slot], slot_values[slot] = hashed, k + 1
                break
            other = 4 * (number - 1)
            if slot_keys[slot] == hashed and _same_line(text, word, begin, end, line[other], line[other + 1]):
                count[REPEATED_LINES] += 1
                count[LINE_CHARACTERS] += line[4 * k + 2]
                break
            slot = (slot + 1) & mask


@jitted
def _same_line(text, word, begin, end, other, other_end):
    if end - begin != other_end - other:
        return False
    for w in range(end - begin):
        first, second = 3 * (begin + w), 3 * (other + w)
        if not _same_word(text, word[first], word[first + 1], word[second], word[second + 1]):
            return False
    return True


@jitted
def _hashed_word(text, begin, end, start, odd):
    hashed = start
    for k in range(begin, end, 8):
        hashed = (hashed ^ _eight_bytes(text, k, end)) * odd
        hashed ^= hashed >> _SHIFT
    return hashed


@jitted
def _number_words(text, word, n_words, ids, first, occurrences, keys, values, start, odd):
    """Give each word a number from 1 on: equal words have equal ones."""
    mask = _cleared(values, n_words)
    n_ids = 0
    for i in range(n_words):
        begin, end = word[3 * i], word[3 * i + 1]
        hashed = _hashed_word(text, begin, end, start, odd)
        slot = _slot(hashed, odd, mask)
        while True:
            number = values[slot]
            if number == 0:
                n_ids += 1
                keys[slot], values[slot] = hashed, n_ids
                ids[i], first[n_ids], occurrences[n_ids] = n_ids, i, 1
                break
            other = 3 * first[number]
            if keys[slot] == hashed and _same_word(text, begin, end, word[other], word[other + 1]):
                ids[i] = number
                occurrences[number] += 1
                break
            slot = (slot + 1) & mask


@jitted
def _eight_bytes(text, k, end):
    """The eight bytes at `k` as a number, those from `end` on as 0."""
    number = load_u64(text + k)
    if end - k < 8:
        number &= _ALL >> np.uint64(64 - 8 * (end - k))
    return number


@jitted
def _same_word(text, begin, end, other, other_end):
    if end - begin != other_end - other:
        return False
    for k in range(0, end - begin, 8):
        if _eight_bytes(text, begin + k, end) != _eight_bytes(text, other + k, other_end):
            return False
    return True


@jitted
def _number_pairs(n, n_words, ids, groups, active, n_active, first, occurrences, keys, values, odd):
    """Replace the (n-1)-grams that occur twice by the n-grams that do.

    `groups` has the number of the repeated n-gram that begins at each word, or 0; `active` the words where it is not 0.
    Returns how many those are, and the most frequent n-gram (the first of those), or 0.
    """
    mask = _cleared(values, n_active)
    n_groups = 0
    for a in range(n_active):
        i = active[a]
        # The word before, which reads this one's number as well, is done.
        group, groups[i] = groups[i], 0
        if i + n > n_words or groups[i + 1] == 0:
            continue
        pair = (np.uint64(group) << _SHIFT) | np.uint64(ids[i + n - 1])
        slot = _slot(pair, odd, mask)
        while values[slot] and keys[slot] != pair:
            slot = (slot + 1) & mask
        if values[slot] == 0:
            n_groups += 1
            keys[slot], values[slot] = pair, n_groups
            first[n_groups], occurrences[n_groups] = i, 0
        groups[i] = values[slot]
        occurrences[values[slot]] += 1
    top = 0
    for number in range(1, n_groups + 1):
        if occurrences[number] > 1 and (top == 0 or occurrences[number] > occurrences[top]):
            top = number
    kept = 0
    for a in range(n_active):
        i = active[a]
        if groups[i] and occurrences[groups[i]] == 1:
            groups[i] = 0
        if groups[i]:
            active[kept] = i
            kept += 1
    return kept, top


@jitted
def _cleared(values, n):
    """Empty a table for `n` keys; its number of slots less one."""
    size = 2
    while size < 2 * n:
        size *= 2
    for k in range(size):
        values[k] = 0
    return size - 1


@jitted
def _slot(hashed, odd, mask):
    """The first slot that a search for a key looks at: upper bits, which depend on all bits of the key."""
    mixed = (hashed ^ (hashed >> _SHIFT)) * odd
    return np.int64(mixed >> _SHIFT) & mask


@jitted
def _same_words(ids, begin, end, other, other_end):
    if end - begin != other_end - other:
        return False
    for k in range(end - begin):  # noqa: SIM110
        if ids[begin + k] != ids[other + k]:
            return False
    return True


@jitted
def _covered(n, groups, active, n_active, first, before):
    """Characters of words in n-grams that occurred earlier in the text."""
    characters = 0
    until = 0
    for a in range(n_active):
        i = active[a]
        if first[groups[i]] != i:
            characters += before[i + n] - before[max(i, until)]
            until = i + n
    return characters


@jitted
def _count_runs(line, n_lines, paragraphs, ids, seen, keys, values, start, odd, count):
    """Count the lines, or the paragraphs, that stood in the text before; `seen` has room for two numbers of each."""
    mask = _cleared(values, n_lines)
    n_seen = 0
    field = 2 * paragraphs
    k = 0
    while k < n_lines:
        begin, end, length = line[4 * k], line[4 * k + 1], line[4 * k + 2]
        k += 1
        while paragraphs and k < n_lines and line[4 * k + 3] == 0:
            end = line[4 * k + 1]
            length += line[4 * k + 2]
            k += 1
        hashed = start
        for w in range(begin, end):
            hashed = (hashed ^ np.uint64(ids[w])) * odd
        slot = _slot(hashed, odd, mask)
        while True:
            number = values[slot]
            if number == 0:
                n_seen += 1
                keys[slot], values[slot] = hashed, n_seen
                seen[2 * n_seen - 2], seen[2 * n_seen - 1] = begin, end
                break
            if keys[slot] == hashed and _same_words(ids, begin, end, seen[2 * number - 2], seen[2 * number - 1]):
                count[REPEATED_LINES + field] += 1
                count[LINE_CHARACTERS + field] += length
                break
            slot = (slot + 1) & mask
