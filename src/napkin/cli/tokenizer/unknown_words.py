"""What the unknown words of a text cost, as it is printed."""

from napkin.tokenizer.word_level import UNK, UnknownRate


def describe_unknown_words(cost: UnknownRate) -> str:
    """The fraction of the tokens that are UNK, and the fraction of the bytes that they lose."""
    return f"{cost.tokens:.1%} of the tokens are {UNK}, and {cost.bytes:.1%} of the bytes are lost in them"
