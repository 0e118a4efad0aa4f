"""Tuning on preferences: pairs or unpaired preferences from files, an objective, and a reference's log-probabilities.

KTO reads each unpaired completion with a mismatched one: a completion of another prompt behind its own.
"""

from collections.abc import Sequence

import numpy as np

from napkin.chats.token_sequence import Example, prompt_of, sequence_of
from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PreferenceRecipe
from napkin.train_step.step import TrainState
from napkin.training.loop import Callback, TrainingLoop
from napkin.tuning.example_file import ExampleFile, ExampleKind
from napkin.tuning.example_method import ExampleMethod, open_examples
from napkin.tuning.method import TuningContext
from napkin.tuning.packing import LazyExamples, MappedExamples, tokens_of
from napkin.tuning.preferences import (
    RewardObjective,
    calibration_of,
    mismatched_number,
    preference_objective,
    rewarded,
    with_kl_estimate,
)
from napkin.tuning.reference_scores import ReferencedExamples, ReferencePass, with_stand_ins
from napkin.tuning.sequence_step import REFERENCE


class UnpairedExamples(LazyExamples):
    """Examples (completion, mismatched) of a file of unpaired preferences, see `napkin.tuning.preferences`.

    The mismatched sequence is made when it is asked for: the completion of the next other prompt, truncated where
    prompt and completion would be longer than the sequences of the file may be.
    """

    def __init__(self, file: ExampleFile) -> None:
        self.file = file
        first, last = (prompt_of(file[number][0]) for number in (0, -1))
        self._is_closed = np.array_equal(first, last)
        """True if the last run of equal prompts continues with the first one."""

    def __len__(self) -> int:
        return len(self.file)

    def example(self, number: int) -> Example:
        (completion,) = self.file[number]
        (other,) = self.file[mismatched_number(self.file.runs, number, is_closed=self._is_closed)]
        prompt = prompt_of(completion)
        behind = other.tokens[other.loss_mask][: self.file.about.max_length - len(prompt)]
        return completion, sequence_of(prompt.tolist(), behind.tolist())


class PreferenceMethod(ExampleMethod):
    """Trains on pairs; with KTO on single completions that are good or bad."""

    @classmethod
    def open(cls, context: TuningContext) -> "PreferenceMethod":
        assert isinstance(context.recipe, PreferenceRecipe)
        is_kto = context.recipe.preference.objective == "kto"
        files = _opened(context, "judged answers" if is_kto else "pairs")
        train, held_out = (() if file is None else UnpairedExamples(file) if is_kto else file for file in files)
        return cls(context, train, held_out, *("" if file is None else file.checksum for file in files))

    def __init__(
        self,
        context: TuningContext,
        train: Sequence[Example],
        held_out: Sequence[Example],
        checksum: str,
        held_out_checksum: str = "",
    ) -> None:
        recipe = context.recipe
        assert isinstance(recipe, PreferenceRecipe)
        self.preference = recipe.preference
        examples, evaluated = ReferencedExamples(train), ReferencedExamples(held_out)
        super().__init__(context, examples, evaluated, checksum, preference_objective(recipe.preference))
        self._reference: ReferencePass | None = None
        if self.preference.has_reference:
            self._reference = ReferencePass(
                recipe.tuning.start,
                {"train": (examples, checksum), "held-out": (evaluated, held_out_checksum)},
                max_tokens=self.max_tokens,
                packing=self.packing,
            )

    def callbacks(self) -> list[Callback]:
        return [] if self._reference is None else [self._reference]

    @property
    def reference_tokens(self) -> int:
        if self._reference is None:
            return 0
        return sum(tokens_of(examples) for examples in (self.examples, self.held_out))

    def metered(self, loop: TrainingLoop) -> dict[str, float]:
        return {} if self._reference is None else self._reference.metered(loop)

    def scored(self, examples: Sequence[Example]) -> Sequence[Example]:
        """With KTO, the mismatched sequences."""
        return MappedExamples(examples, lambda pair: pair[1:]) if self.preference.objective == "kto" else ()

    def prepared(self, train_state: TrainState, examples: Sequence[Example]) -> Sequence[Example]:
        """With KTO, replace the mismatched sequences by the divergence that they show; a collective."""
        if self.preference.objective != "kto":
            return examples
        ratios: list[float] = []
        for (mismatched,), (found,) in self.scores(train_state, self.scored(examples)):
            terms = found.log_probabilities.astype("f8") - mismatched.values[REFERENCE]
            ratios.append(float(terms.mean() if self.preference.takes_means else terms.sum()))
        return with_kl_estimate(examples, ratios)

    def planned(self, examples: Sequence[Example]) -> Sequence[Example]:
        """Fill in zeros for the log-probabilities and the divergence, which are not known yet."""
        if not self.preference.has_reference:
            return examples
        referred = [with_stand_ins(example) for example in examples]
        return with_kl_estimate(referred, [0.0] * len(referred)) if self.preference.objective == "kto" else referred


class RewardModelMethod(ExampleMethod):
    """Trains a reward model on pairs."""

    @classmethod
    def open(cls, context: TuningContext) -> "RewardModelMethod":
        train, held_out = _opened(context, "pairs", n_after=1)
        examples, evaluated = (
            MappedExamples(each or (), lambda pair: tuple(map(rewarded, pair))) for each in (train, held_out)
        )
        return cls(context, examples, evaluated, train.checksum, RewardObjective())

    def callbacks(self) -> list[Callback]:
        return [CalibrationAtEnd(self)] if len(self.held_out) else []


class CalibrationAtEnd(Callback):
    """Writes calibration.json, and prints it, after the last step."""

    def __init__(self, method: ExampleMethod) -> None:
        self.method = method

    def on_end(self, loop: TrainingLoop) -> None:
        """Score the held-out pairs; a collective."""
        if loop.step < loop.recipe.training.steps:
            return
        with loop.train_state.averaged():
            scores = self.method.scores(loop.train_state, self.method.held_out)
            rewards = [[float(each.scalars[-1]) for each in pair if each.scalars is not None] for _, pair in scores]
        margins = [chosen - rejected for chosen, rejected in rewards]
        calibration = calibration_of(margins)
        if loop.ranks.is_rank_zero:
            loop.run.write_json("calibration.json", calibration)
            for line in calibration.lines():
                loop.on_message(line)


def _opened(context: TuningContext, kind: ExampleKind, *, n_after: int = 0) -> tuple[ExampleFile, ExampleFile | None]:
    """Open data.train and data.validation, with room for `n_after` tokens that are added later."""
    recipe = context.recipe
    default = type(recipe)().tuning
    # Settings of the loss that preferences do not read are refused rather than ignored.
    for name in ("learned", "normalisation"):
        value = getattr(recipe.tuning, name)
        if value != getattr(default, name):
            raise NapkinError(f"tuning.{name} is '{value}', and objectives of preferences do not read it: leave it out")
    max_length = recipe.tuning.max_length or recipe.model.context_length + 1 - n_after
    return open_examples(context, kind, max_length=max_length)
