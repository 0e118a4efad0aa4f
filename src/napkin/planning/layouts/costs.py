"""The costs of the parts of a model on one rank of a layout: priced once, shared by all layouts of a search."""

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.ledger import Row
from napkin.accounting.pipeline_simulation import StageSeconds
from napkin.accounting.pricing import roofline_seconds
from napkin.distributed.parallel_model import shard_dimension
from napkin.errors import NapkinError
from napkin.hardware.cluster import Interconnect
from napkin.hardware.target import cuda_target
from napkin.model.transformer import Transformer
from napkin.planning.layouts.counted_parts import (
    BlockKind,
    CountedParts,
    Part,
    Size,
    block_kinds,
    count_parts,
    one_of_each,
    with_tensor,
)
from napkin.planning.layouts.stack import NAPKIN, Stack
from napkin.planning.step.machine import CatalogueMachine
from napkin.planning.step.site import Site
from napkin.recipe.layout import Layout
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.compile import Recompute

OUTSIDE_BYTES = 4
"""Bytes per parameter outside of blocks, which FSDP gathers and reduces in fp32."""
BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are all-reduced at a time: torch's default, `bucket_cap_mb`."""
PRODUCTS_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_CACHED = (
    "parts shapes parameters padded rows calls seconds once_seconds attention_seconds least_seconds launch_seconds "
    "head_seconds kept_bytes working_bytes head_working_bytes"
)
"""Methods of `LayoutCosts` whose answers are remembered, for its copies on other numbers of devices too."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The variables of a layout's plan: the layout, and how each rank computes its rows."""

    layout: Layout
    micro_batch_size: int
    """Sequences per forward pass of the ranks that compute them together."""
    recompute: Recompute = "none"
    loss_chunk_size: int = 512

    @property
    def size(self) -> Size:
        """The sizes on which the operators of one rank depend."""
        layout = self.layout
        return Size(self.micro_batch_size / layout.context, layout.tensor, layout.expert, layout.whole_experts)


def choice_of(resolved: ResolvedRecipe) -> Choice:
    training = resolved.per_device.training
    return Choice(
        layout=resolved.layout,
        micro_batch_size=training.resolved_micro_batch_size,
        recompute=training.recompute,
        loss_chunk_size=training.resolved_loss_chunk_size,
    )


_ROUNDING_BYTES = 4
"""Bytes per number that is read in bf16 and written in fp8, twice."""


def _one_of(row: Row, experts: int) -> Row:
    """The product of one of several equal experts."""
    assert row.contraction is not None
    return dataclasses.replace(
        row,
        flops=row.flops // experts,
        causal_flops=row.causal_flops // experts,
        bytes_read=row.bytes_read // experts,
        bytes_written=row.bytes_written // experts,
        contraction=(1, *row.contraction[1:]),
    )


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one tensor-parallel rank, before sharding."""

    shared: dict[BlockKind, int]
    """Parameters of a block without its experts."""
    experts: dict[BlockKind, int]
    """Parameters of all experts of a block."""
    embedding: int
    """Embedding and learned positions."""
    head: int
    """Last norm, and the head if it is not the embedding."""

    def of_blocks(self, blocks: Iterable[tuple[BlockKind, int]]) -> tuple[int, int]:
        """Parameters of the given number of blocks of each kind: those outside of experts, and those of experts."""
        pairs = [(self.shared[kind] * times, self.experts[kind] * times) for kind, times in blocks]
        return sum(each[0] for each in pairs), sum(each[1] for each in pairs)

    @property
    def largest_block(self) -> int:
        """Parameters of the block that has most, with its experts."""
        return max(self.shared[kind] + self.experts[kind] for kind in self.shared)


Shape = tuple[BlockKind | Literal["embedding", "head"], bool, str, torch.Size]
"""A parameter's part of the model, whether it belongs to experts, its own name and its shape."""


