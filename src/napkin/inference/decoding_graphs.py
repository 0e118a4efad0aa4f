"""Decoding steps that are recorded once for each bucket of shapes and replayed, as CUDA graphs.

A step of a small model has some hundreds of launches, each of which takes the host longer than the device. A recorded
step is one launch. It reads and writes the addresses at which it was recorded: the tokens, lengths and blocks of all
sequences are copied into one buffer first, and the logits are where they were. A step of fewer sequences than its
bucket has rows of padding, which write to the block of padding and whose logits are not used; keys are those of the
bucket's longest sequence at most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from napkin.errors import first_line
from napkin.inference.paged_cache import PagedCache
from napkin.model.feed_forward import CapacityExperts
from napkin.model.kv_cache import power_of_two
from napkin.model.transformer import Transformer
from napkin.tensors import record_graph

LEAST_KEYS = 512
"""Keys of the smallest bucket."""

Outputs = tuple[Tensor, ...]
Record = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], object]]]
"""Records what a function launches: the tensors that it returns, and what launches the same again into them."""


@dataclass(frozen=True)
class Recorded:
    """A step of one bucket."""

    inputs: "StepInputs"
    logits: Float[Tensor, "row vocab_size"]
    finite: Bool[Tensor, " row"]
    replay: Callable[[], object]


class DecodingGraphs:
    """The recorded steps of a model and a cache.

    Args:
        record: records a step; None is `CudaGraphs.record` on a GPU, and nothing on a CPU.
    """

    def __init__(self, model: Transformer, cache: PagedCache, record: Record | None = None) -> None:
        self.model, self.cache = model, cache
        if record is None and cache.device.type == "cuda":
            record = CudaGraphs().record
        self._record = record
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses: list[int] = []
        self.obstacle = self._first_obstacle()
        """Why steps are not recorded; None if they are."""

    def step(
        self, tokens: Sequence[int], tables: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[Float[Tensor, "sequence vocab_size"], Bool[Tensor, ""]] | None:
        """The logits after one new token of each sequence, and True if all its hidden states are finite; lengths[b]
        tokens of sequence b are held in blocks tables[b]. They last until the next step.

        None where steps are not recorded; `obstacle` then says why.
        """
        if self.obstacle is not None or torch.is_autocast_enabled(self.cache.device.type):
            return None
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._recorded.clear()
            self._addresses = addresses
        limit = -(-self.cache.most_positions // self.cache.block_size) * self.cache.block_size
        rows, keys = power_of_two(len(tokens)), min(power_of_two(max(lengths) + 1, LEAST_KEYS), limit)
        recorded = self._recorded.get((rows, keys))
        if recorded is not None:
            recorded.inputs.fill(tokens, tables, lengths)
        else:
            inputs = StepInputs(self.cache, rows, keys)
            inputs.fill(tokens, tables, lengths)
            recorded = self._recorded_step(inputs, keys)
            if recorded is None:
                return None
            self._recorded[rows, keys] = recorded
        recorded.replay()
        n = len(tokens)
        return recorded.logits[:n], recorded.finite[:n].all()

    def _recorded_step(self, inputs: "StepInputs", keys: int) -> Recorded | None:
        assert self._record is not None

        def compute() -> Outputs:
            extending = self.cache.extend_by_one(inputs.table, inputs.ends, keys)
            hidden = self.model.hidden(inputs.tokens, cache=extending)[:, 0]
            return self.model.logits_of(hidden).float(), hidden.isfinite().all(dim=1)

        try:
            (logits, finite), replay = self._record(compute)
        except Exception as error:
            # A step that cannot be recorded may still run: an error of its own is raised in the engine's usual step.
            self.obstacle = f"a step could not be recorded: {first_line(error)}"
            self._recorded.clear()
            return None
        return Recorded(inputs, logits, finite, replay)

    def _first_obstacle(self) -> str | None:
        if self._record is None:
            return "the model is on a CPU"
        if any(isinstance(module, CapacityExperts) for module in self.model.modules()):
            return "rows of padding would take places of experts with a capacity"
        if self.cache.states is not None:
            return "layers carry states, which are kept step by step"
        return None


class StepInputs:
    """The inputs of a step in one buffer: tokens, lengths after the step, blocks."""

    def __init__(self, cache: PagedCache, rows: int, keys: int) -> None:
        self.rows, self._padding = rows, cache.padding_block
        n_blocks = -(-keys // cache.block_size)
        size = rows * (2 + n_blocks)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=cache.device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int64, device=cache.device)
        self.tokens, self.ends, self.table = self._parts(self._device)
        self._numbers = tuple(part.numpy() for part in self._parts(self._host))

    def fill(self, tokens: Sequence[int], tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Copy the numbers of some sequences; other rows are a first token in the block of padding.

        The last copy has ended, since the tokens of its step have been read.
        """
        held_tokens, ends, table = self._numbers
        n, n_blocks = len(tokens), table.shape[1]
        held_tokens[:n, 0], held_tokens[n:, 0] = tokens, 0
        ends[:n], ends[n:] = [length + 1 for length in lengths], 1
        table.fill(self._padding)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks[:n_blocks]
        self._device.copy_(self._host, non_blocking=True)

    def _parts(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.rows
        return numbers[:n, None], numbers[n : 2 * n], numbers[2 * n :].view(n, -1)


class CudaGraphs:
    """Records CUDA graphs that share the memory of what is between their inputs and outputs: one runs at a time."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        """See `record_graph`."""
        return record_graph(run, self._stream, self._pool)
