"""What the training loop needs of any kind of training: files are opened and verified, no model is allocated yet."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.model.transformer import Transformer
from napkin.planning.step.run_plan import Plan
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.tokenizer.base import Tokenizer


@dataclass(eq=False)
class Preparation(ABC):
    """A run that is ready to be trained; `napkin.training.method` adds how its steps are taken."""

    resolved: ResolvedRecipe
    """The recipe with every default written out that depends on this machine or on files."""
    tokenizer: Tokenizer
    ranks: Ranks = field(default=ALONE, kw_only=True)
    plan: Plan | None = field(default=None, kw_only=True)
    """Made by rank 0; the other ranks have none."""

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def precision(self) -> Precision:
        return self.resolved.precision

    @property
    @abstractmethod
    def data_checksum(self) -> str:
        """The checksum of the training data, which a checkpoint remembers."""

    @property
    def token_files(self) -> list[TokenFile | TokenMixture]:
        """The files that are mapped while the run trains."""
        return []

    def initialize(self, model: Transformer) -> None:  # noqa: B027
        """Set the weights of a new run, where they are not drawn from training.init_seed."""
