"""Log-probabilities of a reference model, computed once and kept: the model is not held in memory while another trains.

reference-train.safetensors and reference-held-out.safetensors in the folder of the run:

| tensor | |
|---|---|
| ends | int64 [sequence]: how many log-probabilities there are up to the end of each sequence, example by example |
| log_probabilities | fp32 [token]: of each trained token, in nats |

and a header with one string, `reference`, a JSON object: `format`, `units` (checksum of the examples), `start`
(fingerprint of the reference's weights), `precision` (that it was computed in), `checksum` (SHA-256 of the tensors'
SHA-256, in their order). They are written as they are computed and memory-mapped where they are read. A file that is
damaged, or of other examples or weights, is computed again.

When the reference's log-probabilities are computed: before the first step, by the run's own model.

Its weights are those of the reference until then, so there is never a second model in memory. A run that is resumed
reads what it has kept; if the file is gone, the base model is loaded, used and freed. Where adapters are trained, the
model without them is the reference at any time.
"""

import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.parallel_model import ParallelModel
from napkin.errors import NapkinError, first_line
from napkin.files import atomic_file, regular
from napkin.model.adapters import adapters_off
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.signals import Interrupted, agree_on_signal
from napkin.tuning.example_plan import REFERENCE_SECONDS, REFERENCE_TOKENS
from napkin.tuning.method import open_base, reference_model
from napkin.tuning.packing import LazyExamples, Packing, chunks_of
from napkin.tuning.sequence_step import REFERENCE, score_examples
from napkin.units import format_seconds

FORMAT = "napkin reference 2"
_HEADER_BYTES = 1024
"""The header's size, with the eight bytes that say it. Spaces fill it: its content is known when all is written."""
_AT_A_TIME = 2**20


@dataclass(frozen=True)
class ReferenceKey:
    """Everything that a reference's log-probabilities depend on."""

    examples: str
    """The checksum of the examples, tokens included."""
    base: str
    """The fingerprint of the weights; "" where any will do."""
    precision: str

    @property
    def header(self) -> dict[str, str]:
        return {"format": FORMAT, "units": self.examples, "start": self.base, "precision": self.precision}


class ReferenceScores:
    """The log-probabilities of a file."""

    def __init__(self, ends: NDArray[np.int64], log_probabilities: NDArray[np.float32]) -> None:
        self._ends, self._log_probabilities = ends, log_probabilities

    def of_sequence(self, number: int) -> Float32[np.ndarray, " counted"]:
        """Copy those of a sequence, by its number among the sequences of all examples."""
        begin = 0 if number == 0 else int(self._ends[number - 1])
        return np.array(self._log_probabilities[begin : int(self._ends[number])])


class ReferencedExamples(LazyExamples):
    """Examples of `size` sequences each, which get a reference's log-probabilities once these are known."""

    def __init__(self, examples: Sequence[Example], size: int = 2) -> None:
        self.examples, self.size = examples, size
        self.scores: ReferenceScores | None = None

    @property
    def n_sequences(self) -> int:
        return len(self.examples) * self.size

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, number: int) -> Example:
        """An example, with `REFERENCE` among its sequences' values if that is known."""
        example, scores = self.examples[number], self.scores
        if scores is None:
            return example
        return tuple(
            sequence.with_values(**{REFERENCE: scores.of_sequence(number * self.size + place)})
            for place, sequence in enumerate(example)
        )


