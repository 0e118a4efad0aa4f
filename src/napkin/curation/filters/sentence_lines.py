"""Which lines of a text C4 keeps: the plain form of what `compiled/scan.py` does in its one pass."""

from dataclasses import dataclass

from napkin.curation.filters.text_counts import Line, count_sentences, lines_of

REASONS = ("a very long word", "no punctuation at the end", "few words", "javascript", "policy")
"""Why a line is removed, in the order in which the reasons are looked for."""
POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
"""Of c4_utils.py."""
END_MARKS = (".", "?", "!", '"', "”")


@dataclass(slots=True)
class C4Lines:
    """What C4 does to the lines of a text."""

    text: str
    """The lines that stay, without white space at their ends, separated by line feeds."""
    removed: dict[str, int]
    """How many lines were removed, by reason."""
    sentences: int
    """In the lines that stay."""
    lorem_ipsum: int
    """Lines with these words, of those that end sentences."""
    curly_bracket: int
    """Lines with a curly bracket, of those that end sentences and are not about JavaScript."""


def plain_c4_lines(text: str, min_line_words: int, max_word_characters: int) -> C4Lines:
    """Which lines stay, and why others do not."""
    found = C4Lines("", dict.fromkeys(REASONS, 0), 0, 0, 0)
    kept: list[Line] = []
    for line in lines_of(text):
        # Only ASCII letters are folded.
        folded = line.text.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")
        reason = _removal_reason(line, folded, min_line_words, max_word_characters)
        if reason not in REASONS[:3]:
            found.lorem_ipsum += "lorem ipsum" in folded
            found.curly_bracket += reason != "javascript" and "{" in folded
        if reason:
            found.removed[reason] += 1
        else:
            kept.append(line)
    found.text = "\n".join(line.text for line in kept)
    found.sentences = sum(map(count_sentences, kept))
    return found


def _removal_reason(line: Line, folded: str, min_line_words: int, max_word_characters: int) -> str:
    """The first reason to remove a line; nothing if it stays."""
    ends_sentence = line.text.endswith(END_MARKS) and not line.text.endswith("...")
    checks = (
        max(map(len, line.words)) > max_word_characters,
        not ends_sentence,
        len(line.words) < min_line_words,
        "javascript" in folded,
        any(phrase in folded for phrase in POLICY_PHRASES),
    )
    return next((reason for reason, holds in zip(REASONS, checks, strict=True) if holds), "")
