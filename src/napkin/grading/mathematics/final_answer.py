r"""Finds the part of a text that is its final answer.

After a thought in <think> tags, the first of these that the text has:

1. the last <answer>...</answer>, or what is marked within it;
2. the last \boxed{...} that is not inside another; boxes with only `or`, `and` or a comma between are one list;
3. what follows the last `####`, to the end of its line;
4. what follows the last "answer is", "**Answer:**" or a heading "Final answer", to the end of its sentence;
5. the whole text, if it is a single short line; for a number, what the last sentence concludes.

A mark that is empty, never closed or taken back ("\boxed{42} is wrong") is no answer, whatever was marked before it.

Whole numbers may be in words: five, forty-two, three hundred and five, two thousand; 1.5 million, 5 dozen.
"""

import re
from fractions import Fraction

from napkin.grading.mathematics.answer_tokens import Token
from napkin.grading.mathematics.units import changes_numbers

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


MOST_CHARACTERS = 100_000
"""The end of a text that is searched; what stands before it is not."""
MOST_ANSWER = 4_000
"""The longest answer in a box."""
MOST_LINE = 1_000
"""The longest line that is taken as the answer as a whole."""
MOST_BARE_LINE = 200
"""The same for a line that is not marked as an answer."""
_MOST_LAYERS = 6
"""The most nested marks around an answer that are removed."""
_MOST_AFTER = 400
"""Characters after an answer that may take it back."""
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")
_SAID = re.compile(
    r"(?<![A-Za-z])(?:answer|result|(?:correct|right|best|final) (?:option|choice))"
    r"(?: (?:to|of|for) (?:the|this|that|your|our) (?:question|problem|exercise|puzzle))?"
    r"[*_]{0,3}\s{0,9}(?::|=|(?:is|was|must be|should be|would be|will be|equals)\b"
    r"(?: (?:therefore|thus|then|hence|simply|just|indeed|now|clearly|exactly|again))?(?:\s{0,9}:)?)"
    r"[*_]{0,3}[ \t]{0,99}",
    re.IGNORECASE,
)
_SAID_BEHIND = re.compile(r" is (?:the|my) (?:final |correct |right )?answer[.!]?$", re.IGNORECASE)
_HEADING = re.compile(r"^[ \t#*_]{0,9}(?:the )?(?:final )?answer[ \t#*_]{0,9}$", re.IGNORECASE | re.MULTILINE)
_HEADING_LINE = re.compile(
    r"[*_ ]{0,4}(?:(?:the|final|your|my)\s+){0,2}"
    r"(?:answer|result|solution|conclusion|step|check|verification|summary)\b",
    re.IGNORECASE,
)
_MATHEMATICS = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("**", "**"), ("__", "__"), ("`", "`"))
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*\n]{1,200}?)(?<=\S)\*\*(?![\w({\[\\*])")
# Text that may come between boxes that form one list, without the marks of mathematics and spaces.
_MARKS = re.compile(r"[\s$*]|\\[()\[\]]")
_AND = re.compile(r"(?:,|;|,?(?:or|and)|\\text\{,?(?:or|and)\})(?:[A-Za-z]=)?")
_BUT_NOT = re.compile(r",?(?:and|but)?not(?:[A-Za-z]=)?")
_WRONG = r"(?:\w{1,12}ly\s+|just\s+|also\s+)?(?:wrong|incorrect|mistaken|not\s+(?:right|correct))\b"
_SO_MARKED = r"(?:[\s$.*\]}]|\\[)\]]|\)(?!\s*\())*"
_TAKEN_BACK = re.compile(
    # Directly after the mark: a question, a denial, another choice.
    rf"^{_SO_MARKED}(?:\?|,?\s*(?:which\s+|that\s+|but\s+(?:that|this|it)\s+)?"
    rf"(?:(?:is|was|seems|looks|must\s+be)\s+{_WRONG}|{_WRONG}"
    r"|(?:isn't|wasn't|(?:is|was)\s+not|cannot\s+be|can't\s+be|can\s+not\s+be|couldn't\s+be)\b(?!\s+(?:only|just)\b))"
    r"|,?\s*or\b(?!\s+(?:equivalently|approximately|about|roughly|simply|just|in\b|\$?\\approx|≈)))"
    # Anywhere after it.
    r"|(?<!if )\b(?:that|this|it|(?:my|the|this|that)\s+(?:\w{1,12}\s+)?(?:answer|result|value|box))"
    rf"\s*(?:'s|\s(?:is|was|seems|looks|must\s+be))\s+{_WRONG}"
    r"|\b(?:scratch that|never\s?mind|i was wrong|i (?:have )?made an? (?:\w{1,12} )?(?:mistake|error)"
    r"|disregard (?:that|this))",
    re.IGNORECASE,
)
_NOT_BEFORE = re.compile(
    r"\b(?:not|never|cannot\s+be|can't\s+be|isn't|wasn't|instead\s+of|rather\s+than|other\s+than)"
    r"\s*(?:equal\s+to\s*)?(?:[\s$*(\[]|\\[(\[])*$",
    re.IGNORECASE,
)
_CORRECTION = re.compile(r"\b(?:wait|actually|correction|sorry|oops|rather|instead|no)\b[^\n]{0,80}$", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.{^\\/-])-?\$?-?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+(?!\d|\.\d))?(?:\s?\\?%)?"
    r"(?![\w^*!])(?!\.\d)"
)
_BEFORE_NUMBER = re.compile(r"(?:[\w\s,:'$]|\\[(\[$])*")
_AFTER_NUMBER = re.compile(r"(?:[^*^×·÷+√π{}|\\]|\\[)\]$])*")
_CONCLUDES = re.compile(
    r"=|\b(?:so|thus|therefore|hence|consequently|altogether|in total|in all|finally)\b", re.IGNORECASE
)
_DOUBTS = re.compile(
    r"\b(?:not|or|either|neither|nor|maybe|perhaps|probably|possibly|about|approximately|roughly|between|least|most|if"
    r"|guess|unsure|wrong|incorrect|question|problem|asks?|asked|given|unknown|than|until|cannot)\b|n't\b"
    r"|[?≈~<>≤≥≠±]|\\(?:approx|sim|le|ge|ne|pm)",
    re.IGNORECASE,
)
_BEHIND_NUMBER = re.compile(
    r"\s?-?\s?(?:(?:square|cubic)\s)?(?P<word>[A-Za-z]+)(?:\s?(?:/|\bper\b)\s?[A-Za-z]+)*"
    r"(?:\s(?:squared|cubed)|\s?\^?\{?[23²³]\}?(?!\d))?"
)


def final_answer(text: str) -> str | None:
    """The final answer in a text; None if there is none."""
    text = text[-MOST_CHARACTERS:]
    is_marked, answer = _marked(text)
    return answer if is_marked else _whole(text)


def final_number(text: str) -> str | None:
    """The final answer in a text that is to be a number; None if there is none.

    Where nothing marks an answer, it is the number of the last sentence: the one after its last "=", if there is one,
    else its only one, where the sentence begins with "so", "thus" and the like.

    >>> final_number("16 - 3 = 13 eggs, and 13 * $2 = $26."), final_number("#### 1,026"), final_number("5 or 7?")
    ('$26', '1,026', '5 or 7?')
    """
    text = text[-MOST_CHARACTERS:]
    is_marked, answer = _marked(text)
    if is_marked:
        return answer
    whole = _whole(text)
    may_be_number = whole is not None and (
        re.search(r"[0-9½⅓⅔¼¾⅕]", whole) or number_of_words(whole.lower().split()[:1])
    )
    return _concluded(text) or (whole if may_be_number else None)


def _whole(text: str) -> str | None:
    stripped = _SAID_BEHIND.sub("", text.strip()[: MOST_BARE_LINE + 1])
    return bare(stripped) or None if "\n" not in stripped and len(stripped) <= MOST_BARE_LINE else None


def _marked(text: str, *, in_tag: bool = False) -> tuple[bool, str | None]:
    """True if something marks a part as the answer, and that part; None if it is empty."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        # The completion was truncated within its thought.
        return True, None
    if not in_tag and "<answer>" in text:
        return True, _tagged(text)
    found, boxed, end = _last_box(text)
    if found:
        corrected = _corrected(text, end)
        if corrected is not None:
            return True, corrected
        return True, None if boxed is None or len(boxed) > MOST_ANSWER else bare(boxed) or None
    _, mark, after = text.rpartition("####")
    if mark and not _HEADING_LINE.match(after.lstrip("# \t")):
        return True, _line_answer(after)
    places = [*_SAID.finditer(text), *_HEADING.finditer(text)]
    if places:
        return True, _line_answer(text[max(place.end() for place in places) :])
    return bool(mark), _line_answer(after) if mark else None


def _tagged(text: str) -> str | None:
    """The content of the last <answer>; None if it is never closed."""
    inner, closed, after = text.rpartition("<answer>")[2].partition("</answer>")
    if not closed or _TAKEN_BACK.search(after[:_MOST_AFTER]):
        return None
    is_marked, answer = _marked(inner, in_tag=True)
    if is_marked:
        return answer
    return bare(inner) or None if len(inner) <= MOST_ANSWER else None


def _line_answer(text: str) -> str | None:
    """The answer at the beginning of a text: its first line, up to the end of the sentence."""
    line, _, later = text.strip().partition("\n")
    line = line.strip()
    # A sentence ends where a point is followed by a space.
    parts = re.split(r"\.\s", line, maxsplit=1) if len(line) > 1 else [line]
    answer = re.split(r",?\s(?:because|since)\b", parts[0], maxsplit=1)[0]
    if len(answer) > MOST_LINE or _TAKEN_BACK.search(" ".join([*parts[1:], later])[:_MOST_AFTER]):
        return None
    for mark in ("**", "__"):
        if answer.count(mark) % 2:
            # The other answer comes before the announcement.
            answer = answer.removesuffix(mark).removeprefix(mark)
    return bare(answer) or None


def _corrected(text: str, end: int) -> str | None:
    """The answer that a text gives after its last box instead."""
    places = list(_SAID.finditer(text, end))
    if places and _CORRECTION.search(text[max(end, places[-1].start() - 90) : places[-1].start()]):
        return _line_answer(text[places[-1].end() :])
    return None


def _last_box(text: str) -> tuple[bool, str | None, int]:
    """True if there is a box, the content of the last one that is not inside another, and where that ends; None if it
    is never closed, or taken back."""
    position, found, content, begin, end = 0, False, None, 0, 0
    while (match := _BOX.search(text, position)) is not None:
        if match.end() >= len(text):
            return True, None, len(text)
        if text[match.end()] == "{":
            closing = _closing_brace(text, match.end())
            if closing is None:
                return True, None, len(text)
            inner, position = text[match.end() + 1 : closing], closing + 1
        else:
            inner, position = _unbraced(text, match.end())
        between = _MARKS.sub("", text[end : match.start()] if match.start() - end <= 60 else ".")
        if content is not None and _BUT_NOT.fullmatch(between):
            # "42, not 43": the first of them stays.
            continue
        is_list = content is not None and _AND.fullmatch(between)
        content, begin = (f"{content}, {inner}"[: MOST_ANSWER + 1], begin) if is_list else (inner, match.start())
        found, end = True, position
    denied = _NOT_BEFORE.search(text[max(begin - 60, 0) : begin]) or _TAKEN_BACK.search(text[end : end + _MOST_AFTER])
    if found and denied:
        content = None
    return found, content, end


def _unbraced(text: str, start: int) -> tuple[str, int]:
    r"""The content meant by \boxed without a brace: to the end of its formula or sentence; TeX takes one character."""
    ending = re.compile(r"\n|(?<!\\)\$|\\[)\]]|[.!?](?=\s|$)|\\f?box").search(text, start)
    end = len(text) if ending is None else ending.start()
    return text[start:end], end


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 0, start
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        position = match.start()
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return position
    return None


def _concluded(text: str) -> str | None:
    """The number that the last sentence comes to."""
    lines = text.strip().splitlines()
    if not lines or len(lines[-1]) > MOST_LINE:
        return None
    sentence = re.split(r"(?<=[.!?])\s+", lines[-1].strip())[-1]
    if not _CONCLUDES.search(sentence) or _DOUBTS.search(sentence):
        return None
    tail = sentence.replace("**", "").rpartition("=")[2]
    numbers = list(_NUMBER.finditer(tail))
    if not numbers or len(re.findall(r"\d+", tail)) != len(re.findall(r"\d+", numbers[0][0])):
        return None
    start, end = numbers[0].span()
    if not _BEFORE_NUMBER.fullmatch(tail, 0, start) or not _AFTER_NUMBER.fullmatch(tail, end):
        return None
    behind = _BEHIND_NUMBER.match(tail, end)
    return tail[start : behind.end() if behind and changes_numbers(behind["word"]) else end].strip()


def bare(answer: str) -> str:
    """An answer without the marks of mathematics around it, a box inside it that is all of it, and a full stop."""
    answer = _BOLD.sub(r"\1", answer.strip())
    for _ in range(_MOST_LAYERS):
        before = answer
        # The full stop of a sentence.
        if answer.endswith((".", "。")) and not answer.endswith(("..", "\\.")):
            answer = answer[:-1].strip()
        if (match := _BOX.match(answer)) and answer[match.end() :][:1] == "{":
            end = _closing_brace(answer, match.end())
            if end == len(answer) - 1:
                answer = answer[match.end() + 1 : end]
        for opening, closing in _MATHEMATICS:
            inner = answer[len(opening) : len(answer) - len(closing)]
            whole = answer.startswith(opening) and answer.endswith(closing) and len(answer) > len(opening + closing)
            if whole and closing not in inner:
                answer = inner.strip()
        if answer == before:
            break
    return answer
