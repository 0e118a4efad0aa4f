"""The GGUF container of llama.cpp and Ollama: one file with metadata, the vocabulary and the tensors of a model.

A file is a header, the metadata as keys with typed values, one entry per tensor (name, sizes, format, offset), and the
data, aligned; all numbers are little-endian. The format is described in llama.cpp's docs/gguf.md (version 3). Files
list a tensor's sizes with the fastest dimension first; here the slowest is first, as in torch. The header is untrusted:
its counts and sizes are checked against the length of the file before they are used, and the data is mapped, not read.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_file, regular
from napkin.model.gguf.block_formats import FORMATS, BlockFormat, format_named

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_TENSORS = 2**17
_MAX_KEYS = 2**14
_MAX_DIMENSIONS = 4
_MAX_STRING = 2**24

# The numbers of value types, with struct's letters.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Metadata = dict[str, Any]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file: its shape as torch has it, the format of its numbers, where its bytes begin."""

    shape: tuple[int, ...]
    format: BlockFormat
    offset: int

    @property
    def n_rows(self) -> int:
        """Number of rows, each of whole blocks."""
        return math.prod(self.shape[:-1])

    @property
    def n_bytes(self) -> int:
        """Bytes of the numbers in the file."""
        return math.prod(self.shape) // self.format.n_numbers * self.format.n_bytes


class GgufFile:
    """A file that is open for reading.

    `metadata` has each value by its key, arrays as lists; `tensors` the entries by name. Use it in a `with`. Raises
    NapkinError where the file cannot be read or holds formats that are not supported, CorruptFile where it is damaged.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb", opener=regular) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a GGUF file") from None
        except ValueError:
            raise CorruptFile(f"'{path}' is empty: download it again") from None
        try:
            self.metadata, self.tensors = _Header(self._map).read()
        except _DamagedHeader as error:
            self._map.close()
            raise CorruptFile(f"'{path}' is not a whole GGUF file ({error}): download it again") from None
        except NapkinError as error:
            self._map.close()
            raise NapkinError(f"'{path}': {error}") from None

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def read(self, name: str) -> Tensor:
        """Return a tensor in fp32, whatever its format is."""
        entry = self.tensors[name]
        return entry.format.decode(self.blocks(name, 0, entry.n_rows).flatten(0, 1)).reshape(entry.shape)

    def blocks(self, name: str, first: int, last: int) -> UInt8[Tensor, "row block n_bytes"]:
        """Return the bytes of the rows first to last of a tensor, of which only these are read; a vector is one row."""
        entry = self.tensors[name]
        row_bytes = entry.n_bytes // entry.n_rows
        start = entry.offset + first * row_bytes
        content = bytearray(memoryview(self._map)[start : start + (last - first) * row_bytes])
        return torch.frombuffer(content, dtype=torch.uint8).view(last - first, -1, entry.format.n_bytes)


class _DamagedHeader(Exception):
    """The header does not fit the file."""


class _Header:
    """Reads a header from front to back, never beyond the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 0

    def read(self) -> tuple[Metadata, dict[str, TensorEntry]]:
        if self._take(4) != MAGIC:
            raise _DamagedHeader("it does not begin with GGUF")
        version, n_tensors, n_keys = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise NapkinError(f"it has version {version} of the format, {_VERSIONS[-1]} is read: convert it anew")
        if n_keys > _MAX_KEYS or n_tensors > _MAX_TENSORS:
            raise _DamagedHeader(f"{n_keys} keys and {n_tensors} tensors")
        metadata = {self._string(): self._value(self._numbers("I")[0]) for _ in range(n_keys)}
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16:
            raise _DamagedHeader(f"alignment {alignment!r}")
        entries = [self._tensor() for _ in range(n_tensors)]
        start = self._place + -self._place % alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, block, offset in entries:
            entry = TensorEntry(shape, block, start + offset)
            if name in tensors or offset % alignment or entry.offset + entry.n_bytes > len(self._data):
                raise _DamagedHeader(f"the tensor {name[:100]!r} stands twice, unaligned or beyond the end")
            tensors[name] = entry
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = self._string()
        (n_dimensions,) = self._numbers("I")
        if n_dimensions > _MAX_DIMENSIONS:
            raise _DamagedHeader(f"the tensor {name[:100]!r} has {n_dimensions} dimensions")
        shape = tuple(reversed(self._numbers(f"{n_dimensions}Q")))
        number, offset = self._numbers("IQ")
        if number not in FORMATS:
            known = ", ".join(each.name for each in FORMATS.values())
            raise NapkinError(f"the tensor {name[:100]!r} has format {number}, which is not read: use one of {known}")
        block = FORMATS[number]
        if not all(0 < size < 2**40 for size in shape) or (shape or (1,))[-1] % block.n_numbers:
            raise _DamagedHeader(f"the tensor {name[:100]!r} has sizes {list(shape)} in {block.name}")
        return name, shape, block, offset

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _DamagedHeader(f"a value of type {kind}")
        element, length = self._numbers("IQ")
        if element in _SCALARS:
            if length * struct.calcsize(_SCALARS[element]) > len(self._data):
                raise _DamagedHeader(f"an array of {length} values")
            return list(self._numbers(f"{length}{_SCALARS[element]}"))
        # Each string has at least the eight bytes of its length.
        if element != _STRING or 8 * length > len(self._data):
            raise _DamagedHeader(f"an array of {length} values of type {element}")
        return [self._string() for _ in range(length)]

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        if length > _MAX_STRING:
            raise _DamagedHeader(f"a text of {length} bytes")
        # Tokens of a vocabulary on bytes are always text; a name that is not is shown with its bytes.
        return self._take(length).decode("utf-8", errors="surrogateescape")

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        return struct.unpack("<" + letters, self._take(struct.calcsize("<" + letters)))

    def _take(self, n_bytes: int) -> bytes:
        taken = self._data[self._place : self._place + n_bytes]
        if len(taken) < n_bytes:
            raise _DamagedHeader("it ends within the header")
        self._place += n_bytes
        return taken


