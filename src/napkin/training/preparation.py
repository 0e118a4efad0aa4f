"""Preparing a run: its files are opened and verified, its recipe is resolved, its step is planned."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from napkin.data.batches import Batches
from napkin.data.mixing import TokenMixture
from napkin.data.prefetch import open_fetcher
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.model.transformer import Transformer
from napkin.planning.planner import Planner, plan_resolved, resolve, with_text, with_vocab_size
from napkin.planning.step.machine import ThisMachine
from napkin.planning.step.run_plan import Plan
from napkin.recipe.mixture import open_mixture
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

Progress = Callable[[str], None]


@runtime_checkable
class Prepared(Protocol):
    """What the training loop needs of any kind of training."""

    @property
    def resolved(self) -> ResolvedRecipe:
        """The recipe, resolved for this machine."""
        ...

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        ...

    @property
    def precision(self) -> Precision:
        """The number formats of the training."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the texts."""
        ...

    @property
    def plan(self) -> Plan | None:
        """Made by rank 0; other ranks have none."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The processes that train the run."""
        ...

    @property
    def data_checksum(self) -> str:
        """What a checkpoint remembers of the training data."""
        ...

    @property
    def token_files(self) -> list[TokenFile | TokenMixture]:
        """Files that are mapped while the run trains."""
        ...

    def open_fetcher(self) -> "Fetcher":
        """The batches of this rank by step, on the training device."""
        ...

    def initialize(self, model: Transformer) -> None:
        """Set the weights of a new run, where they are not drawn from its seed."""


@runtime_checkable
class Fetcher(Protocol):
    """Batches by step."""

    def __getitem__(self, index: int) -> Any:
        """Batch `index`."""
        ...

    def close(self) -> None:
        """Drop what is prepared."""


@dataclass(frozen=True)
class Preparation:
    """Everything that a run of pre-training needs, opened and verified; the model is not allocated yet."""

    resolved: ResolvedRecipe
    tokenizer: Tokenizer
    train_tokens: TokenMixture
    validation_tokens: TokenFile | None
    plan: Plan | None
    """Made by rank 0; the other ranks have none."""
    ranks: Ranks = ALONE
    """The processes that train the run."""

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe: every default that depends on this machine or these files is written out."""
        return self.resolved.recipe

    @property
    def precision(self) -> Precision:
        """The number formats of the training."""
        return self.resolved.precision

    def with_recipe(self, recipe: Recipe) -> "Preparation":
        """The same with another recipe, which must be resolved too."""
        return dataclasses.replace(self, resolved=dataclasses.replace(self.resolved, recipe=recipe))

    @property
    def batches(self) -> Batches:
        """The training batches in order; of each, this rank's rows."""
        rows = self.resolved.layout.rows(self.ranks.info.rank, self.recipe.training.batch_size)
        return _batches(self.recipe, self.train_tokens, rows)

    @property
    def data_checksum(self) -> str:
        """SHA-256 of the training tokens."""
        return self.train_tokens.sha256

    @property
    def token_files(self) -> list[TokenFile | TokenMixture]:
        """The training tokens, and the validation tokens if there are any."""
        files = (self.train_tokens, self.validation_tokens)
        return [tokens for tokens in files if tokens is not None]

    def open_fetcher(self) -> Fetcher:
        """The training batches on the device, prefetched if the recipe says so."""
        return open_fetcher(self.batches, self.precision.device_type, self.recipe.data.prefetch)

    def initialize(self, model: Transformer) -> None:
        """Nothing: the weights of a new model are a function of training.init_seed."""


