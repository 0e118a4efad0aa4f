"""[data] of a recipe: the files that a run reads."""

from dataclasses import dataclass
from typing import Literal

from napkin.recipe.train_files import TrainFiles, refuse_impossible_files


@dataclass(frozen=True)
class DataConfig:
    """Files the run reads; paths are relative to the folder that `napkin` is started in."""

    train: TrainFiles = "data/train.tokens"
    """Token file to train on, as `napkin tokenizer encode` makes it; or several, each as often as it is long; or
    several with weights, shares of the training windows: as a table in TOML, as FILE=WEIGHT on the command line."""

    validation: str | None = "data/validation.tokens"
    """Token file that is only evaluated on; None, or "" in a TOML file, is no evaluation."""

    tokenizer: str = "data/tokenizer.json"
    """The tokenizer that made both."""

    verify: bool = True
    """Whether the checksums of the token files are checked before training; about a second a gigabyte."""

    separate_documents: bool = False
    """Whether each document in a window sees itself alone, as if it stood at the beginning; also in evaluations."""

    prefetch: Literal["auto", "on", "off"] = "auto"
    """Whether a thread prepares the next batch while this one trains: the same batches. auto is on with a GPU, to which
    they are copied meanwhile, and off on a CPU, whose cores all train."""

    def __post_init__(self) -> None:
        # TOML has no None, and leaving the field out means its default.
        if self.validation == "":
            object.__setattr__(self, "validation", None)
        refuse_impossible_files(self.train)