def _sums(numbers: Iterable[tuple[BlockKind | Literal["embedding", "head"], bool, int]]) -> Parameters:
    outside = {"embedding": 0, "head": 0}
    shared, experts = Counter[BlockKind](), Counter[BlockKind]()
    for part, of_experts, number in numbers:
        if isinstance(part, BlockKind):
            (experts if of_experts else shared)[part] += number
        else:
            outside[part] += number
    return Parameters(shared, experts, **outside)


class LayoutCosts:
    """Seconds and bytes of the parts of a model on one rank of a machine; counted and priced when first asked for."""

    def __init__(
        self,
        resolved: ResolvedRecipe,
        machine: CatalogueMachine,
        tensors: Sequence[int],
        *,
        usd_per_hour: float | None = None,
        stack: Stack = NAPKIN,
        progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        """`tensors` are the sizes of tensor that may be asked for, `usd_per_hour` is of one device, `stack` is the
        program that trains.

        Raises NapkinError where it is not known what connects the devices.
        """
        self.resolved = resolved
        self.machine = machine
        self.tensors = tuple(tensors)
        self.ceilings = machine.ceilings(resolved.precision)
        self.usd_per_hour = usd_per_hour
        self.stack = stack
        self.site = self._site(machine)
        if self.site.interconnect is None:
            raise NapkinError(
                f"it is not known what connects {machine.device.name}: describe the device in a TOML file with its "
                "link_bandwidth, as `napkin hardware` shows them"
            )
        self.interconnect: Interconnect = self.site.interconnect.slower(stack.sending)
        self.progress = progress
        self.model = resolved.recipe.model
        self.blocks = tuple(Counter(block_kinds(self.model)).items())
        """The kinds of the model's blocks, and how many it has of each."""
        self.in_fp8 = resolved.precision.name == "fp8"
        self.activation_bytes = PRODUCTS_BYTES[resolved.precision.products]
        """Bytes per number in the activations that ranks of tensor or context send each other."""
        self.gather_bytes = PRODUCTS_BYTES[resolved.gather_format]
        self.reduce_bytes = PRODUCTS_BYTES[resolved.recipe.training.reduce_format]
        if stack.reduces_in_fp32 is not None:
            self.reduce_bytes = PRODUCTS_BYTES["fp32" if stack.reduces_in_fp32 else "bf16"]
        self.weight_bytes = resolved.precision.bytes_per_weight
        target = cuda_target(resolved.counted_for)
        self.workspace_bytes = 0 if target is None else target.workspace_bytes
        """Bytes that cuBLAS keeps for each thread that multiplies; the working bytes of a block include those of two
        threads, the working bytes of the head none."""
        for name in _CACHED.split():
            setattr(self, name, functools.cache(getattr(self, name)))

    def on(self, machine: CatalogueMachine) -> "LayoutCosts":
        """The same parts on another number of the same devices."""
        other = copy.copy(self)
        other.machine, other.site = machine, self._site(machine)
        other.resolved = dataclasses.replace(self.resolved, world_size=machine.n_devices)
        return other

    def priced_on(self, machine: CatalogueMachine, stack: Stack) -> "LayoutCosts":
        """The same counts, priced on other devices or as another stack computes them."""
        other = LayoutCosts(
            self.resolved, machine, self.tensors, usd_per_hour=self.usd_per_hour, stack=stack, progress=self.progress
        )
        other.parts, other.shapes, other.parameters = self.parts, self.shapes, self.parameters
        return other

    def _site(self, machine: CatalogueMachine) -> Site:
        site, price = machine.site(self.resolved.precision, self.ceilings), self.usd_per_hour
        return site if price is None else dataclasses.replace(site, usd_per_hour=machine.n_devices * price, offer=None)

    def parts(self, recompute: Recompute) -> CountedParts:
        self.progress(f"counting a block, recompute {recompute}")
        plain = None if recompute == "none" else self.parts("none")
        return count_parts(self.resolved, recompute, self.tensors, plain)

    def shapes(self, tensor: int) -> list[Shape]:
        """The parameters of one rank of tensor, of blocks those of the first of each kind."""
        model = one_of_each(with_tensor(self.resolved, tensor).recipe.model)
        with FakeTensorMode():
            built = Transformer(model)
        kinds = block_kinds(model)
        shapes: list[Shape] = []
        for name, parameter in built.named_parameters():
            path = name.split(".")
            if path[0] != "blocks":
                part = "embedding" if path[0] in ("embedding", "positions") else "head"
                shapes.append((part, False, path[-1], parameter.shape))
            elif kinds.index(kind := kinds[int(path[1])]) == int(path[1]):
                shapes.append((kind, "experts" in path, path[-1], parameter.shape))
        return shapes

    def parameters(self, tensor: int) -> Parameters:
        return _sums((part, of_experts, shape.numel()) for part, of_experts, _, shape in self.shapes(tensor))

    def padded(self, tensor: int, expert: int, shards: int, shards_of_experts: int, whole: bool = False) -> Parameters:
        """Parameters of one rank of tensor and of expert, as FSDP2 pads them to equal shards; `whole` experts are not
        divided by tensor."""
        sizes = []
        shapes = self.shapes(tensor)
        if whole:
            shapes = [each for each in shapes if not each[1]] + [each for each in self.shapes(1) if each[1]]
        for part, of_experts, name, shape in shapes:
            among, taken = shards, ()
            if of_experts:
                shape, among = torch.Size((shape[0] // expert, *shape[1:])), shards_of_experts
                # Ranks of tensor divide the width of experts.
                taken = () if tensor == 1 or whole else (1,) if name == "up" else (2,)
            length = shape[shard_dimension(shape, among, taken)]
            sizes.append((part, of_experts, shape.numel() // length * among * -(-length // among)))
        return _sums(sizes)

    def rows(self, part: Part, size: Size, recompute: Recompute) -> list[tuple[Row, bool, bool]]:
        """The calls of a part; whether each copies weights, and whether it is for the gradient of weights."""
        operators = self.parts(recompute).operators(part, size)
        rows = (self._as_computed(row, size) for row in operators.at(size))
        return list(zip(rows, operators.copies_weights.tolist(), operators.of_weights.tolist(), strict=True))

    def _as_computed(self, row: Row, size: Size) -> Row:
        """A row of experts as the products of single experts, with padding, in the stack's format."""
        if row.contraction is None or not row.module.endswith(".experts") or row.contraction[0] != 1:
            return row
        _, m, n, k = row.contraction
        experts = max(1, self.model.n_experts // size.expert)
        more = (self.stack.exchange.padded_rows - 1) / 2
        # Tokens are the rows of a product; of a gradient of weights, what it sums over.
        m, k = (m, k / experts + more) if row.operator.endswith("outer") else (m / experts + more, k)
        narrow = self.stack.fp8_experts and self.in_fp8
        contraction = (experts, max(1, round(m)), n, max(1, round(k)))
        return dataclasses.replace(row, contraction=contraction, format="fp8-e4m3" if narrow else row.format)

    def calls(self, part: Part, size: Size, recompute: Recompute) -> list[tuple[Row, bool, bool, bool, int]]:
        """The distinct calls of a part: copies of weights or not, for the gradient of weights or not, with a size that
        grows with the tokens or not; and how often a part has each."""
        operators = self.parts(recompute).operators(part, size)
        grows = abs(operators.figures[1] + operators.figures[3]).sum(axis=1) > 0.5
        numbers = Counter(
            (dataclasses.replace(row, module="", call=None, bytes_allocated=0, bytes_kept=0), copies, of_weights, grown)
            for (row, copies, of_weights), grown in zip(self.rows(part, size, recompute), grows.tolist(), strict=True)
        )
        return [(*call, times) for call, times in numbers.items()]

    def seconds(self, part: Part, size: Size, recompute: Recompute, gathered: bool) -> StageSeconds:
        """Seconds of one micro-batch. `gathered` parameters are in the format of the products already."""
        sums = {"forward": 0.0, "backward_input": 0.0, "backward_weight": 0.0, "recompute": 0.0, "optimizer": 0.0}
        for row, copies_weights, of_weights, grows, times in self.calls(part, size, recompute):
            if gathered and copies_weights and row.phase in ("forward", "recompute"):
                continue
            if self._is_made_once(row, grows) or (recompute == "full" and self._is_past_stop(row)):
                continue
            phase = "forward" if row.in_forward_pass else row.phase
            if phase == "backward":
                phase = "backward_weight" if of_weights else "backward_input"
            sums[phase] += times * self._row_seconds(row)
        return StageSeconds(sums["forward"], sums["backward_input"], sums["backward_weight"], sums["recompute"])

    def once_seconds(self, part: Part, size: Size, recompute: Recompute) -> float:
        """Seconds per step of a part's calls that do not depend on its tokens, where the stack makes them once."""
        calls = self.calls(part, size, recompute)
        made = ((row, times) for row, _, _, grows, times in calls if self._is_made_once(row, grows))
        return sum(times * self._row_seconds(row) for row, times in made)

    def _is_made_once(self, row: Row, grows: bool) -> bool:
        return self.stack.casts_once and row.contraction is None and not grows

    def _is_past_stop(self, row: Row) -> bool:
        """True for the experts' last products where recomputation stops before them."""
        if not self.stack.stops_recomputation or row.phase != "recompute" or row.contraction is None:
            return False
        return self.model.n_experts > 0 and "grouped" in row.operator and row.contraction[2] == self.model.d_model

    def _row_seconds(self, row: Row) -> float:
        experts = row.contraction[0] if row.contraction and "grouped" in row.operator else 1
        if experts > 1 and self.stack.experts_one_by_one:
            seconds = experts * roofline_seconds(_one_of(row, experts), self.ceilings)
        else:
            seconds = roofline_seconds(row, self.ceilings)
        if experts > 1 and row.contraction and row.format.startswith("fp8") and not row.operator.endswith("outer"):
            # Their inputs are rounded to fp8, once as they are and once transposed for the gradients of weights.
            numbers = experts * row.contraction[1] * row.contraction[3]
            seconds += _ROUNDING_BYTES * numbers / self.ceilings.bandwidth(_ROUNDING_BYTES * numbers)
        seconds *= self.stack.computing
        return seconds * self.ceilings.fused_share if self.stack.fuses and row.contraction is None else seconds

    def host_seconds(self, part: Part, size: Size, recompute: Recompute) -> float:
        """Least seconds of a part, in both passes, for the host that launches its kernels."""
        return self.stack.host_seconds * len(self.rows(part, size, recompute))

    def launch_seconds(self, part: Part, size: Size, recompute: Recompute) -> float:
        """Seconds of starting the kernels of a part."""
        return len(self.rows(part, size, recompute)) * self.ceilings.seconds_per_operator

    def attention_seconds(self, kind: BlockKind, size: Size, recompute: Recompute) -> tuple[float, float]:
        """Seconds of a block's fused attention alone, forward and backward: what hides the ring's sends."""
        sums = [0.0, 0.0]
        for row, _, _ in self.rows(kind, size, recompute):
            if row.is_fused_attention:
                sums[row.phase != "forward"] += roofline_seconds(row, self.ceilings)
        return sums[0], sums[1]

    def expert_seconds(self, kind: BlockKind, size: Size, recompute: Recompute) -> float:
        """Seconds of the experts of a block, in both passes of a micro-batch."""
        rows = (row for row, _, _ in self.rows(kind, size, recompute))
        return sum(roofline_seconds(row, self.ceilings) for row in rows if row.module.endswith(".experts"))

    def kept_bytes(self, part: Part, size: Size, recompute: Recompute, gathered: bool) -> float:
        """Bytes that one micro-batch keeps from its forward to its backward pass."""
        activations, copies = self.parts(recompute).operators(part, size).kept_bytes(size)
        return activations + (0 if gathered else copies)

    def working_bytes(self, kind: BlockKind, size: Size, recompute: Recompute) -> float:
        """Bytes that come and go in the backward pass of a block."""
        whole = self.gathered_activation_bytes(size) if size.tensor > 1 else 0.0
        return self.parts(recompute).working_bytes(kind, size) + 2 * whole

    def head_working_bytes(self, size: Size, loss_chunk_size: int, recompute: Recompute) -> float:
        """Bytes that come and go in norm, head and loss."""
        chunk = min(loss_chunk_size / self.model.context_length, size.sequences)
        return self.parts(recompute).head_working_bytes(size, chunk)

    def tokens(self, size: Size) -> float:
        """Tokens of a micro-batch, on one rank."""
        return size.sequences * self.model.context_length

    def gathered_activation_bytes(self, size: Size) -> float:
        """Bytes of the hidden states of a micro-batch, in the format that ranks of tensor send."""
        return self.tokens(size) * self.model.d_model * self.activation_bytes

    def head_seconds(self, size: Size, loss_chunk_size: int, recompute: Recompute) -> StageSeconds:
        """Seconds of norm, head and loss of one micro-batch."""
        tokens = self.tokens(size)
        chunk = min(float(loss_chunk_size), tokens)
        chunks, rest = divmod(tokens, chunk)
        of_chunk = self.seconds("chunk", size._replace(sequences=chunk / self.model.context_length), recompute, False)
        seconds = self.seconds("head", size, recompute, False) + of_chunk * int(chunks)
        if rest >= 1:
            last = size._replace(sequences=rest / self.model.context_length)
            seconds += self.seconds("chunk", last, recompute, False)
        return seconds

    def least_seconds(self, size: Size, recompute: Recompute, gathered: bool, loss_chunk_size: int) -> float:
        """Seconds of one micro-batch through the whole model on one rank, without collectives."""
        every = self.resolved.recipe.training.recompute_every
        seconds = self.head_seconds(size, loss_chunk_size, "none")
        for kind, number in self.blocks:
            again = number // every if recompute != "none" else 0
            seconds += self.seconds(kind, size, recompute, gathered) * again
            seconds += self.seconds(kind, size, "none", gathered) * (number - again)
        return seconds.forward + seconds.of("backward")

    def update_seconds(self, parameters: float, blocks: int) -> float:
        """Seconds of clipping and the optimizer, on that many parameters in that many blocks."""
        parts = self.parts("none")
        share = parameters / parts.counted_parameters
        launch = self.ceilings.seconds_per_operator
        rows = parts.parts["update"].rows
        bound = sum(max(0.0, roofline_seconds(row, self.ceilings) - launch) for row in rows)
        memory = self.stack.memory
        if memory is not None:
            # Gradients are read for their norm and for the update, and zeroed; the state is read and written.
            each = 3 * memory.gradient_bytes + 2 * memory.state_bytes + memory.weight_bytes
            touched = each * parts.counted_parameters
            bound = touched / self.ceilings.bandwidth(touched)
        calls = len(rows) + parts.update_calls_per_block * (blocks - parts.counted_blocks)
        return share * bound + launch * max(1, calls)

    def accumulate_seconds(self, parameters: float) -> float:
        """Seconds of adding a micro-batch's gradients to those before it: each number is read twice and written
        once."""
        if self.stack.adds_in_products:
            return 0.0
        touched = 3 * self.weight_bytes * parameters
        return touched / self.ceilings.bandwidth(touched) if touched else 0.0

    def model_flops(self, sequences: int) -> float:
        """FLOPs of a step of the whole model, recomputation left out, attention over all pairs."""
        counted = self.parts("none").parts
        parts: list[tuple[Part, int]] = [*self.blocks, ("head", 1), ("chunk", 1)]
        return sequences * sum(times * float(counted[part].figures_at(Size(1.0))[:, 0].sum()) for part, times in parts)
