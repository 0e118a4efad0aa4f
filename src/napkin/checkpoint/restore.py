"""Loading checkpoints: the newest intact one of a run into its train state, or the weights of one into a model.

`load_plain_model` gives a tuned run's model as any run's: adapters are merged, a scalar head is left out.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint, set_aside
from napkin.checkpoint.shard_files import copy_files_into, formats_of, frozen_path, read_sums, tensor_files
from napkin.checkpoint.state import Checkpoint, frozen_tensors, model_tensors, optimizer_tensors, whole
from napkin.errors import CorruptFile, NapkinError
from napkin.model.transformer import Transformer
from napkin.optim.clipping import LossScale
from napkin.optim.tensor_parts import Parts
from napkin.recipe.recipe import Recipe
from napkin.train_step.step import TrainState, add_tuned_parts, has_tuned_parts, remove_tuned_parts


def load_model(checkpoint: Checkpoint, model: Transformer) -> None:
    """Copy a checkpoint's weights into `model`.

    Raises NapkinError where the config of `model` is not that of the trained one, even if the weights would fit;
    CorruptFile where they do not. `model` is unchanged then.
    """
    _refuse_other_model(checkpoint, model)
    _copy_weights(checkpoint, whole(model_tensors(model)), model)


def load_averaged_model(checkpoint: Checkpoint, model: Transformer) -> None:
    """Copy a checkpoint's averaged weights into `model`, or its weights where it has no average.

    Raises as `load_model` does.
    """
    if not keeps_average(checkpoint):
        load_model(checkpoint, model)
        return
    _refuse_other_model(checkpoint, model)
    frozen = frozen_tensors(model)
    if frozen:
        load_model(checkpoint, model)
    targets = {f"average.{name}": tensor for name, tensor in model_tensors(model).items() if name not in frozen}
    stored_as = dict.fromkeys(targets, torch.float32)
    copy_files_into(whole(targets), _files(checkpoint, "optimizer"), stored_as=stored_as, among_others=True)


def load_train_state(checkpoint: Checkpoint, train_state: TrainState) -> None:
    """Copy what this rank has of a checkpoint's weights and optimizer state into `train_state`, which then continues as
    if never stopped.

    If the checkpoint has no average of the weights, a new one starts with its weights. Raises as `load_model` does;
    after CorruptFile, `train_state` is incomplete until another checkpoint is loaded.
    """
    model = train_state.parallel_model
    _refuse_other_model(checkpoint, train_state.model)
    targets = model.parts(model_tensors(train_state.model))
    _copy_weights(checkpoint, targets, train_state.model, among_others=model.layout.pipeline > 1)
    state = checkpoint.state
    updates = state.step - state.history.skipped if state.history.updates is None else state.history.updates
    # Copied into tensors that torch has allocated: those of a mapped file have another alignment, with which vectorised
    # code sums in another order. Which tensors are stored depends on the checkpoint's precision, not on the current
    # one.
    extra = {"loss_scale": LossScale().to_tensor()} if _precision_of(checkpoint) == "fp16" else {}
    has_average = keeps_average(checkpoint)
    copy_files_into(
        model.parts(optimizer_tensors(train_state, average=has_average) | extra),
        _files(checkpoint, "optimizer"),
        # Other ranks may have the state of other parameters.
        among_others=(has_average and not train_state.average) or model.layout.divides_names,
    )
    train_state.restore(updates, extra, with_average=has_average)


def keeps_average(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint holds an average of the weights besides them."""
    return bool(checkpoint.state.recipe.get("optimizer", {}).get("average_decay"))


def recipe_changes(checkpoint: Checkpoint, recipe: dict[str, dict[str, Any]]) -> list[str]:
    """The differences between a checkpoint's recipe and tables of another, as 'model.n_heads is 4, was 2'."""
    changes: list[str] = []
    defaults = dataclasses.asdict(Recipe())
    # Before the option existed, nothing was compiled.
    defaults["training"]["compile"] = "off"
    for table, values in recipe.items():
        # A field that was added later had its default before.
        trained = defaults.get(table, {}) | checkpoint.state.recipe.get(table, {})
        for name in dict.fromkeys((*values, *trained)):
            now, before = values.get(name), trained.get(name)
            if now != before:
                changes.append(f"{table}.{name} is {now}, was {before}")
    return changes


