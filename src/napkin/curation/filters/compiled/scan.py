"""One pass over a text: its words and lines, the counts of Gopher and FineWeb, and what C4 does to each line.

The text is UTF-8 (lone surrogates as three bytes). Words are written as three int32 each: first byte, end, characters;
lines as four: first word, end, characters, and whether a paragraph begins.
"""

from napkin.curation.filters.text_counts import (
    BULLET,
    CLOSER,
    LETTER,
    LOWER,
    SHORT_LINE,
    SOLO,
    SPACE,
    STOP_WORDS,
    TERMINAL,
    WATCHED,
)
from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i32_at, i64_at, u8_at

FIELDS = (
    "characters words word_characters alphabetic_words stop_words hashes ellipses lines line_characters bullet_lines"
    " ellipsis_lines terminated_lines short_lines paragraphs"
).split()
"""The first counts, int64 each, are these fields of TextStatistics; of stop words, a bit for each that was seen."""
CHARACTERS, WORDS, WORD_CHARACTERS, ALPHABETIC_WORDS, STOP_WORDS_SEEN, HASHES, ELLIPSES = range(7)
LINES, LINE_CHARACTERS, BULLET_LINES, ELLIPSIS_LINES, TERMINATED_LINES, SHORT_LINES, PARAGRAPHS = range(7, 14)
C4_SENTENCES, C4_LOREM_IPSUM, C4_CURLY_BRACKET, C4_BYTES, C4_LINES = range(14, 19)
# The verdicts on lines: kept, or a reason for removal, numbered as in document_counts.py.
KEPT, LONG_WORD, NO_TERMINAL, FEW_WORDS, HAS_JAVASCRIPT, HAS_POLICY = range(6)
N_COUNTS = C4_LINES + HAS_POLICY + 1

_FEED, _HASH, _FULL_STOP, _BRACKET_CODE = 10, 35, 46, 123
_BRACKET = 8
_STOP_WORDS = tuple(int.from_bytes(word.encode(), "little") for word in STOP_WORDS)
LOREM_IPSUM, JAVASCRIPT, POLICY = 1, 2, 4
_LOREM, _TERMS, _JAVASCRIPT, _PRIVACY = (
    tuple(phrase) for phrase in (b"lorem ipsum", b"terms of use", b"javascript", b"privacy policy")
)
_COOKIE_POLICY, _USES_COOKIES, _USE_OF_COOKIES, _USE_COOKIES = (
    tuple(phrase) for phrase in (b"cookie policy", b"uses cookies", b"use of cookies", b"use cookies")
)


@CompiledFunction
def scan_text(text, n, classes, words, lines, c4, min_line_words, max_word, counts):
    """Fill `counts`, `words` and `lines` from the `n` bytes at `text`.

    `c4` is 0, or room for n + 1 bytes: the lines that C4 keeps, a line feed after each.
    """
    byte, count, line = u8_at(text), i64_at(counts), i32_at(lines)
    n_words, n_lines, begins = 0, 0, 1
    i = 0
    while i < n:
        start, first, first_flags = i, n_words, 0
        end, phrases, longest, breaks, ended, last_flags = i, 0, 0, 0, 0, 0
        spaces, spaces_before, spaces_inside = 0, 0, 0
        while i < n and byte[i] != _FEED:
            flags, width = _class(byte, i, n, classes)
            if flags & SPACE:
                i += width
                spaces += 1
                continue
            if n_words == first:
                start, first_flags, spaces_before = i, flags, spaces
            if ended and not flags & LOWER:
                breaks += 1
            begin = i
            i, characters, found, last_flags, ended = _word(byte, i, n, flags, width, classes, count)
            phrases |= found
            longest = max(longest, characters)
            _note_word(byte, begin, i, characters, i32_at(words), n_words, count)
            n_words += 1
            end = i
            spaces_inside = spaces
        characters = spaces
        if n_words > first:
            length = spaces_inside - spaces_before
            for k in range(first, n_words):
                word_characters = i32_at(words)[3 * k + 2]
                length += word_characters
                characters += word_characters
            line[4 * n_lines], line[4 * n_lines + 1] = first, n_words
            line[4 * n_lines + 2], line[4 * n_lines + 3] = length, begins
            _note_line(byte, start, end, length, first_flags, last_flags, begins, count)
            if c4:
                _c4_line(
                    byte, start, end, n_words - first, longest, phrases, breaks, min_line_words, max_word, c4, count
                )
            n_lines += 1
            begins = 0
        else:
            begins = 1
        count[CHARACTERS] += characters + (1 if i < n else 0)
        i += 1
    count[WORDS], count[LINES] = n_words, n_lines


@jitted
def _word(byte, i, n, flags, width, classes, count):
    """The end of the word that begins at `i`, its characters, what is found in it, its last class, whether it ends a
    sentence.
    """
    seen, solid, last = flags, flags, flags
    found, stops, characters = 0, 0, 0
    if flags & SOLO:
        count[ALPHABETIC_WORDS] += 1 if flags & LETTER else 0
        return i + width, 1, 0, flags, 0
    while True:
        if flags & WATCHED:
            code = byte[i]
            if code == _FULL_STOP:
                stops += 1
                if stops == 3:
                    count[ELLIPSES] += 1
                    stops = 0
            else:
                stops = 0
                if code == _HASH:
                    count[HASHES] += 1
                elif code == _BRACKET_CODE:
                    found |= _BRACKET
                elif code >= 0x80:
                    count[ELLIPSES] += 1
                else:
                    found |= phrases_around(byte, i, n)
        else:
            stops = 0
        seen |= flags
        last = flags
        if not flags & CLOSER:
            solid = flags
        characters += 1
        i += width
        if i >= n:
            break
        flags, width = _class(byte, i, n, classes)
        if flags & (SPACE | SOLO):
            break
    count[ALPHABETIC_WORDS] += 1 if seen & LETTER else 0
    return i, characters, found, last, 1 if solid & TERMINAL else 0


