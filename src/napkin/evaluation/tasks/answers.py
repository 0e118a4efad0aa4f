"""Scores of an item: from log-probabilities of choices, or from a generated text.

acc              the choice with the highest log-probability is the right one
acc_norm         ... divided by the characters of the choice, as in lm-evaluation-harness
acc_bytes        ... divided by its UTF-8 bytes
acc_tokens       ... divided by its tokens
acc_uncond       ... less its log-probability after "Answer:" alone (Brown et al. 2020, section 2.4)
exact_match      the generated text is the answer
"""

import re
from collections.abc import Sequence

import numpy as np

from napkin.evaluation.tasks.item import Item, Kind
from napkin.evaluation.tasks.published import FINAL_NUMBER

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")


def choice_scores(
    item: Item, logprobs: Sequence[float], tokens: Sequence[int], unconditional: Sequence[float] | None
) -> dict[str, float]:
    """The scores, 0 or 1, of an item with choices, from the log-probability and the number of tokens of each.

    Of equal figures the first choice counts, as numpy's argmax has it.
    """
    totals = np.array(logprobs)
    figures = {
        "acc": totals,
        "acc_norm": totals / [len(choice) for choice in item.choices],
        "acc_bytes": totals / [len(choice.encode()) for choice in item.choices],
        "acc_tokens": totals / np.array(tokens),
    }
    if unconditional is not None:
        figures["acc_uncond"] = totals - np.array(unconditional)
    return {name: float(np.argmax(figure) == item.right) for name, figure in figures.items()}


def pair_scores(logprobs: Sequence[float]) -> dict[str, float]:
    """Whether the good text has the higher log-probability (Warstadt et al. 2020); equal ones are wrong."""
    good, bad = logprobs
    return {"acc": float(good > bad)}


def generated_scores(kind: Kind, item: Item, text: str) -> tuple[str | None, dict[str, float]]:
    """What is taken for the answer in a generated text, None where there is nothing, and its scores."""
    if kind == "exact":
        found = " ".join(text.split())
        return found, {"exact_match": float(found == " ".join(item.answer.split()))}
    number, wanted = final_number(text), final_number(item.answer)
    right = number is not None and wanted is not None and float(number) == float(wanted)
    return number, {"exact_match": float(right)}


def final_number(text: str) -> str | None:
    """The number after the first `####`, without one the last number; thousands' commas and signs of money left out.

    >>> final_number("16 - 3 = 13 eggs, 13 * $2 = $26. #### 1,026"), final_number("so it is $-3.50."), final_number("?")
    ('1026', '-3.50', None)
    """
    _, mark, after = text.partition(FINAL_NUMBER)
    numbers = _NUMBER.findall((after if mark else text).replace("$", ""))
    if not numbers:
        return None
    return numbers[0 if mark else -1].replace(",", "")
