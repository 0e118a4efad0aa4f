"""Which algorithm is made of which parts."""

from dataclasses import dataclass, replace
from typing import Literal

from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig
from napkin.tuning.objective import Normalisation


@dataclass(frozen=True)
class PolicyParts:
    """The parts of an algorithm; see `ReinforcementConfig` for what each means."""

    advantage: Literal["group", "group mean", "leave one out", "batch", "none", "gae"]
    ratio: Literal["token", "sequence", "none"]
    clip: Literal["ppo", "cispo", "none"]
    normalisation: Normalisation
    clip_low: float = 0.2
    clip_high: float = 0.2
    drop_equal_groups: bool = False
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    only_rewarded: bool = False
    """Whether only answers with a reward above 0 are learned, all alike."""


PRESETS: dict[PolicyAlgorithm, PolicyParts] = {
    # Anthony et al. 2017; for language models Zelikman et al. 2022 (STaR): fine-tuning on the right answers.
    "expert-iteration": PolicyParts("none", "none", "none", "token", only_rewarded=True),
    # Williams 1992. A sum over tokens and a mean over answers is the expected reward's gradient, so a constant divides.
    "reinforce": PolicyParts("batch", "none", "none", "constant"),
    # Kool et al. 2019; Ahmadian et al. 2024.
    "rloo": PolicyParts("leave one out", "none", "none", "constant"),
    # Schulman et al. 2017, equation 7 and table 1.
    "ppo": PolicyParts("gae", "token", "ppo", "token"),
    # Shao et al. 2024, equation 3; the clip range is PPO's.
    "grpo": PolicyParts("group", "token", "ppo", "sequence"),
    # Liu et al. 2025, section 3.2: GRPO without the divisions by standard deviation and length.
    "dr-grpo": PolicyParts("group mean", "token", "ppo", "constant"),
    # Yu et al. 2025, sections 3.1 to 3.4 and 4.1.
    "dapo": PolicyParts("group", "token", "ppo", "token", 0.2, 0.28, drop_equal_groups=True, overlong="penalty"),
    # MiniMax 2025, equations 4 and 5: no lower bound. The upper one, a ratio of 5, is of Khatri et al. 2025 (ScaleRL).
    "cispo": PolicyParts("group", "token", "cispo", "token", 1.0, 4.0),
    # Zheng et al. 2025, equations 5 to 7 and section 5.1.
    "gspo": PolicyParts("group", "sequence", "ppo", "sequence", 3e-4, 4e-4),
}


def parts_of(config: ReinforcementConfig) -> PolicyParts:
    """The parts of a recipe's algorithm: those that the recipe names, and the preset's for the others.

    Raises NapkinError for parts that contradict each other.
    """
    preset = PRESETS[config.algorithm]
    chosen = {
        name: getattr(config, name)
        for name in ("advantage", "ratio", "clip", "normalisation", "clip_low", "clip_high", "drop_equal_groups")
        if getattr(config, name) not in ("auto", None)
    }
    if config.overlong != "auto":
        chosen["overlong"] = config.overlong
    if config.ratio == "none" and config.clip == "auto":
        chosen["clip"] = "none"
    parts = replace(preset, **chosen)
    _check(config, parts)
    return parts


def _check(config: ReinforcementConfig, parts: PolicyParts) -> None:
    if parts.ratio == "none" and parts.clip != "none":
        raise NapkinError(f"rl.clip is '{parts.clip}', and without a ratio there is nothing to clip: set rl.ratio")
    if (parts.advantage == "gae") != (config.algorithm == "ppo"):
        raise NapkinError(
            f"rl.advantage is '{parts.advantage}' and rl.algorithm '{config.algorithm}': gae reads the value head, "
            "which only ppo has, and ppo trains it for nothing else: leave rl.advantage at auto"
        )
    if parts.only_rewarded and parts.advantage != "none":
        raise NapkinError(
            f"rl.advantage is '{parts.advantage}', and expert-iteration learns all answers with rewards alike: leave "
            "it at auto, or use rl.algorithm reinforce"
        )
    if config.group_size == 1 and parts.advantage in ("group", "group mean", "leave one out"):
        raise NapkinError(
            f"rl.group_size is 1, and rl.advantage '{parts.advantage}' compares the answers of a group: use 2 or more, "
            "or rl.advantage batch"
        )
    if parts.clip_low >= 1 and parts.clip == "ppo":
        raise NapkinError(f"rl.clip_low is {parts.clip_low}, and no ratio is below 0: use a number below 1")
