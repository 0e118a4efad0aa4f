"""Recipes of tuning: a recipe whose model starts from another, with a table of its method.

data.train and data.validation name files of conversations or pairs; reinforcement learning reads none.
training.batch_size counts conversations, pairs or prompts. [model] is that of tuning.start.
"""

from dataclasses import dataclass, field
from typing import TypeVar

from napkin.recipe.adapter_config import AdapterConfig
from napkin.recipe.data_config import DataConfig
from napkin.recipe.optimizer_config import OptimizerConfig
from napkin.recipe.preference_config import PreferenceConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.reinforcement_config import ReinforcementConfig
from napkin.recipe.tuning_config import TuningConfig, TuningMethod


def _optimizer() -> OptimizerConfig:
    # Steps that are small beside those of pre-training: what the model knows is kept.
    return OptimizerConfig(learning_rate=1e-5, weight_decay=0.0, schedule="linear")


def _data() -> DataConfig:
    return DataConfig(train="", validation=None, tokenizer="")


@dataclass(frozen=True)
class TuningRecipe(Recipe):
    """Everything that is chosen for tuning a model."""

    data: DataConfig = field(default_factory=_data)
    optimizer: OptimizerConfig = field(default_factory=_optimizer)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


@dataclass(frozen=True)
class PreferenceRecipe(TuningRecipe):
    """Tuning on pairs of answers."""

    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="preference"))
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass(frozen=True)
class RewardModelRecipe(TuningRecipe):
    """A model of which of two answers is better."""

    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="reward-model"))


@dataclass(frozen=True)
class ReinforcementRecipe(TuningRecipe):
    """Tuning on rewards of the model's own answers."""

    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="rl"))
    rl: ReinforcementConfig = field(default_factory=ReinforcementConfig)


RECIPE_OF: dict[TuningMethod, type[TuningRecipe]] = {
    "sft": TuningRecipe,
    "preference": PreferenceRecipe,
    "reward-model": RewardModelRecipe,
    "rl": ReinforcementRecipe,
}
AnyTuningRecipe = TypeVar("AnyTuningRecipe", bound=TuningRecipe)
