"""What a run that trains adapters writes to its disk: frozen weights, once, and checkpoints of what is trained."""

from collections.abc import Iterator

from napkin.accounting.ledger import Ledger
from napkin.accounting.quantity_row import QuantityRow
from napkin.accounting.rules import bytes_per_parameter
from napkin.checkpoint.disk_space import checkpoint_bytes
from napkin.model.adapter_names import matrices_of
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.tuned_model import adapter_of, held_dtype

FROZEN_BYTES, CHECKPOINT_BYTES = "frozen bytes", "checkpoint bytes"


def stored_rows(resolved: ResolvedRecipe, ledger: Ledger, rule_parameters: float) -> Iterator[QuantityRow]:
    """The rows of a plan on what is stored; none where all weights are trained. `rule_parameters` are the model's."""
    adapter = adapter_of(resolved.recipe)
    if adapter is None:
        return
    precision, optimizer = resolved.precision, resolved.recipe.optimizer
    narrow = held_dtype(adapter.kind, adapter.frozen, precision.name) is not None
    each = 2 if narrow else precision.bytes_per_weight
    yield QuantityRow(
        FROZEN_BYTES,
        "bytes",
        each * rule_parameters,
        ledger.frozen_bytes,
        note=f"kept once in the run's folder; rule {each} bytes per parameter",
    )
    config = resolved.recipe.model
    matrices = {matrix for name in adapter.modules for matrix in matrices_of(name)}
    in_blocks = 2 * adapter.rank * config.d_model * config.n_layers * len(matrices - {"head"})
    in_head = adapter.rank * (config.d_model + config.vocab_size) * ("head" in matrices)
    # A checkpoint has no gradients.
    each = bytes_per_parameter(optimizer.name) - 4 + (4 if optimizer.average_decay else 0)
    yield QuantityRow(
        CHECKPOINT_BYTES,
        "bytes",
        each * (in_blocks + in_head),
        checkpoint_bytes(ledger),
        note=f"of tensors, without their names; rule {each} bytes per parameter, of 2·r·d per matrix, as if square",
    )
