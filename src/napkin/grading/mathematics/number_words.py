"""Whole numbers in words: five, forty-two, three hundred and five, two thousand; 1.5 million, 5 dozen."""

from fractions import Fraction

from napkin.grading.mathematics.answer_tokens import Token

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_OF_DIGITS = {**_SCALES, "hundred": 100, "dozen": 12}
_SMALL = {**{word: n for n, word in enumerate(_ONES)}, **{word: 10 * n for n, word in enumerate(_TENS, 2)}}


def with_number_words(tokens: list[Token]) -> list[Token]:
    """The tokens of an answer with the number in words that it begins with, or the scale of its number, as a number."""
    if tokens[:1] == [Token("mark", "\\$")]:
        return [tokens[0], *with_number_words(tokens[1:])]
    words, rest = _words_at_the_beginning(tokens)
    for length in range(len(words), 0, -1):
        number = number_of_words(words[:length])
        if number is not None:
            left = " ".join(words[length:])
            return [Token("number", str(number)), *([Token("words", left)] if left else []), *rest]
    if len(tokens) > 1 and tokens[0].kind == "number" and tokens[1].kind == "words":
        scale, _, left = tokens[1].text.strip().partition(" ")
        if scale in _OF_DIGITS and "e" not in tokens[0].text.lower():
            value = Fraction(tokens[0].text) * _OF_DIGITS[scale]
            if value.denominator == 1:
                return [
                    Token("number", str(value.numerator)),
                    *([Token("words", left)] if left else []),
                    *tokens[2:],
                ]
    return tokens


def number_of_words(words: list[str]) -> int | None:
    """The number that some words say; None for any others.

    >>> [number_of_words(said.split()) for said in ("three hundred and five", "forty-two", "two five")]
    [305, 42, None]
    """
    total, group, largest = 0, list[str](), 10**15
    for part in [part for word in words for part in word.split("-")]:
        if part not in _SCALES:
            group.append(part)
            continue
        value = _below_a_thousand(group)
        if not value or _SCALES[part] >= largest:
            return None
        total, group, largest = total + value * _SCALES[part], [], _SCALES[part]
    if total and group[:1] == ["and"]:
        group = group[1:]
    if not group:
        return total or None
    value = _below_a_thousand(group)
    return None if value is None or (total and not value) else total + value


def _below_a_thousand(parts: list[str]) -> int | None:
    hundreds = 0
    if len(parts) > 1 and parts[1] == "hundred":
        hundreds, parts = 100 * _SMALL.get(parts[0], 0), parts[2:]
        if not 100 <= hundreds <= 900:
            return None
        if not parts:
            return hundreds
        parts = parts[1:] if parts[0] == "and" else parts
    values = [_SMALL.get(part) for part in parts]
    if len(values) == 1 and values[0] is not None and (values[0] or not hundreds):
        return hundreds + values[0]
    if len(values) == 2 and (values[0] or 0) >= 20 and 0 < (values[1] or 0) < 10:
        return hundreds + (values[0] or 0) + (values[1] or 0)
    return None


def _words_at_the_beginning(tokens: list[Token]) -> tuple[list[str], list[Token]]:
    """Words with hyphens between, and what follows them."""
    words: list[str] = []
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if token.kind == "words" or token == Token("mark", "and"):
            said = token.text.lower().split()
            if place and tokens[place - 1] == Token("mark", "-") and words and said:
                words[-1] += "-" + said.pop(0)
            words += said
        elif not (token == Token("mark", "-") and words and place + 1 < len(tokens)):
            break
        place += 1
    return words, tokens[place:]
