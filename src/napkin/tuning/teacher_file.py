"""A teacher's likeliest tokens for all examples, computed once and stored: the teacher is not in memory while students
train.

A safetensors file, whose header is padded to a fixed size:

| tensor | |
|---|---|
| ends | int64 [sequence]: how many trained tokens there are up to the end of each sequence |
| log_probabilities | fp32 [token, k + 1]: of the k likeliest tokens, in nats, and last of all others together |
| ids | int32 [token, k]: the likeliest tokens, likeliest first |

and one string in the header, `teacher`, a JSON object: `format`, `examples` (their checksum, tokens included), `name`
and `fingerprint` of the teacher, `temperature`, `checksum` (SHA-256 of the tensors' SHA-256, in their order). A token
takes 8 · k + 4 bytes. It is written as it is computed, gets its name when it is whole, and is memory-mapped.
"""

import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import StrPath, atomic_file, free_disk_bytes, regular
from napkin.kernels.loss.cross_entropy import loss_chunk_size
from napkin.model.transformer import Transformer
from napkin.tuning.packing import LazyExamples, Packing, SequenceMicroBatch, chunks_of, micro_batches_of
from napkin.tuning.reference_scores import described_tensor, digest_of_next, joined_digests
from napkin.units import format_bytes

FORMAT = "napkin teacher 1"
_HEADER_BYTES = 4096
_LONGEST_NAME = 2048
_HIGH, _LOW = "teacher row, high", "teacher row, low"
"""Names in `TokenSequence.values` of a token's row in the file, in two numbers that fp32 holds exactly."""
_RADIX = 2**20


class Likeliest(NamedTuple):
    """The teacher's likeliest tokens for each trained token of a sequence."""

    ids: NDArray[np.int32]
    log_probabilities: NDArray[np.float32]


@dataclass(frozen=True)
class TeacherKey:
    """The key of a file: what it was computed from."""

    examples: str
    name: str
    fingerprint: str
    temperature: float


def file_bytes(n_tokens: int, n_sequences: int, top_k: int) -> int:
    """Bytes of a file."""
    return _HEADER_BYTES + 8 * n_sequences + (8 * top_k + 4) * n_tokens


