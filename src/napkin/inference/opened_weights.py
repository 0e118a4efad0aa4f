"""Where the weights of an opened model are, and how they are read: from the newest intact checkpoint of a run, from a
quantized run, a Hugging Face folder, or a GGUF file."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from napkin.checkpoint.restore import keeps_average, load_newest, load_plain_model, load_plain_parts
from napkin.checkpoint.shard_files import FROZEN, checksum_of, read_sums
from napkin.checkpoint.state import Checkpoint
from napkin.errors import NapkinError
from napkin.hardware.host import detect_host
from napkin.inference.quantized_run import read_quantized
from napkin.model.config import ModelConfig
from napkin.model.gguf.convert import load_gguf, load_gguf_parts
from napkin.model.huggingface.convert import load_huggingface, load_huggingface_parts, weight_files
from napkin.model.transformer import Transformer
from napkin.optim.tensor_parts import Parts
from napkin.recipe.precision import choose_precision
from napkin.recipe.recipe import Recipe
from napkin.runs.run_folder import QuantizedRun, RunFolder

DeviceType = Literal["cpu", "cuda"]
WeightFormat = Literal["auto", "fp32", "bf16"]


@dataclass(eq=False)
class FolderWeights:
    """The weights of a Hugging Face folder; other sources differ from it."""

    path: Path

    @property
    def step(self) -> int:
        """Number of updates of the weights; 0 where it is not known."""
        return 0

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint of a run, whose checksums were verified; None of other sources."""
        return None

    def read(self, device_type: DeviceType, weights: WeightFormat | None) -> Transformer:
        """The model in evaluation mode on a device, its weights in that number format.

        "auto" is bf16 where the device multiplies it natively. None is fp32, and bf16 for the weights of a Hugging Face
        folder or a GGUF file on a GPU.
        """
        model = self._read(device_type, weights).to(device_type)
        if weights is not None:
            products = choose_precision(weights, device_type, detect_host()).products
            # Tables of positions stay in fp32.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16 if products == "bf16" else torch.float32)
        return model

    def _read(self, device_type: DeviceType, weights: WeightFormat | None) -> Transformer:
        return load_huggingface(self.path, dtype=_dtype_of_others(device_type, weights))

    def load_parts(self, config: ModelConfig, parts: Parts) -> None:
        """Copy the weights into parts of a model of that config."""
        load_huggingface_parts(config, parts, self.path)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the checksums of the files that hold the weights, which are read.

        Raises CorruptFile where they are damaged.
        """
        return hashlib.sha256(" ".join(self._checksums()).encode()).hexdigest()

    def _checksums(self) -> list[str]:
        return [checksum_of(path) for path in weight_files(self.path)]


@dataclass(eq=False)
class GgufWeights(FolderWeights):
    """The weights of a GGUF file, which stay integers on a CPU unless another format is asked for."""

    def read(self, device_type: DeviceType, weights: WeightFormat | None) -> Transformer:
        if device_type == "cpu" and self.keeps_integers(weights):
            return load_gguf(self.path, integers=True)
        return super().read(device_type, weights)

    def keeps_integers(self, weights: WeightFormat | None) -> bool:
        """True if a CPU multiplies the file's integers in that format."""
        return weights in (None, "auto")

    def _read(self, device_type: DeviceType, weights: WeightFormat | None) -> Transformer:
        return load_gguf(self.path, dtype=_dtype_of_others(device_type, weights))

    def load_parts(self, config: ModelConfig, parts: Parts) -> None:
        load_gguf_parts(config, parts, self.path)

    def _checksums(self) -> list[str]:
        return [checksum_of(self.path)]


@dataclass(eq=False)
class QuantizedWeights(FolderWeights):
    """The integers of a quantized run, which stay as they are."""

    run: QuantizedRun

    @property
    def step(self) -> int:
        return self.run.step

    def read(self, device_type: DeviceType, weights: WeightFormat | None) -> Transformer:
        return read_quantized(self.path, self.run).eval().to(device_type)


@dataclass(eq=False)
class RunWeights(FolderWeights):
    """The weights of a run's newest intact checkpoint: averaged ones if it has any, adapters merged."""

    run: RunFolder
    on_message: Callable[[str], None]
    """Called for damaged checkpoints that are skipped when the weights are read."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.state.step

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        newest, _ = load_newest(self.run.checkpoints, lambda checkpoint: None)
        if newest is None:
            raise no_checkpoint(self.path)
        return newest

    def _read(self, device_type: DeviceType, weights: WeightFormat | None) -> Transformer:
        return self.newest(load_plain_model).eval()

    def newest(self, read: Callable[[Checkpoint, Recipe], Transformer]) -> Transformer:
        """What `read` makes of the newest checkpoint that is intact, which becomes `checkpoint`.

        Raises NapkinError where there is none.
        """
        run, models = self.run, list[Transformer]()
        checkpoint, damaged = load_newest(run.checkpoints, lambda each: models.append(read(each, run.recipe)))
        if checkpoint is None:
            raise no_checkpoint(self.path)
        if run.recipe_was_changed:
            self.on_message(f"'{run.path / 'recipe.toml'}' was changed after the run had been created")
        for error in damaged.values():
            self.on_message(f"a damaged checkpoint is skipped for '{checkpoint.path.name}': {error}")
        self.checkpoint = checkpoint
        return models[-1]

    def load_parts(self, config: ModelConfig, parts: Parts) -> None:
        assert self.checkpoint is not None
        load_plain_parts(self.checkpoint, self.run.recipe, parts)

    def _checksums(self) -> list[str]:
        assert self.checkpoint is not None
        stems = ("model", "optimizer", FROZEN) if keeps_average(self.checkpoint) else ("model", FROZEN)
        return [sum for name, sum in read_sums(self.checkpoint.path).items() if name.startswith(stems)]


def no_checkpoint(path: Path) -> NapkinError:
    """The error for a run that has none yet."""
    RunFolder(path).recipe  # noqa: B018 - raises where it is of a program that napkin watched
    return NapkinError(f"'{path}' has no checkpoint yet: train it with `napkin resume {path}`")


def _dtype_of_others(device_type: DeviceType, weights: WeightFormat | None) -> torch.dtype:
    return torch.bfloat16 if weights is None and device_type == "cuda" else torch.float32
