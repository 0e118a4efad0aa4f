"""The models below a folder, opened when a page asks and closed when another needs their memory.

A model is what `napkin.load` opens: a run, a quantized run, a Hugging Face folder, a GGUF file. Each open one has an
engine and its thread, as `napkin serve` has.
"""

import asyncio
import contextlib
import gc
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from napkin.chats.chat_encoder import ChatEncoder, TrainOn
from napkin.checkpoint.folder import checkpoint_paths
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hardware.host import detect_host, return_freed_memory
from napkin.inference.loaded_model import LoadedModel, load
from napkin.inference.paged_cache import bytes_for
from napkin.model.gguf.gguf_file import is_gguf
from napkin.model.huggingface.folder_files import is_huggingface
from napkin.recipe.precision import choose_device
from napkin.runs.run_folder import is_quantized, is_run
from napkin.serving.application import described
from napkin.serving.limits import Limits
from napkin.serving.service import Service
from napkin.studio.named_paths import NamedPaths
from napkin.tuning.method import encoder_of_base
from napkin.units import format_bytes

MOST_OPEN = 4
MOST_FOUND = 2000
_SEQUENCES = 2
"""Answers of a model that are generated at a time."""
_LONGEST = 8192
"""Tokens of a conversation for which an engine has room, where the model's context is longer."""
_BLOCK = 16
_LIMITS = Limits(max_requests=8)
_FREE = 0.8
"""The part of the free memory that a model may take."""


@dataclass
class OpenModel:
    """A model with its engine."""

    name: str
    service: Service
    stamp: str
    needed: int
    """Bytes of its weights and of its engine's cache."""
    messages: list[str]
    """Messages from opening the model."""
    users: int = 0
    """Requests that are using it."""
    _encoders: dict[TrainOn, ChatEncoder] = field(default_factory=dict)

    @property
    def opened(self) -> LoadedModel:
        return self.service.opened

    @property
    def is_idle(self) -> bool:
        """True while no request uses it."""
        return not self.users and not self.service.thread.in_flight

    def encoder(self, train_on: TrainOn) -> ChatEncoder:
        """The encoder of conversations that tuning it would use. Raises NapkinError where it has none."""
        if train_on not in self._encoders:
            self._encoders[train_on] = encoder_of_base(self.opened, train_on=train_on)
        return self._encoders[train_on]

    def about(self) -> dict[str, Any]:
        """The model's data for a page."""
        return {
            **described(self.service),
            "step": self.opened.step,
            "weights": str(self.opened.model.dtype).removeprefix("torch."),
            "device": self.opened.model.device.type,
            "bytes": self.needed,
            "messages": self.messages,
        }

    async def close(self) -> None:
        """End its engine's thread, and the processes of its templates."""
        await self.service.thread.close()
        templates = [self.opened.chat_template, *(each.template for each in self._encoders.values())]
        for template in templates:
            if template is not None:
                template.close()


