"""One device's part of a recipe's step: its rows of the batch, and with fsdp its part of the model."""

import dataclasses

from napkin.accounting.ledger import STATE, Category, Ledger
from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe


def share_of(recipe: Recipe, n_devices: int) -> Recipe:
    """The recipe with one device's part of the batch; one device has all of it.

    Raises NapkinError where the batch does not divide among the devices, or their part into micro-batches.
    """
    training = recipe.training
    batch_size, rest = divmod(training.batch_size, n_devices)
    if rest or not batch_size:
        raise NapkinError(
            f"training.batch_size {training.batch_size} does not divide among {n_devices} devices: "
            f"use a multiple, --training.batch-size {n_devices * -(-training.batch_size // n_devices)}"
        )
    size = min(training.resolved_micro_batch_size, batch_size)
    if batch_size % size:
        raise NapkinError(
            f"each of {n_devices} devices gets {batch_size} sequences, which do not divide into micro-batches of "
            f"{size}: choose a --training.micro-batch-size that divides them"
        )
    if n_devices == 1:
        return recipe
    # "auto" is for whoever knows the device's memory.
    micro_batch_size = "auto" if training.micro_batch_size == "auto" else size
    training = dataclasses.replace(training, batch_size=batch_size, micro_batch_size=micro_batch_size)
    return dataclasses.replace(recipe, training=training)


def exchanged(ledger: Ledger) -> Ledger:
    """The ledger with the peak of a device of several that have the whole model each: DDP keeps the gradients, where
    they are exchanged, from one step to the next."""
    more = 4 * ledger.parameters - ledger.peak_by_category.get("gradients", 0)
    alive = {**ledger.peak_by_category, "gradients": 4 * ledger.parameters}
    return dataclasses.replace(ledger, peak_bytes=ledger.peak_bytes + more, peak_by_category=alive)


def sharded(ledger: Ledger, n_devices: int, gathered_bytes: int) -> Ledger:
    """The ledger with the peak of a device that holds 1/n of parameters, gradients and optimizer state.

    `gathered_bytes` are those of the parameters that it has whole while their layers work.
    """
    peak_bytes = ledger.sharded_peak_bytes(n_devices) + gathered_bytes
    alive: dict[Category, int] = {
        category: -(-size // n_devices) if category in STATE else size
        for category, size in ledger.peak_by_category.items()
        if category != "weight copies"
    }
    alive["weight copies"] = gathered_bytes
    # The peak may have moved to another moment: what it has more or less there are tensors in passing.
    alive["temporaries"] = max(0, alive.get("temporaries", 0) + peak_bytes - sum(alive.values()))
    return dataclasses.replace(ledger, peak_bytes=peak_bytes, peak_by_category=alive)


def gathered_bytes(recipe: Recipe, parameters: int, bytes_per_number: int) -> int:
    """Bytes of the parameters that fsdp has whole at one time: two blocks' and one's gradients, and what is no block.

    The next block is gathered while one works, and one's gradients are on their way.
    """
    model = recipe.model
    outside = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2)
    block = max(0, parameters - outside) // model.n_layers
    return bytes_per_number * 3 * block + 4 * 2 * outside
