"""The largest model of a family whose training step fits on some devices, by count."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from napkin.accounting.ledger import Ledger
from napkin.accounting.rules import bytes_per_parameter, largest_model_rule
from napkin.errors import NapkinError
from napkin.hardware.catalogue import Device
from napkin.hardware.cuda_target import Target
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import OptimizerConfig, Recipe, TrainingConfig
from napkin.train_step.step import count_step
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
    """Sequences per device and step."""
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

    Widths are multiples of 128 with a layer for each, then as many layers more as fit. Two small members are counted
    for each width that is looked at, and the winner as a whole: what is returned fits by its own count.

    Raises NapkinError where not even the smallest member fits.
    """
    usable = device.usable_bytes

    @functools.cache
    def width_of(n_layers: int) -> _Width:
        progress(f"counting models of width {WIDTH_A_LAYER * n_layers}")
        return _Width(family, WIDTH_A_LAYER * n_layers, n_devices)

    n_layers = _largest(lambda n: width_of(n).peak_bytes(n), usable, _guess(family, n_devices * usable))
    if not n_layers:
        raise NapkinError(
            f"not even one layer of width {WIDTH_A_LAYER} fits into the {format_bytes(usable)} of a "
            f"{device.name}: use a smaller --batch-size, --context-length or --vocab-size"
        )
    width = width_of(n_layers)
    while width.peak_bytes(n_layers + 1) <= usable:
        n_layers += 1
    while True:
        progress(f"counting {n_layers} layers of width {width.d_model}")
        ledger = family.count(width.d_model, n_layers)
        peak_bytes = ledger.sharded_peak_bytes(n_devices) + width.gathered_bytes
        if peak_bytes <= usable:
            return LargestModel(family.config(width.d_model, n_layers), ledger, width.gathered_bytes, peak_bytes)
        n_layers -= max(1, (peak_bytes - usable) // width.bytes_per_layer)


def _guess(family: Family, total_bytes: int) -> int:
    """Layers of the model that fills so many bytes without activations: 12 · layers · width² parameters."""
    parameters = largest_model_rule(total_bytes, bytes_per_parameter=bytes_per_parameter(family.optimizer))
    return round((parameters / (12 * WIDTH_A_LAYER**2)) ** (1 / 3))


def _largest(peak_bytes: Callable[[int], int], usable: int, guess: int) -> int:
    """The largest number of layers whose peak fits, at most MOST_LAYERS; 0 for none.

    Bytes grow with about the third power of layers, as the width does with them: few are asked for.
    """
    does, does_not = 0, MOST_LAYERS + 1
    while does_not - does > 1:
        guess = min(max(guess, does + 1), does_not - 1)
        peak = peak_bytes(guess)
        if peak <= usable:
            does = guess
        else:
            does_not = guess
        guess = round(guess * (usable / peak) ** (1 / 3))
    return does


class _Width:
    """All models of a width: two and three layers are counted, and of more the least that they can take follows.

    A step's peak is that of whichever moment is highest, each linear in the number of layers: it bends upwards, and
    with one layer it is often the head's.
    """

    def __init__(self, family: Family, d_model: int, n_devices: int) -> None:
        self.d_model = d_model
        self._count = functools.partial(family.count, d_model)
        self._n_devices = n_devices
        two, three = self._count(2), self._count(3)
        block = three.parameters - two.parameters
        embedding = two.parameters - 2 * block
        # Two blocks' parameters, the next being fetched while one works, one's gradients, and the embedding.
        bytes_per_number = 2 if family.precision.products == "bf16" else 4
        self.gathered_bytes = bytes_per_number * (3 * block + embedding) if n_devices > 1 else 0
        self._two = two.sharded_peak_bytes(n_devices)
        self.bytes_per_layer = three.sharded_peak_bytes(n_devices) - self._two

    def peak_bytes(self, n_layers: int) -> int:
        """Of one device's step."""
        if n_layers == 1:
            return self._count(1).sharded_peak_bytes(self._n_devices) + self.gathered_bytes
        return self._two + (n_layers - 2) * self.bytes_per_layer + self.gathered_bytes
