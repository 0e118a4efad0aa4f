r"""Which part of a text is its final answer.

The last \boxed{...} that is not inside another: an empty one, or one that is never closed, is no answer, whatever was
boxed before it. Without a box what follows the last `####`; without that what follows the last "answer is", to the end
of its line; without that the whole text, if it is a single short line.
"""

import re

MOST_CHARACTERS = 100_000
"""Of a text that is searched: what stands before is not."""
MOST_ANSWER = 4_000
"""Of an answer in a box."""
MOST_LINE = 200
"""Of a line that is taken as a whole for the answer."""
_MOST_LAYERS = 6
"""Of marks around an answer."""
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")
_SAID = re.compile(r"\b(?:final answer|answer|result)\s*(?:is|:|=)\s*:?[ \t]*", re.IGNORECASE)
_MATHEMATICS = (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("**", "**"), ("`", "`"))


def final_answer(text: str) -> str | None:
    """The final answer in a text; None if there is none."""
    text = text[-MOST_CHARACTERS:]
    found, boxed = _last_box(text)
    if found:
        return None if boxed is None or len(boxed) > MOST_ANSWER else bare(boxed) or None
    _, mark, after = text.rpartition("####")
    if mark:
        return bare(_first_line(after)) or None
    places = list(_SAID.finditer(text))
    if places:
        return bare(_first_line(text[places[-1].end() :])) or None
    stripped = text.strip()
    return bare(stripped) or None if "\n" not in stripped and len(stripped) <= MOST_LINE else None


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0].strip()
    # A sentence ends where a point is followed by a space.
    return re.split(r"\.\s", line, maxsplit=1)[0][: MOST_LINE + 1] if len(line) > 1 else line


def _last_box(text: str) -> tuple[bool, str | None]:
    """Whether there is a box, and what is in the last one that is not inside another; None if it is never closed."""
    position, found, content = 0, False, None
    while (match := _BOX.search(text, position)) is not None:
        found, position = True, match.end()
        if position >= len(text):
            return True, None
        if text[position] != "{":
            # \boxed 5
            token = re.compile(r"\\?[0-9A-Za-z]").match(text, position)
            content = "" if token is None else token[0]
            continue
        end = _closing_brace(text, position)
        if end is None:
            return True, None
        content, position = text[position + 1 : end], end + 1
    return found, content


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 0, start
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        position = match.start()
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return position
    return None


def bare(answer: str) -> str:
    """An answer without the marks of mathematics around it, a box inside it that is all of it, and a full stop."""
    answer = answer.strip()
    # The full stop of a sentence.
    if answer.endswith((".", "。")) and not answer.endswith(("..", "\\.")):
        answer = answer[:-1].strip()
    for _ in range(_MOST_LAYERS):
        before = answer
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
