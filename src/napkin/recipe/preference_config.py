"""[preference] of a recipe: how a model learns from pairs of answers."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError

PreferenceObjective = Literal["dpo", "ipo", "kto", "orpo", "simpo"]


@dataclass(frozen=True)
class PreferenceConfig:
    """How a model learns from pairs of answers."""

    objective: PreferenceObjective = "dpo"
    """dpo (Rafailov et al. 2023), ipo (Azar et al. 2023), kto (Ethayarajh et al. 2024), orpo (Hong et al. 2024) or
    simpo (Meng et al. 2024). orpo and simpo need no reference."""

    beta: float = 0.1
    """How much a difference in log-probability counts; for simpo 2.0 is usual, for orpo it is the weight of the odds
    ratio."""

    margin: float = 0.0
    """simpo: by how much the chosen answer should win."""

    label_smoothing: float = 0.0
    """dpo: the probability that a pair is the wrong way round (Mitchell 2023)."""

    supervised_weight: float = 0.0
    """Weight of the chosen answer's negative log-likelihood that is added to the loss, for dpo."""

    desirable_weight: float = 1.0
    """kto: weight of good answers."""

    undesirable_weight: float = 1.0
    """kto: weight of bad answers."""

    per_token: bool = False
    """Whether an answer's log-probability is the mean over its tokens instead of the sum, so that long answers do not
    count more; ipo, orpo and simpo always take means."""

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1e4:
            raise NapkinError(f"preference.beta is {self.beta}: use a number above 0, at most 1e4")
        if not 0 <= self.label_smoothing < 0.5:
            raise NapkinError(f"preference.label_smoothing is {self.label_smoothing}: use 0 up to, not including, 0.5")
        for name in ("margin", "supervised_weight", "desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) <= 1e4:
                raise NapkinError(f"preference.{name} is {getattr(self, name)}: use 0 to 1e4")
        for name, objective in _ONLY_OF.items():
            default = self.__dataclass_fields__[name].default
            if getattr(self, name) != default and self.objective != objective:
                raise NapkinError(
                    f"preference.{name} is {getattr(self, name)}, and {self.objective} does not read it: leave it at "
                    f"{default}, or use the objective {objective}"
                )

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares with the model that tuning starts from."""
        return self.objective in ("dpo", "ipo", "kto")

    @property
    def takes_means(self) -> bool:
        """Whether an answer's log-probability is the mean over its tokens."""
        return self.per_token or self.objective in ("ipo", "orpo", "simpo")


_ONLY_OF: dict[str, PreferenceObjective] = {
    "margin": "simpo",
    "label_smoothing": "dpo",
    "supervised_weight": "dpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
}