def prepare(
    recipe: Recipe,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress = lambda doing: None,
    ranks: Ranks = ALONE,
    planner: Planner = plan_resolved,
) -> Preparation:
    """Open what the recipe names, check that it fits together, and plan the run on this machine.

    `tokenizer` replaces the file that the recipe names: a run keeps its own copy. `progress` is called with a
    description of each stage. `planner` plans the step; a `SharedPlans` counts those of several runs that are alike
    once. Raises NapkinError for files that are missing, damaged or do not belong together.
    """
    recipe.tracking.refuse_missing()
    tokenizer = tokenizer or _open_tokenizer(recipe.data.tokenizer)
    progress("checking the token files")
    train_tokens, validation_tokens = open_token_files(recipe, tokenizer)
    machine = ThisMachine(ranks, device=recipe.training.device)
    resolved = resolve(with_vocab_size(with_windows_written_out(recipe), tokenizer.vocab_size), machine)
    # Raises NapkinError for a text shorter than one window, before anything is measured or counted.
    _batches(resolved.recipe, train_tokens)
    plan = with_text(planner(resolved, machine, progress=progress), train_tokens)
    return Preparation(plan.resolved, tokenizer, train_tokens, validation_tokens, plan, ranks)


def prepare_unplanned(
    recipe: Recipe, tokenizer: Tokenizer, ranks: Ranks, *, micro_batch_size: int | None
) -> Preparation:
    """The same on a rank other than 0: rank 0 has resolved the recipe and verified its files.

    `micro_batch_size` is that of rank 0's resolved recipe: resolved from each rank's own free memory, "auto" could
    differ between ranks.
    """
    train_tokens, validation_tokens = open_token_files(recipe, tokenizer, verify_whole=False)
    training = dataclasses.replace(recipe.training, micro_batch_size=micro_batch_size)
    recipe = with_windows_written_out(dataclasses.replace(recipe, training=training))
    resolved = resolve(recipe, ThisMachine(ranks, device=recipe.training.device))
    return Preparation(resolved, tokenizer, train_tokens, validation_tokens, None, ranks)


def open_token_files(
    recipe: Recipe, tokenizer: Tokenizer, *, verify_whole: bool = True
) -> tuple[TokenMixture, TokenFile | None]:
    """The training tokens and, where the recipe names any, the validation tokens.

    With data.verify their blocks are verified when they are read. Files without checksums of blocks are verified whole,
    unless `verify_whole` is False: another rank has done that.
    """

    def opened(path: str, way_out: str) -> TokenFile:
        token_file = _open_tokens(path, tokenizer, way_out)
        if recipe.data.verify and token_file.verify_on_read():
            # Verifies the first block: a small file is refused before anything is planned or made.
            token_file.stretch(0, 1)
        elif recipe.data.verify and verify_whole:
            token_file.verify()
        return token_file

    training = open_mixture(recipe, lambda path: opened(path, "or name yours with --data.train"))
    if recipe.data.validation is None:
        return training, None
    way_out = "name yours with --data.validation, or do without: --data.validation None"
    return training, opened(recipe.data.validation, way_out)


def with_windows_written_out(recipe: Recipe) -> Recipe:
    """The recipe of a new run, with data.windows "auto" replaced by what it stands for."""
    if recipe.data.windows != "auto":
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, windows="shifted"))


def _open_tokenizer(path: str) -> Tokenizer:
    if not Path(path).is_file():
        raise NapkinError(
            f"there is no tokenizer file '{path}': make one with `napkin tokenizer train TEXT`, "
            "or name yours with --data.tokenizer"
        )
    return load_tokenizer(path)


def _open_tokens(path: str, tokenizer: Tokenizer, way_out: str) -> TokenFile:
    if not Path(path).is_file():
        raise NapkinError(f"there is no token file '{path}': make it with `napkin tokenizer encode TEXT`, {way_out}")
    token_file = TokenFile.open(path, tokenizer_fingerprint=tokenizer.fingerprint)
    token_file.refuse_other_vocabulary(tokenizer)
    return token_file


def _batches(recipe: Recipe, train_tokens: TokenMixture, rows: slice = slice(None)) -> Batches:
    return Batches(
        train_tokens,
        context_length=recipe.model.context_length,
        batch_size=recipe.training.batch_size,
        seed=recipe.training.data_seed,
        rows=rows,
        separate_documents=recipe.data.separate_documents,
        windows="fixed" if recipe.data.windows == "fixed" else "shifted",
    )
