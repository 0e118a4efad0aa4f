"""The largest model of a family whose training step fits on some devices, by count."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from napkin.accounting.cuda_target import Target
from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError
from napkin.hardware.catalogue import Device
from napkin.model.config import ModelConfig
from napkin.training.precision import Precision
from napkin.training.recipe import OptimizerConfig, Recipe, TrainingConfig
from napkin.training.step import count_step
from napkin.units import format_bytes

HEAD_DIM = 128
WIDTH_A_LAYER = 128
"""d_model over n_layers: 128 in GPT-3 (Brown et al. 2020, table 2.1), and about that in Llama."""
MOST_LAYERS = 512


@dataclass(frozen=True)
class LargestModel:
    """A model that fits, and what one device holds when its step is at its peak."""

    config: ModelConfig
    ledger: Ledger
    """Of the whole model on one device; parameters, gradients and optimizer state are spread below."""
    gathered_bytes: int
    """Parameters and gradients of the layers at work, whole for a moment."""
    peak_bytes: int
    """Of one device: its part of the rest, what is gathered, and the activations of its own sequences."""


@dataclass(frozen=True)
class Family:
    """Models of one shape: as many heads of width 128 as layers, and what each is trained on."""

    vocab_size: int
    context_length: int
    batch_size: int
    """Sequences a device and step."""
    precision: Precision
    target: Target
    optimizer: str = "adamw"

    def config(self, d_model: int, n_layers: int) -> ModelConfig:
        """The member of that size."""
        n_heads = d_model // HEAD_DIM
        return ModelConfig(self.vocab_size, self.context_length, d_model=d_model, n_layers=n_layers, n_heads=n_heads)

    def count(self, d_model: int, n_layers: int) -> Ledger:
        """The ledger of that member's step."""
        training = TrainingConfig(batch_size=self.batch_size)
        recipe = Recipe(
            model=self.config(d_model, n_layers), optimizer=OptimizerConfig(name=self.optimizer), training=training
        )
        return count_step(recipe, self.precision, target=self.target)


def largest_model(
    family: Family, device: Device, n_devices: int, *, progress: Callable[[str], None] = lambda doing: None
) -> LargestModel:
    """The largest member of `family` that trains on the devices, its parameters and their like spread over all of them.

    Widths are multiples of 128 with a layer for each, then as many layers more as fit. A step's peak is linear in the
    number of layers: two small members are counted for each width, and the winner as a whole.

    Raises NapkinError where not even the smallest member fits.
    """

    def width_of(n_layers: int) -> _Width:
        progress(f"counting models of width {WIDTH_A_LAYER * n_layers}")
        return _Width(family, WIDTH_A_LAYER * n_layers, n_devices)

    def fits(n_layers: int) -> bool:
        return width_of(n_layers).peak_bytes(n_layers) <= device.usable_bytes

    too_many = 1
    while too_many <= MOST_LAYERS and fits(too_many):
        too_many *= 2
    # The largest that fits lies between half of what does not and that.
    candidates = range(too_many // 2 + 1, too_many)
    n_layers = too_many // 2 + bisect.bisect_left(candidates, True, key=lambda n_layers: not fits(n_layers))
    if not n_layers:
        raise NapkinError(
            f"not even one layer of width {WIDTH_A_LAYER} fits into the {format_bytes(device.usable_bytes)} of a "
            f"{device.name}: use a smaller --batch-size, --context-length or --vocab-size"
        )
    width = width_of(n_layers)
    while width.peak_bytes(n_layers + 1) <= device.usable_bytes:
        n_layers += 1
    progress(f"counting {n_layers} layers of width {width.d_model}")
    ledger = family.count(width.d_model, n_layers)
    return LargestModel(
        config=family.config(width.d_model, n_layers),
        ledger=ledger,
        gathered_bytes=width.gathered_bytes,
        peak_bytes=ledger.sharded_peak_bytes(n_devices) + width.gathered_bytes,
    )


class _Width:
    """All models of a width: one and two layers are counted, every other number follows."""

    def __init__(self, family: Family, d_model: int, n_devices: int) -> None:
        self.d_model = d_model
        one, two = family.count(d_model, 1), family.count(d_model, 2)
        block = two.parameters - one.parameters
        embedding = one.parameters - block
        # Two blocks' parameters, the next being fetched while one works, one's gradients, and the embedding.
        bytes_a_number = 2 if family.precision.products == "bf16" else 4
        self.gathered_bytes = bytes_a_number * (3 * block + embedding) if n_devices > 1 else 0
        self._one, self._two = (ledger.sharded_peak_bytes(n_devices) for ledger in (one, two))

    def peak_bytes(self, n_layers: int) -> int:
        """Of one device's step."""
        return self._one + (n_layers - 1) * (self._two - self._one) + self.gathered_bytes
