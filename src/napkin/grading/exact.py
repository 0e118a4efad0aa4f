"""The answer is the reference, letter by letter, but for white space."""


def exact_score(answer: str, reference: str) -> float:
    """1 if the texts are equal where runs of white space count as one space and those at the ends not at all.

    >>> exact_score(" to  be ", "to be"), exact_score("To be", "to be")
    (1.0, 0.0)
    """
    return float(answer.split() == reference.split())
