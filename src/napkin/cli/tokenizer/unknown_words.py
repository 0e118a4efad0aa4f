"""What the unknown words of a text cost, as it is printed."""

from napkin.tokenizer.words import UNK, UnknownCost


def describe_unknown_words(cost: UnknownCost) -> str:
    """The fraction of the tokens that are UNK, and the fraction of the bytes that they lose."""
    return f"{cost.tokens:.1%} of the tokens are {UNK}, and {cost.bytes:.1%} of the bytes are lost in them"
