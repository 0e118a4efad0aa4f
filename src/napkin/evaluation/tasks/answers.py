"""Scores of an item: from log-probabilities of choices, or from a generated text.

acc              the choice with the highest log-probability is the right one
acc_norm         ... divided by the characters of the choice, as in lm-evaluation-harness
acc_bytes        ... divided by its UTF-8 bytes
acc_tokens       ... divided by its tokens
acc_uncond       ... less its log-probability after "Answer:" alone (Brown et al. 2020, section 2.4)
exact_match      the generated text is the answer
"""

from collections.abc import Sequence

import numpy as np

from napkin.evaluation.tasks.item import Item, Kind
from napkin.grading.exact import exact_score
from napkin.grading.mathematics.final_answer import final_answer, final_number
from napkin.grading.mathematics.math_answer import math_score, number_score


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
    """What is taken for the answer in a generated text, None where there is nothing, and its scores: those that the
    reward of the same name gives."""
    if kind == "exact":
        return " ".join(text.split()), {"exact_match": exact_score(text, item.answer)}
    if kind == "math":
        return final_answer(text), {"exact_match": math_score(text, item.answer)}
    return final_number(text), {"exact_match": number_score(text, item.answer)}
