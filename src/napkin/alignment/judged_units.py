"""Judged answers as KTO reads them: each with a mismatched one, an answer to another prompt behind its own."""

import numpy as np

from napkin.alignment.lazy_units import LazyUnits
from napkin.alignment.preferences.kto import mismatched_number
from napkin.alignment.token_sequence import Unit, prompt_of, sequence_of
from napkin.alignment.unit_file import UnitFile


class JudgedUnits(LazyUnits):
    """Units (answer, mismatched) of a file of judged answers, see `napkin.alignment.preferences.kto`.

    A mismatched answer is composed when it is asked for: the answer to the next other prompt, cut where the two would
    be longer than the sequences of the file may be.
    """

    def __init__(self, file: UnitFile) -> None:
        self.file = file
        first, last = (prompt_of(file[number][0]) for number in (0, -1))
        self._is_closed = np.array_equal(first, last)
        """Whether the last run of equal prompts goes on with the first."""

    def __len__(self) -> int:
        return len(self.file)

    def unit(self, number: int) -> Unit:
        """See the class."""
        (answer,) = self.file[number]
        (other,) = self.file[mismatched_number(self.file.runs, number, is_closed=self._is_closed)]
        prompt = prompt_of(answer)
        behind = other.tokens[other.counts][: self.file.about.max_length - len(prompt)]
        return answer, sequence_of(prompt.tolist(), behind.tolist())