class ModelShelf:
    """The models of a folder by their names, which are their paths in it, and those that are open."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self._models = NamedPaths(self.folder, "model", _kind, MOST_FOUND)
        self._open: OrderedDict[str, OpenModel] = OrderedDict()
        self._opening = asyncio.Lock()

    def find(self) -> list[dict[str, str]]:
        """Look for models: their names and kinds."""
        return [{"name": name, "kind": str(kind)} for name, kind in self._models.find().items()]

    def path_of(self, name: str) -> Path:
        """The path of a model. Raises NapkinError for a name that was not found: names are not taken as paths."""
        return self._models.path_of(name)

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[OpenModel]:
        """A model with its engine, which stays open within the block; it is opened if necessary, and again if its files
        are newer. The least recently used models are closed where memory is needed. Raises NapkinError for a folder
        that cannot be opened, and where there is no room for it.
        """
        path = await asyncio.to_thread(self.path_of, name)
        stamp = await asyncio.to_thread(_stamp, path)
        model = self._held(name, stamp)
        if model is None:
            async with self._opening:
                # Another request may have opened it meanwhile.
                model = self._held(name, stamp) or await self._opened(name, path, stamp)
        self._open.move_to_end(name)
        model.users += 1
        try:
            yield model
        finally:
            model.users -= 1

    async def close(self) -> None:
        """Close all."""
        for name in [*self._open]:
            await self._close(name)

    def _held(self, name: str, stamp: str) -> OpenModel | None:
        held = self._open.get(name)
        return held if held is not None and (held.stamp == stamp or not held.is_idle) else None

    async def _opened(self, name: str, path: Path, stamp: str) -> OpenModel:
        if name in self._open:
            await self._close(name)
        messages: list[str] = []
        opened = await asyncio.to_thread(load, path, name=name, weights="auto", on_message=messages.append)
        needed = await asyncio.to_thread(_bytes_needed, opened)
        messages += await self._make_room(name, needed)
        service = await asyncio.to_thread(_service, opened)
        service.start()
        self._open[name] = OpenModel(name, service, stamp, needed, messages)
        return self._open[name]

    async def _make_room(self, name: str, needed: int) -> list[str]:
        """Close what was used longest ago until a model fits, and say so."""
        idle = [each for each in self._open.values() if each.is_idle]
        if len(self._open) - len(idle) >= MOST_OPEN:
            raise NapkinError(f"{MOST_OPEN} models are answering: wait until one has ended, then open '{name}'")
        free = await asyncio.to_thread(_free_bytes)
        most = _FREE * (free + sum(each.needed for each in idle))
        if needed > most:
            raise NapkinError(
                f"'{name}' needs {format_bytes(needed)} for weights and cache, and may take {format_bytes(most)}, "
                f"{_FREE:.0%} of the free memory: end other programs, or choose a smaller or a quantized model"
            )
        said = []
        while len(self._open) >= MOST_OPEN or needed > _FREE * free:
            oldest = next((each for each in self._open.values() if each.is_idle), None)
            if oldest is None:
                break
            await self._close(oldest.name)
            said.append(f"'{oldest.name}' was closed to make room: it was used longest ago")
            free = await asyncio.to_thread(_free_bytes)
        return said

    async def _close(self, name: str) -> None:
        await self._open.pop(name).close()
        # A model and its engine refer to each other.
        await asyncio.to_thread(gc.collect)
        await asyncio.to_thread(return_freed_memory)


def _kind(path: Path) -> str:
    """The kind of a model's folder or file; empty for others, and for runs without a checkpoint."""
    if not path.is_dir():
        return "GGUF file" if path.suffix == ".gguf" and is_gguf(path) else ""
    if is_quantized(path):
        return "quantized run"
    if is_run(path):
        return "run" if checkpoint_paths(path / "checkpoints") else ""
    return "Hugging Face folder" if is_huggingface(path) else ""


def _stamp(path: Path) -> str:
    """A stamp that changes with a model's weights: the newest checkpoint of a run, the modification time of others."""
    newest = checkpoint_paths(path / "checkpoints")
    if newest:
        return newest[0].name
    try:
        files = [*path.iterdir()] if path.is_dir() else [path]
        return str(max((each.stat().st_mtime for each in files), default=0.0))
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read: {error.strerror}") from None


def _bytes_needed(opened: LoadedModel) -> int:
    """Bytes of the weights as they are read, and of the engine's cache."""
    if opened.folder.is_file():
        weights = opened.folder.stat().st_size
    elif opened.quantized is not None:
        weights = (opened.folder / "model.safetensors").stat().st_size
    else:
        weights = torch.float32.itemsize * opened.n_parameters
    return weights + _cache_bytes(opened, torch.float32)


def _cache_bytes(opened: LoadedModel, dtype: torch.dtype) -> int:
    return bytes_for(opened.config, dtype, _SEQUENCES, min(opened.context_length, _LONGEST), _BLOCK)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if choose_device("auto") == "cuda" else detect_host().available_bytes


def _service(opened: LoadedModel) -> Service:
    """Reads the weights."""
    cache_bytes = _cache_bytes(opened, opened.model.dtype)
    engine = opened.engine(max_running=_SEQUENCES, cache_bytes=cache_bytes, block_size=_BLOCK)
    return Service(opened, engine, _LIMITS)