def _refuse_other_model(checkpoint: Checkpoint, model: Transformer) -> None:
    config = dataclasses.asdict(model.config)
    # All implementations of attention compute the same model.
    config["attention"] = checkpoint.state.recipe.get("model", {}).get("attention", Recipe().model.attention)
    changes = recipe_changes(checkpoint, {"model": config})
    if changes:
        raise NapkinError(
            f"the recipe is not the one that '{checkpoint.path}' was trained with: {', '.join(changes)}: "
            "change it back, or start a new run with `napkin train`"
        )


def _copy_weights(checkpoint: Checkpoint, targets: Parts, model: Transformer, *, among_others: bool = False) -> None:
    """Trained weights are stored in the format that the checkpoint's precision has, not in that of the targets; frozen
    weights in those that they were written in, once."""
    stored_as = dict.fromkeys(targets, _stored_format(checkpoint))
    files, frozen = _files(checkpoint, "model"), frozen_tensors(model)
    if frozen and checkpoint.frozen is None:
        raise NapkinError(
            f"'{checkpoint.path}' holds the weights that its adapters were trained beside, as an earlier napkin wrote "
            "it: train the adapters again"
        )
    if frozen:
        path = frozen_path(checkpoint.path.parent)
        files.append(path)
        stored_as |= {name: each for name, each in formats_of(path).items() if name in frozen}
    copy_files_into(targets, files, stored_as=stored_as, among_others=among_others)


def _files(checkpoint: Checkpoint, stem: str) -> list[Path]:
    return [checkpoint.path / name for name in tensor_files(stem, read_sums(checkpoint.path))]


def _stored_format(checkpoint: Checkpoint) -> torch.dtype:
    """The format of a checkpoint's trained weights."""
    return torch.bfloat16 if _precision_of(checkpoint) == "bf16-pure" else torch.float32


def _precision_of(checkpoint: Checkpoint) -> str:
    return checkpoint.state.recipe.get("training", {}).get("precision", "")


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


def load_plain_model(checkpoint: Checkpoint, recipe: Recipe) -> Transformer:
    """The model of a checkpoint with its averaged weights, if it has any, adapters merged; a scalar head is left out.

    Raises as `load_model` does.
    """
    model = load_tuned_model(checkpoint, recipe)
    remove_tuned_parts(model)
    return model


def load_plain_parts(checkpoint: Checkpoint, recipe: Recipe, parts: Parts) -> None:
    """Copy the weights that `load_plain_model` would give into some parts of that model; the whole model is only built
    where adapters are merged.

    Raises CorruptFile where the checkpoint does not fit the recipe.
    """
    if has_tuned_parts(recipe):
        made = model_tensors(load_plain_model(checkpoint, recipe))
        for name, own in parts.items():
            for part in own:
                part.tensor.copy_(made[name][part.place])
    elif keeps_average(checkpoint):
        targets = {f"average.{name}": own for name, own in parts.items()}
        files = _files(checkpoint, "optimizer")
        copy_files_into(targets, files, stored_as=dict.fromkeys(targets, torch.float32), among_others=True)
    else:
        stored_as = dict.fromkeys(parts, _stored_format(checkpoint))
        copy_files_into(parts, _files(checkpoint, "model"), stored_as=stored_as, among_others=True)


def load_tuned_model(checkpoint: Checkpoint, recipe: Recipe) -> Transformer:
    """The model of a checkpoint with its averaged weights, if it has any, and with what tuning has added. Raises as
    `load_model` does."""
    model = Transformer(recipe.model)
    add_tuned_parts(model, recipe)
    load_averaged_model(checkpoint, model)
    return model
