"""Resuming a run from its newest checkpoint that is intact and belongs to it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint, set_aside
from napkin.checkpoint.load import load_train_state, recipe_changes
from napkin.checkpoint.state import Checkpoint
from napkin.errors import CorruptFile, NapkinError
from napkin.train_step.step import TrainState


def restore_newest(
    folder: Path,
    train_state: TrainState,
    *,
    tokenizer: str,
    train_tokens: str,
    on_message: Callable[[str], None],
    load: Callable[[Checkpoint, TrainState], None] = load_train_state,
) -> Checkpoint | None:
    """Load the newest intact checkpoint into `train_state` and return it; None where there is no checkpoint.

    Newer ones that are damaged are set aside and named in a message; changes of the recipe that do not concern the
    model are named too. Raises CorruptFile where all are damaged, NapkinError where model, tokenizer, training tokens
    or batch size are not those that the checkpoint was trained with.
    """

    def load_fitting(checkpoint: Checkpoint) -> None:
        _refuse_other_tokens(checkpoint, tokenizer, train_tokens)
        _refuse_other_batches(checkpoint, train_state)
        load(checkpoint, train_state)

    checkpoint, damaged = load_newest(folder, load_fitting)
    if checkpoint is None:
        return None
    for bad, error in damaged.items():
        on_message(
            f"a damaged checkpoint, now '{set_aside(bad).name}', is skipped for '{checkpoint.path.name}': {error}"
        )
    _report_changes(checkpoint, train_state, on_message)
    return checkpoint


def load_newest(folder: Path, load: Callable[[Checkpoint], None]) -> tuple[Checkpoint | None, dict[Path, CorruptFile]]:
    """Call `load` with the newest intact checkpoint. Returns it, None where there is no checkpoint, and the damaged
    ones that were skipped.

    `load` may raise CorruptFile too. Where all are damaged, raises the CorruptFile of the newest: starting again from
    step 0 would discard work that a backup of these files may still restore.
    """
    damaged: dict[Path, CorruptFile] = {}
    for path in checkpoint_paths(folder):
        try:
            checkpoint = read_checkpoint(path)
            load(checkpoint)
        except CorruptFile as error:
            damaged[path] = error
        else:
            return checkpoint, damaged
    if damaged:
        raise next(iter(damaged.values()))
    return None, damaged


def _refuse_other_tokens(checkpoint: Checkpoint, tokenizer: str, train_tokens: str) -> None:
    for what, before, now in (
        ("tokenizer", checkpoint.state.tokenizer, tokenizer),
        ("training data", checkpoint.state.train_tokens, train_tokens),
    ):
        if now != before:
            raise NapkinError(
                f"the {what} is not that of '{checkpoint.path}': {before[:12]} before, {now[:12]} now: "
                "restore the file, or start a new run"
            )


def _refuse_other_batches(checkpoint: Checkpoint, train_state: TrainState) -> None:
    now = train_state.recipe.training.batch_size
    before = checkpoint.state.recipe.get("training", {}).get("batch_size", now)
    if now != before:
        # The sequences of a step, and the tokens trained on, follow from its number and the batch size.
        raise NapkinError(
            f"training.batch_size is {now}, but '{checkpoint.path}' was trained with {before}: change it back (if "
            "memory is short, lower micro_batch_size), or start a new run with `napkin train`"
        )
    # Before the field existed, all were fixed.
    windows = checkpoint.state.recipe.get("data", {}).get("windows", "fixed")
    if train_state.recipe.data.windows not in ("auto", windows):
        raise NapkinError(
            f"data.windows is \"{train_state.recipe.data.windows}\", but '{checkpoint.path}' was trained with "
            f'"{windows}": change it back, or start a new run with `napkin train`'
        )


def _report_changes(checkpoint: Checkpoint, train_state: TrainState, on_message: Callable[[str], None]) -> None:
    recipe = dataclasses.asdict(train_state.recipe)
    # [data] is left out: files may have moved, and their contents are checked. In [model] only the implementation of
    # attention may differ.
    changes = recipe_changes(
        checkpoint, {table: recipe[table] for table in ("model", "optimizer", "training", "parallelism")}
    )
    if changes:
        on_message(
            f"the recipe has changed since '{checkpoint.path.name}', so the run is no longer what its recipe alone "
            f"reproduces: {', '.join(changes)}"
        )
