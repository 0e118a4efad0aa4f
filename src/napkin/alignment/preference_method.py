"""Tuning on preferences: pairs or judged answers from files, an objective, and a reference's log-probabilities."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.method import TuningContext
from napkin.alignment.objective import REFERENCE
from napkin.alignment.pair_file import (
    checksum_of_units,
    judged_units,
    pair_units,
    read_judged_answers,
    read_pairs,
)
from napkin.alignment.preferences.calibration import calibration_of
from napkin.alignment.preferences.kto import with_kl_estimate
from napkin.alignment.preferences.registry import preference_objective
from napkin.alignment.preferences.reward_model import RewardObjective, rewarded
from napkin.alignment.reference_pass import ReferencePass
from napkin.alignment.reference_scores import ReferredUnits, with_stand_ins
from napkin.alignment.sequence_step import scores_of_units
from napkin.alignment.token_sequence import Unit, tokens_of
from napkin.alignment.unit_method import UnitMethod
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.recipe.tuning_recipe import PreferenceRecipe, TuningRecipe
from napkin.train_step.step import TrainState
from napkin.training.loop import Callback, TrainingLoop


def preference_method(context: TuningContext) -> "PreferenceMethod":
    """The method of a recipe with [preference]. Raises NapkinError where its data cannot be used."""
    assert isinstance(context.recipe, PreferenceRecipe)
    is_kto = context.recipe.preference.objective == "kto"
    return PreferenceMethod(context.recipe, *_files(context, is_kto=is_kto, n_after=0))


def reward_model_method(context: TuningContext) -> UnitMethod:
    """The method of a recipe of a reward model. Raises NapkinError where its data cannot be used."""
    train, held_out = (
        [tuple(rewarded(sequence) for sequence in unit) for unit in units]
        for units in _files(context, is_kto=False, n_after=1)
    )
    return RewardModelMethod(context.recipe, train, held_out, checksum_of_units(train), RewardObjective())


class PreferenceMethod(UnitMethod):
    """Learns from pairs; with KTO from single answers that are good or bad."""

    def __init__(self, recipe: PreferenceRecipe, train: Sequence[Unit], held_out: Sequence[Unit]) -> None:
        self.preference = recipe.preference
        self._referred = {
            name: (ReferredUnits(units), checksum_of_units(units))
            for name, units in (("train", train), ("held-out", held_out))
        }
        (units, checksum), (evaluated, _) = self._referred.values()
        super().__init__(recipe, units, evaluated, checksum, preference_objective(recipe.preference))
        self._reference: ReferencePass | None = None
        if self.preference.has_reference:
            self._reference = ReferencePass(
                recipe.tuning.start, self._referred, max_tokens=self.max_tokens, arrangement=self.arrangement
            )

    def callbacks(self) -> list[Callback]:
        """The reference's log-probabilities are there before the first step, for objectives that read them."""
        return [] if self._reference is None else [self._reference]

    @property
    def reference_tokens(self) -> int:
        """Of all units, if the objective has a reference."""
        if self._reference is None:
            return 0
        return sum(tokens_of(units) for units in (self.units, self.held_out))

    def metered(self, loop: TrainingLoop) -> dict[str, float]:
        """The reference's pass, if this process has made all of it."""
        return {} if self._reference is None else self._reference.metered(loop)

    def scored(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """The mismatched answers, with KTO."""
        return [(mismatched,) for _, mismatched in units] if self.preference.objective == "kto" else ()

    def prepared(self, train_state: TrainState, units: Sequence[Unit]) -> Sequence[Unit]:
        """With KTO, the answers alone, which know the divergence that the mismatched answers of the batch show."""
        if self.preference.objective != "kto":
            return units
        scores = scores_of_units(
            train_state.parallel_model,
            self.scored(units),
            max_tokens=self.max_tokens,
            arrangement=self.arrangement,
            autocast=train_state.precision.autocast,
        )
        ratios = []
        for (_, mismatched), (found,) in zip(units, scores, strict=True):
            terms = found.log_probabilities.astype("f8") - mismatched.values[REFERENCE]
            ratios.append(float(terms.mean() if self.preference.takes_means else terms.sum()))
        return with_kl_estimate(units, ratios)

    def planned(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """With zeros for the log-probabilities and the divergence that are not known yet."""
        if not self.preference.has_reference:
            return units
        referred = [with_stand_ins(unit) for unit in units]
        return with_kl_estimate(referred, [0.0] * len(referred)) if self.preference.objective == "kto" else referred


class RewardModelMethod(UnitMethod):
    """Learns which of two answers is better."""

    def callbacks(self) -> list[Callback]:
        """At the end it is told how far the probabilities can be taken at their word."""
        return [CalibrationAtEnd(self)] if len(self.held_out) else []


class CalibrationAtEnd(Callback):
    """Writes calibration.json, and tells it, after the last step."""

    def __init__(self, method: UnitMethod) -> None:
        self.method = method

    def on_end(self, loop: TrainingLoop) -> None:
        """Of the held-out pairs; a collective."""
        if loop.step < loop.recipe.training.steps:
            return
        state, method = loop.train_state, self.method
        with state.averaged():
            scores = scores_of_units(
                state.parallel_model,
                method.held_out,
                max_tokens=method.max_tokens,
                arrangement=method.arrangement,
                autocast=state.precision.autocast,
            )
        rewards = [[float(each.scalars[-1]) for each in pair if each.scalars is not None] for pair in scores]
        found = calibration_of([chosen - rejected for chosen, rejected in rewards])
        if loop.ranks.is_rank_zero:
            loop.run.write_json("calibration.json", found)
            for line in found.lines():
                loop.on_message(line)


def _files(context: TuningContext, *, is_kto: bool, n_after: int) -> tuple[list[Unit], list[Unit]]:
    """The units of data.train and of data.validation, to which `n_after` tokens are added later; what is left out is
    told."""
    recipe = context.recipe
    _refuse_unread(recipe)
    read: Callable[[StrPath, LeftOut], Iterable[Any]] = read_judged_answers if is_kto else read_pairs
    make: Callable[..., list[Unit]] = judged_units if is_kto else pair_units
    max_length = recipe.tuning.max_length or recipe.model.context_length + 1 - n_after
    found: list[list[Unit]] = []
    for path in (recipe.data.train, recipe.data.validation):
        if not isinstance(path, str) and path is not None:
            raise NapkinError("data.train names several files, and tuning reads one: join them")
        if not path:
            found.append([])
            continue
        left_out = LeftOut()
        context.progress(f"reading '{path}'")
        units = make(read(path, left_out), context.encoder, max_length, left_out)
        what = "judged answers" if is_kto else "pairs"
        if not units:
            raise NapkinError(
                f"'{path}' holds no {what} to learn from{f': {left_out.describe()}' if left_out.n else ''}"
            )
        if left_out.n and context.ranks.is_rank_zero:
            context.on_message(f"'{path}' holds {len(units):,} {what}; left out: {left_out.describe()}")
        found.append(units)
    if not found[0]:
        raise NapkinError("no file to learn from is named: use --data.train with a JSONL file of pairs")
    return found[0], found[1]


def _refuse_unread(recipe: TuningRecipe) -> None:
    """Refuse settings of the loss that preferences do not read, rather than ignore them."""
    default = type(recipe)().tuning
    for name in ("learned", "normalisation"):
        value = getattr(recipe.tuning, name)
        if value != getattr(default, name):
            raise NapkinError(f"tuning.{name} is '{value}', and objectives of preferences do not read it: leave it out")
