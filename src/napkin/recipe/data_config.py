"""[data] of a recipe: the files that a run reads."""

from dataclasses import dataclass
from typing import Literal

from napkin.recipe.curriculum import refuse_impossible_mixture
from napkin.recipe.train_files import TrainFiles, refuse_impossible_files


@dataclass(frozen=True)
class DataConfig:
    """Files the run reads; paths are relative to the folder that `napkin` is started in."""

    train: TrainFiles = "data/train.tokens"
    """Token file to train on, as `napkin tokenizer encode` makes it; or several, sampled in proportion to their
    lengths; or several with weights, the proportions of the training windows: as a table in TOML, as FILE=WEIGHT on
    the command line."""

    validation: str | None = "data/validation.tokens"
    """Token file for evaluation only; None, or "" in a TOML file, disables evaluation."""

    tokenizer: str = "data/tokenizer.json"
    """The tokenizer that both were encoded with."""

    verify: bool = True
    """Whether the tokens are verified: each block of 512 KiB against its checksum, when a batch first reads it. Files
    with a single checksum, of an earlier napkin, are read whole before training: about a second per gigabyte."""

    separate_documents: bool = False
    """Whether documents that share a window are masked from each other, as if each stood alone; also in evaluations."""

    windows: Literal["auto", "shifted", "fixed"] = "auto"
    """Where the windows of an epoch begin: where those of the previous epoch ended, or always at the first token, so
    that the last tokens of a file are never targets. auto is shifted; a run that is older than this field stays
    fixed."""

    prefetch: Literal["auto", "on", "off"] = "auto"
    """Whether a thread prepares the next batch while the current one trains; the batches are the same. auto is on with
    a GPU, to which they are copied in the background, and off on a CPU, where all cores train."""

    temperature: float = 1.0
    """Of several files without weights: each is sampled in proportion to its length to the power of 1/temperature. 1 is
    in proportion, more samples short files more often."""

    max_epochs: float | None = None
    """How often a document may be read in the whole run: a file that would be read more often gets a smaller share, and
    the others get the rest. None does not limit it."""

    curriculum: tuple[str, ...] = ()
    """Weights that replace those of data.train from a step on, as "STEP FILE=WEIGHT FILE=WEIGHT", steps increasing; a
    file that is not named is left out from there."""

    def __post_init__(self) -> None:
        # TOML has no None, and leaving the field out means its default.
        if self.validation == "":
            object.__setattr__(self, "validation", None)
        refuse_impossible_files(self.train)
        refuse_impossible_mixture(self.train, self.temperature, self.max_epochs, self.curriculum)