def write_gguf(
    path: StrPath,
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, tuple[int, ...], str]],
    read: Callable[[str], Tensor],
) -> None:
    """Write a new file, whole or not at all; one tensor is in memory at a time.

    Values are text, truth values, whole numbers (written in 32 bits), floats (fp32) and lists of one of these.
    `tensors` says name, shape and the name of the format of each, `read` returns its numbers. Raises NapkinError if the
    file exists or cannot be written.
    """
    entries: list[bytes] = []
    offset = 0
    for name, shape, format_name in tensors:
        block = format_named(format_name)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries.append(_packed_string(name) + sizes + struct.pack("<IQ", block.number, offset))
        n_bytes = math.prod(shape) // block.n_numbers * block.n_bytes
        offset += n_bytes + -n_bytes % _ALIGNMENT
    keys = [_packed_string(key) + _packed(value) for key, value in metadata.items()]
    header = MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(keys)) + b"".join([*keys, *entries])
    with atomic_file(path) as file:
        file.write(header + bytes(-len(header) % _ALIGNMENT))
        for name, _, format_name in tensors:
            block = format_named(format_name)
            data = block.encode(read(name).detach().float().reshape(-1, block.n_numbers))
            file.write(data.numpy().tobytes())
            file.write(bytes(-data.numel() % _ALIGNMENT))


def _packed(value: Any) -> bytes:
    """Return a value with its type before it."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, list):
        kind = _STRING if isinstance(value[0], str) else 6 if isinstance(value[0], float) else 5
        head = struct.pack("<IIQ", _ARRAY, kind, len(value))
        if kind == _STRING:
            return head + b"".join(_packed_string(each) for each in value)
        return head + struct.pack(f"<{len(value)}{_SCALARS[kind]}", *value)
    kind = 7 if isinstance(value, bool) else 4 if isinstance(value, int) else 6
    return struct.pack(f"<I{_SCALARS[kind]}", kind, value)


def _packed_string(text: str) -> bytes:
    content = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(content)) + content


def is_gguf(path: StrPath) -> bool:
    """True if a path is a file that begins as GGUF files do."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def text_of(metadata: Metadata, key: str) -> str:
    """Return a text of the metadata. Raises CorruptFile where it is missing or is none."""
    value = metadata.get(key)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {str(value)[:50]!r}, not a text"
        raise CorruptFile(f"the key {key!r} {problem}: download the file again")
    return value
