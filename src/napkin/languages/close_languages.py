"""Languages that the classifier that comes with napkin cannot tell apart sentence by sentence, and what follows for
`keep`.

Most sentences of Croatian are Bosnian too, letter for letter, and the texts that it learned from, messages of programs,
do not teach what distinguishes the others; so it is with Indonesian and Malay. The sum of their probabilities holds,
the division among them is near to a guess. So a document is taken for the one that is wanted if it is of the group, and
the wanted one has more than a small share of the group's probability.
"""

from collections.abc import Collection, Mapping

CLOSE_LANGUAGES = (("bs", "hr"), ("id", "ms"))
"""Languages of which more than a third of the sentences of UDHR are taken for another of the group."""
LEAST_SHARE = 0.1
"""The least share of the group's probability, chosen by every other sentence of UDHR."""


def may_be_wanted(guessed: str, wanted: Collection[str]) -> bool:
    """True if a text that is guessed to be of a language may be of a wanted one; `unknown` may be."""
    return any(
        (guessed == "unknown" or guessed in group) and any(each in wanted for each in group)
        for group in CLOSE_LANGUAGES
    )


def close_to_wanted(
    probabilities: Mapping[str, float], wanted: Collection[str], least: float
) -> tuple[str, float, float] | None:
    """The wanted language that a text may be in though another is more probable; None if there is none.

    Args:
        probabilities: of each language, by its code.
        wanted: codes of languages.
        least: the probability that the group has to have together.

    Returns:
        The code, its own probability, and that of its group.
    """
    for group in CLOSE_LANGUAGES:
        together = sum(probabilities.get(language, 0.0) for language in group)
        own, language = max(
            ((probabilities.get(each, 0.0), each) for each in group if each in wanted), default=(0.0, "")
        )
        if language and together >= least and own >= LEAST_SHARE * together:
            return language, own, together
    return None
