"""Answers in words, and when case makes none different."""

_WHATEVER_THEIR_CASE = frozenset({"yes", "no", "true", "false", "none"})


def plain_words(text: str) -> str:
    """Words with a space between and without a full stop; a capital at the beginning of a word does not count.

    AB and ab stay different, for letters may be points or variables.

    >>> plain_words(" No  Solution."), plain_words("AB"), plain_words("YES")
    ('no solution', 'AB', 'yes')
    """
    return " ".join(map(_folded, text.split())).strip(" .")


def _folded(word: str) -> str:
    lower = word.lower()
    is_word = len(word) > 2 and word[1:].islower()
    return lower if is_word or lower.strip(".") in _WHATEVER_THEIR_CASE else word
