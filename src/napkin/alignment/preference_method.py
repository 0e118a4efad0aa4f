"""Tuning on preferences: pairs or judged answers from files, an objective, and a reference's log-probabilities."""

from collections.abc import Sequence

from napkin.alignment.judged_units import JudgedUnits
from napkin.alignment.lazy_units import MappedUnits, chunks_of, tokens_of
from napkin.alignment.method import TuningContext
from napkin.alignment.objective import REFERENCE
from napkin.alignment.preferences.calibration import calibration_of
from napkin.alignment.preferences.kto import with_kl_estimate
from napkin.alignment.preferences.registry import preference_objective
from napkin.alignment.preferences.reward_model import RewardObjective, rewarded
from napkin.alignment.reference_pass import ReferencePass
from napkin.alignment.reference_scores import ReferredUnits, with_stand_ins
from napkin.alignment.sequence_step import scores_of_units
from napkin.alignment.token_sequence import Unit
from napkin.alignment.tuning_files import opened_units
from napkin.alignment.unit_file import UnitFile, UnitKind
from napkin.alignment.unit_method import UnitMethod
from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PreferenceRecipe, TuningRecipe
from napkin.train_step.step import TrainState
from napkin.training.loop import Callback, TrainingLoop


def preference_method(context: TuningContext) -> "PreferenceMethod":
    """The method of a recipe with [preference]. Raises NapkinError where its data cannot be used."""
    assert isinstance(context.recipe, PreferenceRecipe)
    if context.recipe.preference.objective != "kto":
        train, held_out = _opened(context, "pairs", n_after=0)
        return PreferenceMethod(context.recipe, train, held_out or (), train.checksum, _checksum(held_out))
    train, held_out = _opened(context, "judged answers", n_after=0)
    evaluated = () if held_out is None else JudgedUnits(held_out)
    return PreferenceMethod(context.recipe, JudgedUnits(train), evaluated, train.checksum, _checksum(held_out))


def reward_model_method(context: TuningContext) -> UnitMethod:
    """The method of a recipe of a reward model. Raises NapkinError where its data cannot be used."""
    train, held_out = _opened(context, "pairs", n_after=1)
    units, evaluated = (MappedUnits(each or (), _rewarded) for each in (train, held_out))
    return RewardModelMethod(context.recipe, units, evaluated, train.checksum, RewardObjective())


class PreferenceMethod(UnitMethod):
    """Learns from pairs; with KTO from single answers that are good or bad.

    Args:
        recipe: resolved.
        train: the units to learn from.
        held_out: those to evaluate on.
        checksum: of the first.
        held_out_checksum: of the second.
    """

    def __init__(
        self,
        recipe: PreferenceRecipe,
        train: Sequence[Unit],
        held_out: Sequence[Unit],
        checksum: str,
        held_out_checksum: str = "",
    ) -> None:
        self.preference = recipe.preference
        units, evaluated = ReferredUnits(train), ReferredUnits(held_out)
        super().__init__(recipe, units, evaluated, checksum, preference_objective(recipe.preference))
        self._reference: ReferencePass | None = None
        if self.preference.has_reference:
            self._reference = ReferencePass(
                recipe.tuning.start,
                {"train": (units, checksum), "held-out": (evaluated, held_out_checksum)},
                max_tokens=self.max_tokens,
                arrangement=self.arrangement,
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
        ratios: list[float] = []
        for chunk in chunks_of(units):
            scores = scores_of_units(
                train_state.parallel_model,
                self.scored(chunk),
                max_tokens=self.max_tokens,
                arrangement=self.arrangement,
                autocast=train_state.precision.autocast,
            )
            for (_, mismatched), (found,) in zip(chunk, scores, strict=True):
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
            margins: list[float] = []
            for chunk in chunks_of(method.held_out):
                scores = scores_of_units(
                    state.parallel_model,
                    chunk,
                    max_tokens=method.max_tokens,
                    arrangement=method.arrangement,
                    autocast=state.precision.autocast,
                )
                rewards = [[float(each.scalars[-1]) for each in pair if each.scalars is not None] for pair in scores]
                margins += [chosen - rejected for chosen, rejected in rewards]
        found = calibration_of(margins)
        if loop.ranks.is_rank_zero:
            loop.run.write_json("calibration.json", found)
            for line in found.lines():
                loop.on_message(line)


def _opened(context: TuningContext, kind: UnitKind, *, n_after: int) -> tuple[UnitFile, UnitFile | None]:
    """The units of data.train and of data.validation, to which `n_after` tokens are added later."""
    recipe = context.recipe
    _refuse_unread(recipe)
    max_length = recipe.tuning.max_length or recipe.model.context_length + 1 - n_after
    return opened_units(context, kind, max_length=max_length)


def _checksum(file: UnitFile | None) -> str:
    return "" if file is None else file.checksum


def _rewarded(unit: Unit) -> Unit:
    return tuple(map(rewarded, unit))


def _refuse_unread(recipe: TuningRecipe) -> None:
    """Refuse settings of the loss that preferences do not read, rather than ignore them."""
    default = type(recipe)().tuning
    for name in ("learned", "normalisation"):
        value = getattr(recipe.tuning, name)
        if value != getattr(default, name):
            raise NapkinError(f"tuning.{name} is '{value}', and objectives of preferences do not read it: leave it out")