class ReferenceWriter:
    """Writes log-probabilities sequence by sequence; made by `reference_writer`."""

    def __init__(self, file: BinaryIO, n_sequences: int) -> None:
        self._file, self._left = file, n_sequences
        self._place, self._end = _HEADER_BYTES, _HEADER_BYTES + 8 * n_sequences
        self._ends_checksum, self._checksum = sha256(), sha256()
        self.n_tokens = 0

    def add(self, log_probabilities: Sequence[NDArray[np.float32]]) -> None:
        """Write the log-probabilities of the next sequences."""
        ends = self.n_tokens + np.cumsum([len(each) for each in log_probabilities], dtype="<i8")
        values = np.concatenate(log_probabilities).astype("<f4")
        self._file.seek(self._place)
        self._file.write(ends.tobytes())
        self._file.seek(self._end + 4 * self.n_tokens)
        self._file.write(values.tobytes())
        self._ends_checksum.update(ends.tobytes())
        self._checksum.update(values.tobytes())
        self._place += ends.nbytes
        self._left -= len(ends)
        self.n_tokens += len(values)

    def finish(self, key: ReferenceKey) -> None:
        assert not self._left
        n_ends = self._end - _HEADER_BYTES
        reference = {**key.header, "checksum": joined_digests(self._ends_checksum.digest(), self._checksum.digest())}
        header = {
            # One string: the order of several would differ from file to file.
            "__metadata__": {"reference": json.dumps(reference)},
            "ends": described_tensor("I64", [n_ends // 8], 0, n_ends),
            "log_probabilities": described_tensor("F32", [self.n_tokens], n_ends, n_ends + 4 * self.n_tokens),
        }
        text = json.dumps(header).encode().ljust(_HEADER_BYTES - 8)
        assert len(text) == _HEADER_BYTES - 8
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)


@contextmanager
def reference_writer(path: Path, key: ReferenceKey, n_sequences: int) -> Iterator[ReferenceWriter]:
    """Open a file that replaces an earlier one, whole, when the block ends, and leaves it if the block raises."""
    with atomic_file(path, overwrite=True) as file:
        writer = ReferenceWriter(file, n_sequences)
        yield writer
        writer.finish(key)


def read_reference_scores(path: Path, key: ReferenceKey, n_sequences: int) -> tuple[ReferenceScores | None, str]:
    """Map a file's log-probabilities into memory, and return them and ""; or None, and what is wrong with the file."""
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = min(int.from_bytes(file.read(8), "little"), _HEADER_BYTES)
            header = msgspec.json.decode(file.read(header_bytes), type=_Header)
            reference = msgspec.json.decode(header.metadata["reference"], type=dict[str, str])
            for name, value in key.header.items():
                if value and reference.get(name) != value:
                    return None, _OTHER[name]
            begin, n_tokens = 8 + header_bytes, header.log_probabilities.shape[0]
            parts = 8 * n_sequences, 4 * n_tokens
            if header.ends.shape != [n_sequences] or size != begin + sum(parts):
                return None, "it is damaged"
            if joined_digests(*(digest_of_next(file, n) for n in parts)) != reference.get("checksum"):
                return None, "it is damaged"
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None, "there is none"
    except (OSError, ValueError, LookupError, RecursionError) as error:
        return None, f"it cannot be read ({first_line(error)})"
    ends = np.frombuffer(content, "<i8", n_sequences, begin)
    return ReferenceScores(ends, np.frombuffer(content, "<f4", n_tokens, begin + parts[0])), ""


_OTHER = {
    "format": "it is not a file of a reference",
    "units": "the data, or their tokens, have changed",
    "start": "the weights of the model that tuning starts from have changed",
    "precision": "it was computed in another precision",
}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    ends: _Tensor
    log_probabilities: _Tensor
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def described_tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """A tensor in the header of a safetensors file; `begin` and `end` count bytes behind the header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def digest_of_next(file: BinaryIO, n: int) -> bytes:
    """SHA-256 of the next n bytes of a file, which are read a piece at a time."""
    digest = sha256()
    while n > 0 and (chunk := file.read(min(n, _AT_A_TIME))):
        digest.update(chunk)
        n -= len(chunk)
    return digest.digest()


def joined_digests(*digests: bytes) -> str:
    """SHA-256 of several digests, in hexadecimal digits."""
    return sha256(b"".join(digests)).hexdigest()


def with_stand_ins(example: Example) -> Example:
    """Give an example zeros for a reference's log-probabilities, for counting."""
    return tuple(each.with_values(**{REFERENCE: np.zeros(each.n_trained, np.float32)}) for each in example)


WATCHED = "reference"
"""The name of this pass among the seconds of a run."""


class ReferencePass(Callback):
    """Gives examples a reference's log-probabilities before the first step.

    `base` is the folder of the reference; `examples` are named by what is part of a file's name, with their checksum.
    """

    def __init__(
        self, base: str, examples: dict[str, tuple[ReferencedExamples, str]], *, max_tokens: int, packing: Packing
    ) -> None:
        self.base, self.examples, self.max_tokens = base, examples, max_tokens
        self.packing: Packing = packing
        self._computed: dict[str, int] = {}
        """Number of tokens that this process has computed, by name."""

    def on_start(self, loop: TrainingLoop) -> None:
        """Read the log-probabilities, or compute and write them; a collective. A signal interrupts it: the run takes no
        step then, and computes them when it is resumed."""
        for name, (examples, checksum) in self.examples.items():
            if len(examples):
                self._give(loop, name, examples, checksum)

    def metered(self, loop: TrainingLoop) -> dict[str, float]:
        """Tokens and seconds of the whole pass, by the names of the plan's rows; nothing where some were read."""
        if any(len(examples) and name not in self._computed for name, (examples, _) in self.examples.items()):
            return {}
        return {REFERENCE_TOKENS: sum(self._computed.values()), REFERENCE_SECONDS: loop.watch.seconds[WATCHED]}

    def _give(self, loop: TrainingLoop, name: str, examples: ReferencedExamples, checksum: str) -> None:
        path = loop.run.path / f"reference-{name}.safetensors"

        def key_of(fingerprint: str) -> ReferenceKey:
            return ReferenceKey(checksum, fingerprint, loop.preparation.precision.name)

        def look() -> tuple[str, str]:
            # A run that has taken steps keeps its reference, whatever has become of the folder since.
            fingerprint = loop.frozen or ("" if loop.step else open_base(self.base).fingerprint)
            return fingerprint, read_reference_scores(path, key_of(fingerprint), examples.n_sequences)[1]

        # All ranks decide the same; then each reads the file.
        fingerprint, problem = loop.ranks.broadcast_from_zero(look)
        if problem:
            if loop.ranks.is_rank_zero and path.exists():
                loop.on_message(f"'{path}' is computed again: {problem}")
            model = loop.train_state.parallel_model
            if loop.step and loop.frozen is None:
                reopened = open_base(self.base)
                fingerprint = reopened.fingerprint
                model = ParallelModel(reference_model(reopened, loop.preparation.precision), loop.ranks, model.layout)
            try:
                self._compute(loop, model, name, examples, path, key_of(fingerprint))
            except Interrupted:
                return
            # The other ranks wait until the file exists.
            loop.ranks.broadcast_from_zero(lambda: None)
        examples.scores, problem = read_reference_scores(path, key_of(fingerprint), examples.n_sequences)
        if examples.scores is None:
            raise NapkinError(f"'{path}' cannot be used, {problem}: continue with `napkin resume {loop.run.path}`")

    def _compute(
        self,
        loop: TrainingLoop,
        model: ParallelModel,
        name: str,
        examples: ReferencedExamples,
        path: Path,
        key: ReferenceKey,
    ) -> None:
        """Compute the log-probabilities and write them, on rank 0. Raises Interrupted where a signal interrupts it."""
        began, n_tokens = time.perf_counter(), 0
        with ExitStack() as stack:
            stack.enter_context(loop.watch(WATCHED))
            stack.enter_context(adapters_off(loop.train_state.model))
            writer = None
            if loop.ranks.is_rank_zero:
                writer = stack.enter_context(reference_writer(path, key, examples.n_sequences))
            for chunk in chunks_of(examples.examples):
                if agree_on_signal(loop.ranks, loop.interruption) is not None:
                    raise Interrupted
                # Without values: sequences of an example may have different ones.
                bare = [tuple(TokenSequence(each.tokens, each.loss_mask) for each in example) for example in chunk]
                scores = score_examples(
                    model,
                    bare,
                    max_tokens=self.max_tokens,
                    packing=self.packing,
                    autocast=loop.preparation.precision.autocast,
                )
                if writer is not None:
                    writer.add([sequence.log_probabilities for example in scores for sequence in example])
                n_tokens += sum(len(sequence.tokens) for example in bare for sequence in example)
        self._computed[name] = n_tokens
        if writer is not None:
            seconds = format_seconds(time.perf_counter() - began)
            loop.on_message(
                f"log-probabilities of the reference, {writer.n_tokens:,} tokens in {seconds}: kept in '{path}'"
            )
