"""Prefixes of an engine across restarts: the blocks that its pool knows by their tokens, kept in a file of this user.

prefixes/KEY.safetensors in the cache folder, in a folder that only this user may read, as keys and values tell of
prompts. KEY is a digest of everything that the numbers depend on. The file holds the digests of blocks, those of least
recent use first, and what each tensor of the cache holds in them; its header has a checksum of all of that. It is
replaced atomically; a file that is damaged, or of other shapes, is ignored.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from napkin.errors import NapkinError
from napkin.files import atomic_file, cache_folder, private_folder, read_private_file
from napkin.inference.engine import Engine
from napkin.inference.scheduler import Digest
from napkin.tensors import tensors_digest
from napkin.units import format_bytes

FORMAT = "napkin prefixes 1"
_DIGESTS = "digests"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class PrefixStore:
    """The file of an engine's prefixes, and its size limit."""

    most_bytes: int
    folder: Path | None = None
    """Folder of the files; None is one in napkin's cache folder."""

    def __post_init__(self) -> None:
        if self.most_bytes < 0:
            raise NapkinError(f"prefix_bytes is {self.most_bytes}: use 0 or more")

    def path(self, engine: Engine) -> Path:
        """The file of an engine's prefixes: of these weights, in blocks of this size and number format, by this torch
        on such a device."""
        scheduler = engine.scheduler
        chunks = scheduler.prefill_chunk if scheduler.batch_invariant else 0
        shapes = [f"{tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in _tensors(engine)]
        facts = (FORMAT, _weights_of(engine), torch.__version__, str(engine.model.device.type), str(chunks), *shapes)
        name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
        return (self.folder or cache_folder() / "prefixes") / f"{name}.safetensors"

    def restore(self, engine: Engine) -> int:
        """Load the stored prefixes into the free blocks of an engine that has computed nothing; returns the number of
        tokens."""
        path, tensors = self.path(engine), _tensors(engine)
        content = read_private_file(path) if private_folder(path.parent) is not None else None
        kept = None if content is None else _checked(content, tensors)
        if kept is None:
            return 0
        digests, held = kept
        pool, n = engine.pool, min(len(digests), engine.pool.n_free)
        taken: list[tuple[int, int]] = []
        # The most recently used are the last.
        for row in range(len(digests) - n, len(digests)):
            block = pool.take()
            assert block is not None
            taken.append((block, row))
        blocks, rows = torch.tensor(taken, dtype=torch.int64).view(-1, 2).T
        for tensor, values in zip(tensors, held, strict=True):
            tensor[blocks.to(tensor.device)] = values[rows].to(tensor.device)
        for block, row in taken:
            pool.name(block, digests[row])
            pool.release(block)
        return len(taken) * pool.block_size

    def keep(self, engine: Engine) -> int:
        """Write the most recently used prefixes of an engine, replacing the file; returns the number of tokens. The
        engine must not step meanwhile."""
        path, tensors = self.path(engine), _tensors(engine)
        each = sum(tensor[0].nbytes for tensor in tensors) + _DIGEST_BYTES
        known = engine.pool.known()
        known = known[max(0, len(known) - self.most_bytes // each) :] if self.most_bytes >= each else []
        if not known:
            return 0
        if private_folder(path.parent) is None:
            raise NapkinError(f"'{path.parent}' is not a folder of this user alone: remove it, or use --prefix-bytes 0")
        blocks = torch.tensor([block for block, _ in known])
        digests = torch.frombuffer(bytearray(b"".join(digest for _, digest in known)), dtype=torch.uint8)
        held = {f"{number}": tensor[blocks.to(tensor.device)].cpu() for number, tensor in enumerate(tensors)}
        held[_DIGESTS] = digests.view(len(known), -1)
        content = save(held, {"format": FORMAT, "checksum": tensors_digest(sorted(held.items()))})
        with atomic_file(path, overwrite=True) as file:
            file.write(content)
        return len(known) * engine.pool.block_size


def prefix_message(n_tokens: int, engine: Engine, what: str) -> str:
    """A sentence on prefixes that were kept or restored."""
    n_blocks = n_tokens // engine.pool.block_size
    n_bytes = n_blocks * sum(tensor[0].nbytes for tensor in _tensors(engine))
    return f"prefixes of {n_tokens:,} tokens, {format_bytes(n_bytes)}, are {what}"


def _weights_of(engine: Engine) -> str:
    """A digest of all weights that keys and values are computed with."""
    models = (engine.model, *([] if engine.draft is None else [engine.draft.model]))
    return " ".join(
        f"{model.config} {tensors_digest((*model.named_parameters(), *model.named_buffers()))}" for model in models
    )


def _tensors(engine: Engine) -> list[Tensor]:
    return [tensor for cache in engine.caches for tensor in cache.tensors]


def _checked(content: bytes, tensors: list[Tensor]) -> tuple[list[Digest], list[Tensor]] | None:
    """The digests and tensors of a file; None where it is damaged, or does not fit an engine's tensors."""
    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + min(size, len(content))])
        held = load(content)
        facts = header["__metadata__"]
        if facts["format"] != FORMAT or facts["checksum"] != tensors_digest(sorted(held.items())):
            return None
        rows = held.pop(_DIGESTS)
        found = [held[str(number)] for number in range(len(tensors))]
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError):
        return None
    shapes = [(len(rows), *tensor.shape[1:]) for tensor in tensors]
    if [tuple(each.shape) for each in found] != shapes or rows.dtype != torch.uint8 or len(held) != len(tensors):
        return None
    if any(each.dtype != tensor.dtype for each, tensor in zip(found, tensors, strict=True)):
        return None
    return [bytes(row.tolist()) for row in rows], found
