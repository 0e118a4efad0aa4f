"""Where a run goes on from: its newest checkpoint that is whole and that belongs to it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint, set_aside
from napkin.checkpoint.load import load_train_state, recipe_changes
from napkin.checkpoint.state import Checkpoint
from napkin.errors import CorruptFile, NapkinError
from napkin.train_step.step import TrainState


def restore_newest(
    folder: Path, train_state: TrainState, *, tokenizer: str, train_tokens: str, on_message: Callable[[str], None]
) -> Checkpoint | None:
    """Load the newest checkpoint that is whole into `train_state` and return it; None where there is none at all.

    Damaged ones before it are set aside and named in a message, as are changes of the recipe that leave the model as
    it is. Raises CorruptFile where all are damaged, NapkinError where model, tokenizer, tokens or the size of batches
    are not those that the checkpoint was trained with.
    """

    def load(checkpoint: Checkpoint) -> None:
        _refuse_other_text(checkpoint, tokenizer, train_tokens)
        _refuse_other_batches(checkpoint, train_state)
        load_train_state(checkpoint, train_state)

    checkpoint, damaged = load_newest(folder, load)
    if checkpoint is None:
        return None
    for bad, error in damaged.items():
        on_message(
            f"a damaged checkpoint, now '{set_aside(bad).name}', is skipped for '{checkpoint.path.name}': {error}"
        )
    _tell_changes(checkpoint, train_state, on_message)
    return checkpoint


def load_newest(folder: Path, load: Callable[[Checkpoint], None]) -> tuple[Checkpoint | None, dict[Path, CorruptFile]]:
    """Give `load` the newest checkpoint that is whole; return it, None where there is none at all, and the damaged
    ones that were passed over.

    `load` may find damage too. Raises the newest one's CorruptFile where all are damaged: to begin anew unasked would
    throw away work that a copy of these files may still bring back.
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


def _refuse_other_text(checkpoint: Checkpoint, tokenizer: str, train_tokens: str) -> None:
    for what, before, now in (
        ("tokenizer", checkpoint.state.tokenizer, tokenizer),
        ("training tokens", checkpoint.state.train_tokens, train_tokens),
    ):
        if now != before:
            raise NapkinError(
                f"the {what} are not those of '{checkpoint.path}': {before[:12]} before, {now[:12]} now: "
                "put the file back, or begin a new run with `napkin train`"
            )


def _refuse_other_batches(checkpoint: Checkpoint, train_state: TrainState) -> None:
    now = train_state.recipe.training.batch_size
    before = checkpoint.state.recipe.get("training", {}).get("batch_size", now)
    if now != before:
        # Which sequences a step has, and how many tokens were trained on, follows from its number.
        raise NapkinError(
            f"training.batch_size is {now}, and '{checkpoint.path}' was trained with {before}: put that back (where "
            "memory is short, lower micro_batch_size), or begin a new run with `napkin train`"
        )


def _tell_changes(checkpoint: Checkpoint, train_state: TrainState, on_message: Callable[[str], None]) -> None:
    recipe = dataclasses.asdict(train_state.recipe)
    # Files may lie elsewhere by now; that they are the same ones is checked by their content. Of the model only the
    # form of attention may be another.
    changes = recipe_changes(checkpoint, {table: recipe[table] for table in ("model", "optimizer", "training")})
    if changes:
        on_message(
            f"the recipe has changed since '{checkpoint.path.name}', from here on the run is another one than the "
            f"recipe alone would make: {', '.join(changes)}"
        )