def write_teacher_file(
    path: StrPath,
    teacher: Transformer,
    examples: Sequence[Example],
    key: TeacherKey,
    *,
    top_k: int,
    max_tokens: int,
    packing: Packing = "packed",
    most_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Write a teacher's likeliest tokens of all examples, each of one sequence; how many tokens it tells of.

    Raises NapkinError where the file would be larger than `most_bytes` or than the disk has room for, and where the
    path exists.
    """
    if not 1 <= top_k <= teacher.config.vocab_size:
        raise NapkinError(f"top_k is {top_k:,}: use 1 to {teacher.config.vocab_size:,}, the teacher's tokens")
    if len(json.dumps(key.name)) > _LONGEST_NAME:
        raise NapkinError(
            f"the teacher's path has {len(key.name):,} letters: use one of at most {_LONGEST_NAME:,} bytes"
        )
    counts = np.array([example[0].n_trained for chunk in chunks_of(examples) for example in chunk], dtype="<i8")
    n_tokens, n_bytes = int(counts.sum()), file_bytes(int(counts.sum()), len(counts), top_k)
    path = Path(path)
    for limit, whose in ((most_bytes, "--max-bytes allows"), (free_disk_bytes(path), "the disk has free")):
        if limit is not None and n_bytes > limit:
            raise NapkinError(
                f"'{path}' would take {format_bytes(n_bytes)} for the {top_k:,} likeliest of {n_tokens:,} tokens, "
                f"{whose} {format_bytes(limit)}: use a smaller --top-k or fewer examples"
            )
    begins = np.cumsum([_HEADER_BYTES, 8 * len(counts), 4 * (top_k + 1) * n_tokens])
    checksums, done = [sha256(), sha256(), sha256()], 0
    with atomic_file(path) as file:
        ends = np.cumsum(counts, dtype="<i8").tobytes()
        file.seek(int(begins[0]))
        file.write(ends)
        checksums[0].update(ends)
        for chunk in chunks_of(examples):
            likeliest = likeliest_tokens(
                teacher, chunk, top_k=top_k, temperature=key.temperature, max_tokens=max_tokens, packing=packing
            )
            log_probabilities = np.concatenate([each.log_probabilities for each in likeliest]).astype("<f4")
            ids = np.concatenate([each.ids for each in likeliest]).astype("<i4")
            for region, content in ((1, log_probabilities), (2, ids)):
                file.seek(int(begins[region]) + done * content.itemsize * content.shape[1])
                file.write(content.tobytes())
                checksums[region].update(content.tobytes())
            done += len(ids)
            progress(done, n_tokens)
        about = {"format": FORMAT, **vars(key), "checksum": joined_digests(*(each.digest() for each in checksums))}
        sizes = np.diff([*begins, n_bytes])
        header = {
            "__metadata__": {"teacher": json.dumps(about)},
            "ends": described_tensor("I64", [len(counts)], 0, int(sizes[0])),
            "log_probabilities": described_tensor("F32", [n_tokens, top_k + 1], int(sizes[0]), int(sizes[:2].sum())),
            "ids": described_tensor("I32", [n_tokens, top_k], int(sizes[:2].sum()), int(sizes.sum())),
        }
        text = json.dumps(header).encode()
        file.seek(0)
        file.write((_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8))
    return n_tokens


@torch.inference_mode()
def likeliest_tokens(
    teacher: Transformer,
    examples: Sequence[Example],
    *,
    top_k: int,
    temperature: float,
    max_tokens: int,
    packing: Packing = "packed",
) -> list[Likeliest]:
    """The likeliest tokens after which each trained token of examples of one sequence stands, at a temperature."""
    row_length = teacher.config.context_length
    parts = micro_batches_of(examples, max_tokens=max_tokens, row_length=row_length, packing=packing)
    likeliest: dict[int, Likeliest] = {}
    for part in parts:
        ids, log_probabilities = _of_part(teacher, part.to(teacher.device), top_k, temperature)
        counts = [examples[number][0].n_trained for number in part.example_numbers]
        ends = np.cumsum(counts)[:-1]
        split = zip(part.example_numbers, np.split(ids, ends), np.split(log_probabilities, ends), strict=True)
        likeliest |= {number: Likeliest(own_ids, own) for number, own_ids, own in split}
    return [likeliest[number] for number in range(len(examples))]


def _of_part(
    teacher: Transformer, part: SequenceMicroBatch, top_k: int, temperature: float
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    hidden = teacher.hidden(part.rows.inputs, part.rows.documents).flatten(0, 1).index_select(0, part.rows.places)
    likeliest: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunk in hidden.split(loss_chunk_size(teacher.config.vocab_size, None)):
        logprobs = (teacher.logits_of(chunk[None])[0].float() / temperature).log_softmax(dim=1)
        values, ids = logprobs.topk(top_k, dim=1)
        # Summed over the others themselves: 1 minus the likeliest would lose the digits of a small rest.
        rest = logprobs.scatter_(1, ids, -torch.inf).logsumexp(dim=1, keepdim=True)
        likeliest.append((ids.int().cpu(), torch.cat([values, rest], dim=1).cpu()))
    if not likeliest:
        return np.empty((0, top_k), np.int32), np.empty((0, top_k + 1), np.float32)
    return torch.cat([ids for ids, _ in likeliest]).numpy(), torch.cat([each for _, each in likeliest]).numpy()


class TeacherFile:
    """A teacher's likeliest tokens, mapped into memory; opened by `TeacherFile.open`."""

    def __init__(self, path: Path, about: dict[str, Any], content: mmap.mmap, shapes: tuple[int, int, int]) -> None:
        n_sequences, n_tokens, top_k = shapes
        self.path, self.top_k, self.n_sequences = path, top_k, n_sequences
        self.key = TeacherKey(about["examples"], about["name"], about["fingerprint"], float(about["temperature"]))
        self.checksum: str = about["checksum"]
        begin = _HEADER_BYTES
        self.ends = np.frombuffer(content, "<i8", n_sequences, begin)
        begin += 8 * n_sequences
        rows = np.frombuffer(content, "<f4", n_tokens * (top_k + 1), begin)
        self.log_probabilities = rows.reshape(n_tokens, top_k + 1)
        begin += 4 * n_tokens * (top_k + 1)
        self.ids = np.frombuffer(content, "<i4", n_tokens * top_k, begin).reshape(n_tokens, top_k)

    @classmethod
    def open(cls, path: StrPath, *, vocab_size: int) -> "TeacherFile":
        """Map a file, all of whose bytes are checked once.

        Raises NapkinError for a file that `napkin tune teach` did not write, CorruptFile for one that was damaged.
        """
        path = Path(path)
        made = "make it with `napkin tune teach`"
        try:
            with open(path, "rb", opener=regular) as file:
                size = os.fstat(file.fileno()).st_size
                if int.from_bytes(file.read(8), "little") != _HEADER_BYTES - 8:
                    raise NapkinError(f"'{path}' is not a file of a teacher's likeliest tokens: {made}")
                header = msgspec.json.decode(file.read(_HEADER_BYTES - 8), type=_Header)
                about = msgspec.convert(json.loads(header.metadata["teacher"]), _About)
                (n_sequences,), (n_tokens, top_k) = header.ends.shape, header.ids.shape
                parts = 8 * n_sequences, 4 * n_tokens * (top_k + 1), 4 * n_tokens * top_k
                fits = min(n_sequences, n_tokens) >= 0 < top_k and size == _HEADER_BYTES + sum(parts)
                if about.format != FORMAT or not fits or header.log_probabilities.shape != [n_tokens, top_k + 1]:
                    raise CorruptFile(f"'{path}' was damaged: {made} again")
                if joined_digests(*(digest_of_next(file, n) for n in parts)) != about.checksum:
                    raise CorruptFile(f"'{path}' was damaged, it does not have its checksum: {made} again")
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NapkinError(f"there is no file '{path}': {made}") from None
        except (OSError, ValueError, LookupError, RecursionError, msgspec.MsgspecError) as error:
            raise CorruptFile(f"'{path}' cannot be read ({first_line(error)}): {made} again") from None
        opened = cls(path, msgspec.to_builtins(about), content, (n_sequences, n_tokens, top_k))
        wrong = len(opened.ends) and int(opened.ends[-1]) != n_tokens
        if wrong or (n_tokens and not 0 <= int(opened.ids.min()) <= int(opened.ids.max()) < vocab_size):
            raise NapkinError(f"'{path}' is of a model with another vocabulary than {vocab_size:,} tokens: {made}")
        return opened

    def rows_of(self, part: SequenceMicroBatch) -> NDArray[np.int64]:
        """The rows of a micro-batch's trained tokens, whose sequences are of `TaughtExamples`."""
        if _HIGH not in part.values:
            return np.empty(0, np.int64)
        high, low = (part.values[name].cpu().numpy().astype(np.int64) for name in (_HIGH, _LOW))
        return high * _RADIX + low


class TaughtExamples(LazyExamples):
    """Examples of one sequence each that know the rows of a file, in which they begin at sequence `first`."""

    def __init__(self, examples: Sequence[Example], file: TeacherFile, first: int = 0) -> None:
        self.examples, self.file, self.first = examples, file, first

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, number: int) -> Example:
        """The example with the rows of its trained tokens."""
        (sequence,) = self.examples[number]
        place = self.first + number
        begin = 0 if place == 0 else int(self.file.ends[place - 1])
        rows = np.arange(begin, int(self.file.ends[place]))
        high, low = (each.astype(np.float32) for each in np.divmod(rows, _RADIX))
        return (TokenSequence(sequence.tokens, sequence.loss_mask, {**sequence.values, _HIGH: high, _LOW: low}),)


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    ends: _Tensor
    log_probabilities: _Tensor
    ids: _Tensor
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class _About(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    examples: str
    name: str
    fingerprint: str
    temperature: float
    checksum: str
