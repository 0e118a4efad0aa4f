"""The largest model of a family whose training step fits on given devices: a search over counted plans."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from napkin.accounting.ledger import Ledger
from napkin.accounting.rules import bytes_per_parameter, largest_model_rule
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.machine import Machine
from napkin.planning.planner import plan_resolved
from napkin.planning.resolve import resolve
from napkin.planning.run_plan import Plan
from napkin.recipe.optimizer_config import OptimizerConfig
from napkin.recipe.precision import PrecisionName
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes

HEAD_DIM = 128
WIDTH_PER_LAYER = 128
"""d_model over n_layers: 128 in GPT-3 (Brown et al. 2020, table 2.1), and about that in Llama."""
MOST_LAYERS = 512
LEAST_GROWTH = 0.97
"""Bytes that any layer adds to the peak, as a fraction of what layers add on average: the optimizer's buckets, whose
temporaries are part of the peak, do not grow layer by layer."""


@dataclass(frozen=True)
class Family:
    """Models of one shape, with as many heads of width 128 as layers, and their training settings; sharded by fsdp."""

    vocab_size: int
    context_length: int
    batch_size: int
    """Sequences per device and step."""
    precision: Literal["auto"] | PrecisionName = "auto"
    optimizer: str = "adamw"

    def resolved(self, machine: Machine, d_model: int, n_layers: int) -> ResolvedRecipe:
        """The resolved recipe of the member of that size, for all devices of a machine."""
        n_heads = d_model // HEAD_DIM
        model = ModelConfig(self.vocab_size, self.context_length, d_model=d_model, n_layers=n_layers, n_heads=n_heads)
        training = TrainingConfig(
            batch_size=machine.n_devices * self.batch_size,
            micro_batch_size=self.batch_size,
            parallelism="fsdp",
            precision=self.precision,
        )
        return resolve(Recipe(model=model, optimizer=OptimizerConfig(name=self.optimizer), training=training), machine)

    def count(self, machine: Machine, d_model: int, n_layers: int) -> Ledger:
        """The ledger of that member's step on one device."""
        return count_step(self.resolved(machine, d_model, n_layers))


def largest_model(family: Family, machine: Machine, *, progress: Callable[[str], None] = lambda doing: None) -> Plan:
    """The plan of the largest member of `family` that trains on the machine, sharded over all of its devices.

    Widths are multiples of 128, with one layer for each 128, and then as many more layers as fit. For each width tried,
    two small members are counted; the returned model is counted completely, and fits by its own plan.

    Raises NapkinError where not even the smallest member fits.
    """
    usable = machine.memory_bytes

    @functools.cache
    def width_of(n_layers: int) -> _Width:
        progress(f"counting models of width {WIDTH_PER_LAYER * n_layers}")
        return _Width(family, machine, WIDTH_PER_LAYER * n_layers)

    n_layers = _largest(lambda n: width_of(n).peak_bytes(n), usable, _guess(family, machine.n_devices * usable))
    if not n_layers:
        raise NapkinError(
            f"not even one layer of width {WIDTH_PER_LAYER} fits into the {format_bytes(usable)} of a "
            f"{machine.device_name}: use a smaller --batch-size, --context-length or --vocab-size"
        )
    width = width_of(n_layers)
    while width.peak_bytes(n_layers + 1) <= usable:
        n_layers += 1
    # The estimate is off by a layer or two: what fits by count is found from there, upwards or downwards.
    found, exceeds = None, MOST_LAYERS + 1
    while n_layers < exceeds:
        progress(f"counting {n_layers} layers of width {width.d_model}")
        plan = plan_resolved(family.resolved(machine, width.d_model, n_layers), machine)
        if plan.fits:
            found, n_layers = plan, n_layers + 1
            if plan.ledger.peak_bytes + LEAST_GROWTH * width.bytes_per_layer > usable:
                break
        else:
            exceeds = n_layers
            n_layers -= (
                max(1, round((plan.ledger.peak_bytes - usable) // width.bytes_per_layer)) if found is None else 0
            )
    assert found is not None
    return found


def gathered_bytes_of(plan: Plan) -> int:
    """Bytes of parameters that a device holds unsharded at a time."""
    if plan.resolved.strategy != "fsdp":
        return 0
    return max(moment.weight_copy_bytes for moment in plan.ledger.timeline)


def _guess(family: Family, total_bytes: int) -> int:
    """Number of layers of the model that fills `total_bytes` without activations: 12 · layers · width² parameters."""
    parameters = largest_model_rule(total_bytes, bytes_per_parameter=bytes_per_parameter(family.optimizer))
    return round((parameters / (12 * WIDTH_PER_LAYER**2)) ** (1 / 3))


def _largest(peak_bytes: Callable[[int], int], usable: int, guess: int) -> int:
    """The largest number of layers whose peak fits, at most MOST_LAYERS; 0 for none.

    Bytes grow with about the third power of the layers, because the width grows with them: few evaluations suffice.
    """
    fits, exceeds = 0, MOST_LAYERS + 1
    while exceeds - fits > 1:
        guess = min(max(guess, fits + 1), exceeds - 1)
        peak = peak_bytes(guess)
        if peak <= usable:
            fits = guess
        else:
            exceeds = guess
        guess = round(guess * (usable / peak) ** (1 / 3))
    return fits


class _Width:
    """All models of a width, estimated: two small ones are counted, and a line is drawn through them.

    With one layer the peak is often at the output head.
    """

    def __init__(self, family: Family, machine: Machine, d_model: int) -> None:
        self.d_model = d_model
        self._count = functools.partial(family.count, machine, d_model)
        self._two = self._count(2).peak_bytes
        self.bytes_per_layer = (self._count(6).peak_bytes - self._two) / 4

    def peak_bytes(self, n_layers: int) -> int:
        """Peak bytes of one device's step."""
        if n_layers == 1:
            return self._count(1).peak_bytes
        return round(self._two + (n_layers - 2) * self.bytes_per_layer)
