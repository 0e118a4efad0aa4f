"""The objective that a recipe's [preference] names."""

from napkin.alignment.objective import Objective
from napkin.alignment.preferences.dpo import DPOObjective
from napkin.alignment.preferences.ipo import IPOObjective
from napkin.alignment.preferences.kto import KTOObjective
from napkin.alignment.preferences.orpo import ORPOObjective
from napkin.alignment.preferences.simpo import SimPOObjective
from napkin.recipe.preference_config import PreferenceConfig


def preference_objective(config: PreferenceConfig) -> Objective:
    """The objective with its settings."""
    beta, per_token = config.beta, config.takes_means
    match config.objective:
        case "dpo":
            return DPOObjective(beta, per_token, config.label_smoothing, config.supervised_weight)
        case "ipo":
            return IPOObjective(beta, per_token)
        case "kto":
            return KTOObjective(beta, per_token, config.desirable_weight, config.undesirable_weight)
        case "orpo":
            return ORPOObjective(beta, per_token)
        case "simpo":
            return SimPOObjective(beta, per_token, config.margin)
