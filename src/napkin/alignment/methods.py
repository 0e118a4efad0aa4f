"""The ways of tuning by their names in recipes."""

import importlib

from napkin.alignment.method import Method, TuningContext
from napkin.recipe.tuning_config import TuningMethod

METHODS: dict[TuningMethod, str] = {
    "sft": "supervised_method:supervised_method",
    "rl": "reinforcement_method:reinforcement_method",
    "preference": "preference_method:preference_method",
    "reward-model": "preference_method:reward_model_method",
}
"""By name, the module of napkin.alignment and the function that makes the method of a context."""


def make_method(context: TuningContext) -> Method:
    """The method of a recipe. Raises NapkinError where its data cannot be used."""
    module, _, function = METHODS[context.recipe.tuning.method].partition(":")
    return getattr(importlib.import_module(f"napkin.alignment.{module}"), function)(context)