@jitted
def phrases_around(byte, i, n):
    """Look for C4's phrases around a rare letter of each, at `i`: m, v or k. Only capitals of ASCII are folded."""
    letter = byte[i] | 0x20
    if letter == 109:  # m
        if _stands(byte, i - 4, n, _LOREM):
            return LOREM_IPSUM
        return POLICY if _stands(byte, i - 3, n, _TERMS) else 0
    if letter == 118:  # v
        if _stands(byte, i - 2, n, _JAVASCRIPT):
            return JAVASCRIPT
        return POLICY if _stands(byte, i - 3, n, _PRIVACY) else 0
    if _stands(byte, i - 3, n, _COOKIE_POLICY) or _stands(byte, i - 8, n, _USES_COOKIES):
        return POLICY
    if _stands(byte, i - 10, n, _USE_OF_COOKIES) or _stands(byte, i - 7, n, _USE_COOKIES):
        return POLICY
    return 0


@jitted
def _stands(byte, i, n, phrase):
    """True if a phrase of lower-case letters and spaces stands at `i`."""
    if i < 0 or i + len(phrase) > n:
        return False
    for k in range(len(phrase)):
        code = byte[i + k]
        if 65 <= code <= 90:
            code |= 0x20
        if code != phrase[k]:
            return False
    return True


@jitted
def _class(byte, i, n, classes):
    """The class of the character at `i` and its length in bytes; of an incomplete one, 0 and 1."""
    first = byte[i]
    if first < 0x80:
        return u8_at(classes)[first], 1
    if first < 0xE0:
        if i + 1 < n:
            return u8_at(classes)[((first & 0x1F) << 6) | (byte[i + 1] & 0x3F)], 2
    elif first < 0xF0:
        if i + 2 < n:
            return u8_at(classes)[((first & 0x0F) << 12) | ((byte[i + 1] & 0x3F) << 6) | (byte[i + 2] & 0x3F)], 3
    elif i + 3 < n:
        code = ((first & 7) << 18) | ((byte[i + 1] & 0x3F) << 12) | ((byte[i + 2] & 0x3F) << 6) | (byte[i + 3] & 0x3F)
        if code < 0x110000:
            return u8_at(classes)[code], 4
    return 0, 1


@jitted
def _note_word(byte, begin, end, characters, words, n_words, count):
    words[3 * n_words], words[3 * n_words + 1], words[3 * n_words + 2] = begin, end, characters
    count[WORD_CHARACTERS] += characters
    while begin < end and _is_ascii_punctuation(byte[begin]):
        begin += 1
    while begin < end and _is_ascii_punctuation(byte[end - 1]):
        end -= 1
    if 2 <= end - begin <= 4:
        packed = 0
        for k in range(end - begin):
            packed |= (byte[begin + k] | 0x20) << (8 * k)
        for k in range(len(_STOP_WORDS)):
            if packed == _STOP_WORDS[k]:
                count[STOP_WORDS_SEEN] |= 1 << k


@jitted
def _is_ascii_punctuation(code):
    """True for an ASCII character that is neither a letter nor a digit."""
    return code < 0x80 and not (48 <= code <= 57 or 97 <= (code | 0x20) <= 122)


@jitted
def _note_line(byte, start, end, length, first_flags, last_flags, begins, count):
    count[LINE_CHARACTERS] += length
    count[BULLET_LINES] += 1 if first_flags & BULLET else 0
    count[ELLIPSIS_LINES] += 1 if _ends_in_ellipsis(byte, start, end) else 0
    count[TERMINATED_LINES] += 1 if last_flags & TERMINAL else 0
    count[SHORT_LINES] += 1 if length < SHORT_LINE else 0
    count[PARAGRAPHS] += begins


@jitted
def _ends_in_ellipsis(byte, start, end):
    """True if three full stops or U+2026 end a line."""
    if end - start < 3:
        return False
    first, second, third = byte[end - 3], byte[end - 2], byte[end - 1]
    return (first == 46 and second == 46 and third == 46) or (first == 0xE2 and second == 0x80 and third == 0xA6)


@jitted
def _c4_line(byte, start, end, n_words, longest, phrases, breaks, min_line_words, max_word, out, count):
    """Note what C4 does to a line, and write it to `out` if it stays."""
    last = byte[end - 1]
    # A period, an exclamation mark, a question mark, an end quotation mark, straight or curved.
    ends = last == 46 or last == 33 or last == 63 or last == 34
    if last == 0x9D and end - start >= 3:
        ends = byte[end - 2] == 0x80 and byte[end - 3] == 0xE2
    if longest > max_word:
        outcome = LONG_WORD
    elif not ends or _ends_in_ellipsis(byte, start, end):
        outcome = NO_TERMINAL
    elif n_words < min_line_words:
        outcome = FEW_WORDS
    else:
        count[C4_LOREM_IPSUM] += 1 if phrases & LOREM_IPSUM else 0
        if phrases & JAVASCRIPT:
            outcome = HAS_JAVASCRIPT
        else:
            count[C4_CURLY_BRACKET] += 1 if phrases & _BRACKET else 0
            outcome = HAS_POLICY if phrases & POLICY else KEPT
    count[C4_LINES + outcome] += 1
    if outcome == KEPT:
        count[C4_SENTENCES] += breaks + 1
        written = count[C4_BYTES]
        kept = u8_at(out)
        for k in range(end - start):
            kept[written + k] = byte[start + k]
        kept[written + end - start] = _FEED
        count[C4_BYTES] = written + end - start + 1
