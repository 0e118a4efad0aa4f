"""Kahneman-Tversky optimisation: single answers, each good or bad, in place of pairs.

A unit of the data is (answer, mismatched): `mismatched` is the answer's prompt with another prompt's answer. Before a
step, `with_kl_estimate` makes of the mismatched answers of the whole batch one estimate of the divergence from the
reference, and leaves units of one: a gradient does not depend on how they are divided into micro-batches.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from napkin.chats.token_sequence import TokenSequence, Unit
from napkin.model.transformer import TokenScores
from napkin.tuning.objective import BatchTotals, Figures, values_of
from napkin.tuning.packing import SequenceMicroBatch
from napkin.tuning.preferences.pair_objectives import last_of_answers, log_ratios_of_answers

# FOLD tuning/preferences/kto.py
# Units that are made when they are asked for: only those of a batch are in memory, however many there are.

UNITS_AT_A_TIME = 256
"""Of a pass over all units."""


class LazyUnits(Sequence[Unit], ABC):
    """A sequence of units by their numbers."""

    @abstractmethod
    def unit(self, number: int) -> Unit:
        """The unit of a number from 0 on."""

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...
    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        """Raises IndexError for a unit that does not exist."""
        numbers = range(len(self))[index]
        return self.unit(numbers) if isinstance(numbers, int) else [self.unit(number) for number in numbers]


class MappedUnits(LazyUnits):
    """What a function makes of each of other units."""

    def __init__(self, units: Sequence[Unit], function: Callable[[Unit], Unit]) -> None:
        self._units, self._function = units, function

    def __len__(self) -> int:
        return len(self._units)

    def unit(self, number: int) -> Unit:
        """That of the function."""
        return self._function(self._units[number])


def chunks_of(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    """All units, `UNITS_AT_A_TIME`."""
    for begin in range(0, len(units), UNITS_AT_A_TIME):
        yield units[begin : begin + UNITS_AT_A_TIME]


def tokens_of(units: Sequence[Unit], most: int = 1000) -> int:
    """How many tokens units have; of more than `most`, as many as that many have, evenly spread."""
    n = min(len(units), most)
    chosen = (units[number * len(units) // n] for number in range(n))
    return round(sum(len(sequence.tokens) for unit in chosen for sequence in unit) * len(units) / max(n, 1))


DESIRABLE = "desirable"
"""The value of a sequence that says whether it is a good answer, 1.0 or 0.0, at each token."""
_KL, _ALIKE = "kl", "answers_alike"


def kto_losses(
    ratios: Float[Tensor, " answer"],
    desirable: Float[Tensor, " answer"],
    kl: Float[Tensor, " answer"],
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " answer"]:
    """λ (1 - σ(±β (ratio - z))): + and λ_D for good answers (`desirable` is 1), - and λ_U for bad ones (0).

    `ratios` are log π(y | x) - log π_ref(y | x), z is `kl`, at least 0 and without gradient. Ethayarajh et al. 2024,
    equations 7 and 8.
    """
    sign = 2 * desirable - 1
    weight = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    return weight * (-sign * beta * (ratios - kl)).sigmoid()


def with_kl_estimate(units: Sequence[Unit], mismatched_ratios: Sequence[float]) -> Sequence[Unit]:
    """The units (answer, mismatched) of a whole batch as units (answer), which know the batch's estimate.

    It is max(0, mean of `mismatched_ratios`), which are log π - log π_ref of the second sequences, as the objective
    takes an answer's: sums, or means per token (Ethayarajh et al. 2024, section 4.1).
    """
    kl = max(0.0, float(np.mean(mismatched_ratios)))
    good = sum(_is_desirable(answer) for answer, _ in units)
    alike = {True: good, False: len(units) - good}
    return MappedUnits(units, lambda unit: (_with_constants(unit[0], kl, alike[_is_desirable(unit[0])]),))


def mismatched_number(runs: Sequence[int] | NDArray[np.int64], number: int, *, is_closed: bool) -> int:
    """The number of the example whose answer is put to the prompt of example `number`: the next with another prompt.

    `runs` has of each example the number of its run of neighbours with the same prompt, from 0 on; `is_closed` is
    whether the last run goes on with the first. Where all prompts are equal it is the next example: then the estimate
    is of matching answers.
    """
    n = len(runs)
    end = bisect_right(runs, runs[number])
    if end == n and is_closed:
        end = bisect_right(runs, 0)
        return (number + 1) % n if end == n else end
    return end % n


@dataclass(frozen=True)
class KTOObjective:
    """`kto_losses` of units that `with_kl_estimate` has made."""

    beta: float
    per_token: bool = False
    """Whether an answer's log-ratio is the mean over its tokens instead of the sum."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Figures]:
        """See `Objective`. Rewards are means over the good, and over the bad answers."""
        ratios = log_ratios_of_answers(part, scores, per_token=self.per_token)
        desirable, kl, alike = (last_of_answers(values_of(part, name), part) for name in (DESIRABLE, _KL, _ALIKE))
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        losses = kto_losses(ratios, desirable, kl, beta=self.beta, **weights)
        n = max(totals.units, 1)
        ahead = ratios.detach() - kl
        rewards = self.beta * ratios.detach() / alike.clamp(min=1)
        figures = {
            "accuracy": ((ahead > 0).float() * desirable + (ahead < 0).float() * (1 - desirable)).sum() / n,
            "margin": ((2 * desirable - 1) * rewards).sum(),
            "chosen_reward": (desirable * rewards).sum(),
            "rejected_reward": ((1 - desirable) * rewards).sum(),
            "kl": kl.sum() / n,
        }
        return losses.sum() / n, figures


def _is_desirable(answer: TokenSequence) -> bool:
    return bool(answer.values[DESIRABLE][0])


def _with_constants(answer: TokenSequence, kl: float, alike: int) -> TokenSequence:
    n = answer.n_counted
    return answer.with_values(**{_KL: np.full(n, kl, np.float32), _ALIKE: np.full(n, alike, np.float32)})
