"""The operators of one rank of any layout, part by part: embedding, a block, head, update.

Counting the step of every layout would take seconds each. Bytes and FLOPs of an operator are bilinear in the sequences
of a micro-batch and in 1 / tensor (activations grow with the one, matrices with the other, products with both), so a
model of one block of each kind is counted at four points, and the operators of every other rank follow exactly: of b
sequences as well as of the b / context that a rank of a ring computes. Norms and the residual stream, whose sequences
the ranks of tensor split, have 1 / tensor of the sequences; experts, which the ranks of expert split, 1 / expert of the
matrices.

Some calls are made at some sizes alone: of one sequence, or of one head, a tensor is a view where others have to be
copied. Parts with such calls are counted for each size of tensor, and for one sequence apart from several.
"""

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from napkin.accounting.ledger import Ledger, Row
from napkin.model.config import ModelConfig, TokenMixer
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.train_step.compile import Recompute
from napkin.train_step.step_ledger import count_step


class BlockKind(NamedTuple):
    """What determines the operators of a block: blocks of equal kind cost the same."""

    mixer: TokenMixer
    window: int | None
    """The window of its attention."""
    experts: bool
    sharing: tuple[int, int] = (0, 1)
    """Its place among the blocks that share keys and values, and their number: the gradients of all but the last are
    added to those of the next."""


Part = BlockKind | Literal["embedding", "head", "chunk", "update"]
"""`chunk` is one chunk of the loss."""

_FIGURES = ("flops", "causal_flops", "recomputed_flops", "bytes_read", "bytes_written", "bytes_allocated", "bytes_kept")
_MANY_TOKENS = 2**20
"""Tokens of a micro-batch that is counted."""


class Size(NamedTuple):
    """The sizes on which the operators of a rank depend."""

    sequences: float
    """Sequences of a micro-batch: a fraction where ranks split a sequence."""
    tensor: int = 1
    expert: int = 1
    whole_experts: bool = False
    """True if each rank of tensor holds whole experts of its own, and receives a part of the tokens for them."""


@dataclass(frozen=True)
class Operators:
    """Calls of one part, in order, at any size."""

    rows: tuple[Row, ...]
    """The rows as they were counted at the first point."""
    figures: NDArray[np.float64]
    """[coefficient, row, figure]: of 1, sequences, 1 / tensor and their product."""
    split_sequence: NDArray[np.bool_]
    """For each call, True if the ranks of tensor split its sequence."""
    of_experts: NDArray[np.bool_]
    """For each call, True if it computes with the matrices of experts."""

    def at(self, size: Size) -> list[Row]:
        """The calls of a rank of that size; views are left out."""
        figures = self.figures_at(size)
        rows: list[Row] = []
        for row, each in zip(self.rows, figures.round().astype(np.int64).tolist(), strict=True):
            flops, causal, recomputed, read, written, allocated, kept, *contraction = each
            rows.append(
                Row(
                    row.module,
                    row.phase,
                    row.operator,
                    row.format,
                    flops,
                    causal,
                    recomputed,
                    None if row.contraction is None else tuple(max(1, number) for number in contraction),  # pyright: ignore[reportArgumentType]
                    read,
                    written,
                    allocated,
                    kept,
                    early=row.early,
                )
            )
        return rows

    def figures_at(self, size: Size) -> NDArray[np.float64]:
        """[row, figure]: those of `_FIGURES`, then the four numbers of a contraction."""
        whole = self.of_experts & size.whole_experts
        part = np.where(whole, 1.0, 1 / size.tensor)[:, None]
        split = self.split_sequence | whole
        sequences = np.where(split, size.sequences / size.tensor, size.sequences)[:, None]
        fixed = self.figures[0] + part * self.figures[2]
        matrices = np.where(self.of_experts, 1 / size.expert, 1.0)[:, None]
        # A contraction's own numbers are those of all experts together.
        fixed = np.concatenate([fixed[:, : len(_FIGURES)] * matrices, fixed[:, len(_FIGURES) :]], axis=1)
        return fixed + sequences * (self.figures[1] + part * self.figures[3])

    def kept_bytes(self, size: Size) -> tuple[float, float]:
        """Bytes that the forward pass keeps for the backward pass: activations, and copies of weights."""
        kept = self.figures_at(size)[:, _FIGURES.index("bytes_kept")]
        return float(kept[~self.copies_weights].sum()), float(kept[self.copies_weights].sum())

    @functools.cached_property
    def copies_weights(self) -> NDArray[np.bool_]:
        """True if a call only changes the format of weights, or of their gradients: its size has no sequences in it."""
        kept = self.figures[1, :, _FIGURES.index("bytes_written")] + self.figures[3, :, _FIGURES.index("bytes_written")]
        return np.array([row.operator == "_to_copy" for row in self.rows], dtype=np.bool_) & (abs(kept) < 0.5)

    @functools.cached_property
    def of_weights(self) -> NDArray[np.bool_]:
        """True if a call of the backward pass is for the gradient of weights: a product over tokens, or a call whose
        size has no sequences in it."""
        slopes = abs(self.figures[1] + self.figures[3])
        inner = slopes[:, len(_FIGURES) + 3] > 0
        outer = slopes[:, len(_FIGURES) + 1] > 0
        touches = slopes[:, _FIGURES.index("bytes_written")] + slopes[:, _FIGURES.index("bytes_read")] > 0
        return np.array(
            [
                row.phase == "backward" and ((inner[at] and not outer[at]) if row.contraction else not touches[at])
                for at, row in enumerate(self.rows)
            ],
            dtype=np.bool_,
        )


@dataclass(frozen=True)
class CountedParts:
    """All parts of a rank with one way of recomputing, and the bytes that their kernels need for a moment."""

    parts: dict[Part, Operators]
    """The operators of parts, at most sizes."""
    apart: dict[tuple[Part, bool, int], Operators]
    """Operators of parts whose calls depend on the size: for one sequence or not, and that size of tensor."""
    working: dict[BlockKind, NDArray[np.float64]]
    """[coefficient]: bytes that come and go within a block's backward pass."""
    head_working: NDArray[np.float64]
    """[coefficient, of a chunk or not]: the same of the head, with and without the chunk of its logits."""
    state_bytes_per_parameter: float
    """Bytes of the optimizer's state on the device."""
    counted_parameters: int
    counted_blocks: int
    update_calls_per_block: int
    """The calls of the update that each further block adds."""

    def operators(self, part: Part, size: Size) -> Operators:
        """The calls of a part at that size."""
        operators = self.apart.get((part, size.sequences == 1, size.tensor), self.parts[part])
        one = self.apart.get((part, size.sequences == 1, 1))
        if not size.whole_experts or size.tensor == 1 or one is None:
            return operators
        # Experts were counted as divided among ranks of tensor: those of a rank alone take their place.
        figures = operators.figures.copy()
        if operators.of_experts.sum() == one.of_experts.sum():
            figures[:, operators.of_experts] = one.figures[:, one.of_experts]
        return dataclasses.replace(operators, figures=figures)

    def working_bytes(self, kind: BlockKind, size: Size) -> float:
        """Working bytes of a block, beside what its forward pass kept."""
        part, working = 1 / size.tensor, self.working[kind]
        stream = working[0] + size.sequences * working[1]
        return float(stream * part + part * (working[2] + size.sequences * working[3]))

    def head_working_bytes(self, size: Size, chunk_sequences: float) -> float:
        """Working bytes of norm, head and loss, whose chunks have `chunk_sequences` of the micro-batch's sequences."""
        part = 1 / size.tensor
        basis = np.array([1.0, size.sequences, part, part * size.sequences])
        of_chunk = np.array([0.0, chunk_sequences, 0.0, part * chunk_sequences])
        return float(basis @ self.head_working[:, 0] + of_chunk @ self.head_working[:, 1])


def count_parts(
    resolved: ResolvedRecipe, recompute: Recompute, tensors: Sequence[int], plain: CountedParts | None = None
) -> CountedParts:
    """Count a model of one block of each kind for ranks with these sizes of tensor.

    `plain` are the parts without recomputation, if they are counted already: only blocks differ. Raises NapkinError as
    `count_step` does.
    """
    split = next((size for size in sorted(tensors) if size > 1 and _counts(resolved, size)), None)
    tensors_counted = (1,) if split is None else (1, split)
    ledger_of = functools.cache(lambda sequences, tensor: _count(resolved, recompute, sequences, tensor))
    kinds = block_kinds(one_of_each(resolved.recipe.model))
    first_of = {kind: kinds.index(kind) for kind in kinds}
    divided_of = functools.cache(lambda sequences, tensor: _divided(ledger_of(sequences, tensor), first_of))
    points = [(sequences, tensor) for tensor in tensors_counted for sequences in (1, 2)]
    ledgers = {point: ledger_of(*point) for point in points}
    divided = {point: divided_of(*point) for point in points}
    names: list[Part] = [name for name in divided[1, 1] if name in first_of or plain is None]
    parts: dict[Part, Operators] = {}
    apart: dict[tuple[Part, bool, int], Operators] = {}
    for name in names:
        # The number of calls of the update depends on sizes; it is priced by the number of parameters.
        counted = {key: (divided[1, 1] if name == "update" else each)[name] for key, each in divided.items()}
        if name == "head":
            continue
        if name in first_of and any(_names(each) != _names(counted[1, 1]) for each in counted.values()):
            for tensor in sorted({1, *(size for size in tensors if _counts(resolved, size))}):
                one, two, three = (divided_of(sequences, tensor)[name] for sequences in (1, 2, 3))
                apart[name, False, tensor] = _operators({(2, 1): two, (3, 1): three}, None)
                apart[name, True, tensor] = _operators({(1, 1): one, (2, 1): _aligned(one, two)}, None)
            parts[name] = apart[name, False, 1]
        else:
            parts[name] = _operators(counted, split)
    working: dict[BlockKind, NDArray[np.float64]] = {}
    for kind, number in first_of.items():
        counted = {key: np.array([_working_bytes(each, number)], dtype=np.float64) for key, each in ledgers.items()}
        working[kind] = _bilinear(counted, split)[:, 0]
    if plain is not None:
        return dataclasses.replace(
            plain,
            parts={**plain.parts, **parts},
            apart={**plain.apart, **apart},
            working=working,
        )
    halves = {tensor: _count(resolved, recompute, 1, tensor, chunks=2) for tensor in tensors_counted}
    head = {key: each["head"] for key, each in divided.items()}
    chunk = _chunk_of(head[1, 1], _divided(halves[1], first_of)["head"])
    parts["head"] = _operators({key: [*each[: chunk.start], *each[chunk.stop :]] for key, each in head.items()}, split)
    parts["chunk"] = _operators({key: each[chunk] for key, each in head.items()}, split)
    update, larger = divided[1, 1]["update"], _divided(_count(resolved, recompute, 1, 1, more=1), first_of)["update"]
    return CountedParts(
        parts=parts,
        apart=apart,
        working=working,
        head_working=_head_working(resolved, recompute, halves, split),
        state_bytes_per_parameter=ledgers[1, 1].peak_by_category.get("optimizer state", 0) / ledgers[1, 1].parameters,
        counted_parameters=ledgers[1, 1].parameters,
        counted_blocks=len(kinds),
        update_calls_per_block=len(larger) - len(update),
    )


def _head_working(
    resolved: ResolvedRecipe, recompute: Recompute, halves: dict[int, Ledger], split: int | None
) -> NDArray[np.float64]:
    """Coefficients of the bytes beside chunks of the loss, and of those of a chunk.

    From two chunks on, the gradient of the head's weight exists twice, which a loss of one chunk does not show.
    """
    beside: dict[tuple[int, int], NDArray[np.float64]] = {}
    of_chunk: dict[tuple[int, int], NDArray[np.float64]] = {}
    for tensor, halved in halves.items():
        half = _head_working_bytes(halved)
        quarter = _head_working_bytes(_count(resolved, recompute, 1, tensor, chunks=4))
        double = _head_working_bytes(_count(resolved, recompute, 2, tensor, chunks=4))
        of_sequence = 4 * (half - quarter)
        for sequences, with_half in ((1, half), (2, double)):
            beside[sequences, tensor] = np.array([with_half - of_sequence / 2])
            of_chunk[sequences, tensor] = np.array([sequences * of_sequence])
    return np.concatenate([_bilinear(beside, split), _bilinear(of_chunk, split)], axis=1)


@functools.lru_cache(maxsize=64)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """The kind of each layer of a model."""
    layers = zip(model.layer_mixers, model.attention_windows, strict=True)
    return tuple(
        BlockKind(
            mixer,
            window if mixer == "attention" else None,
            model.n_experts > 0 and layer >= model.n_dense_layers,
            (layer - model.kv_sources[layer], model.kv_sources.count(model.kv_sources[layer])),
        )
        for layer, (mixer, window) in enumerate(layers)
    )


@functools.lru_cache(maxsize=64)
def one_of_each(model: ModelConfig) -> ModelConfig:
    """The model with the fewest layers that has a block of each kind."""
    kinds = set(block_kinds(model))
    dense, every = model.n_dense_layers if model.n_experts else 0, model.full_attention_every
    short = ",".join(dict.fromkeys(model.layer_mixers))
    patterns = itertools.product(
        dict.fromkeys((min(dense, 1), dense)),
        dict.fromkeys((short, model.mixers)),
        dict.fromkeys((None if every is None else 2, every)),
    )
    models = [model]
    for n_dense, mixers, full_every in patterns:
        for layers in range(max(len(kinds), n_dense + 1), model.n_layers):
            fewer = dataclasses.replace(
                model, n_layers=layers, n_dense_layers=n_dense, mixers=mixers, full_attention_every=full_every
            )
            if set(block_kinds(fewer)) == kinds:
                models.append(fewer)
                break
    return min(models, key=lambda each: each.n_layers)


def _pattern(model: ModelConfig) -> dict[str, Any]:
    """The fields that say which kind each layer is."""
    return {name: getattr(model, name) for name in ("n_dense_layers", "mixers", "full_attention_every")}


_LATENT_WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def with_tensor(resolved: ResolvedRecipe, tensor: int) -> ResolvedRecipe:
    """The recipe of a model with the matrices of one rank of tensor: its heads, its part of d_ff, its token ids."""
    model = resolved.recipe.model
    # Heads keep their widths, and each rank computes all latents.
    widths = ("head_dim",) if model.kv_lora_rank is None else _LATENT_WIDTHS
    changes: dict[str, int] = {
        "n_heads": model.n_heads // tensor,
        "n_kv_heads": max(1, model.resolved_n_kv_heads // tensor),
        **{name: model.resolved(name) for name in widths},
        "d_ff": max(1, model.resolved_d_ff // tensor),
        "vocab_size": -(-model.vocab_size // tensor),
    }
    if model.n_experts and model.resolved_d_expert is not None:
        changes["d_expert"] = max(1, model.resolved_d_expert // tensor)
    return resolved.with_model(**changes) if tensor > 1 else resolved


def _counts(resolved: ResolvedRecipe, tensor: int) -> bool:
    model = resolved.recipe.model
    # With fewer key heads than ranks, some ranks hold the same ones.
    kv_heads = model.resolved_n_kv_heads
    divides = kv_heads % tensor == 0 or tensor % kv_heads == 0
    return divides and model.n_heads % tensor == 0 and model.vocab_size >= tensor


def _count(
    resolved: ResolvedRecipe, recompute: Recompute, sequences: int, tensor: int, *, chunks: int = 1, more: int = 0
) -> Ledger:
    model, each = resolved.recipe.model, one_of_each(resolved.recipe.model)
    local = with_tensor(resolved, tensor).with_model(**_pattern(each), n_layers=each.n_layers + more)
    local = local.with_training(
        batch_size=sequences,
        micro_batch_size=sequences,
        recompute=recompute,
        recompute_every=1,
        loss_chunk_size=-(-sequences * model.context_length // chunks),
        compile="off",
    )
    recipe = dataclasses.replace(local.recipe, parallelism=ParallelismConfig())
    return count_step(dataclasses.replace(local, recipe=recipe, world_size=1), reserved=False)


def _divided(ledger: Ledger, first_of: dict[BlockKind, int]) -> dict[Part, list[Row]]:
    """The calls of each part, of blocks those of the first of each kind. Calls outside of modules are the embedding's
    before the first block and after its backward pass, otherwise the head's."""
    blocks = [at for at, row in enumerate(ledger.rows) if row.module.startswith("blocks.")]
    kind_at = {number: kind for kind, number in first_of.items()}
    parts: dict[Part, list[Row]] = {"embedding": [], **{kind: [] for kind in first_of}, "head": [], "update": []}
    for at, row in enumerate(ledger.rows):
        if not (row.bytes_read or row.bytes_written or row.flops or row.bytes_kept):
            continue
        name: Part | None
        if row.module.startswith("blocks."):
            name = kind_at.get(_block_of(row))
        elif row.phase == "optimizer":
            name = "update"
        elif at < blocks[0] or at > blocks[-1] or row.module.startswith(("embedding", "positions")):
            name = "embedding"
        else:
            name = "head"
        if name is not None:
            parts[name].append(row)
    return parts


def _block_of(row: Row) -> int:
    return int(row.module.split(".")[1])


def _chunk_of(one: Sequence[Row], two: Sequence[Row]) -> slice:
    """The places of a chunk's calls among those of a head with one chunk, found beside those of one with two."""
    length = len(two) - len(one)
    names = [(row.operator, row.phase) for row in two]
    for start in range(len(one) - length + 1):
        if names[start : start + length] == names[start + length : start + 2 * length]:
            return slice(start, start + length)
    return slice(0, 0)


def _operators(points: dict[tuple[int, int], list[Row]], split: int | None) -> Operators:
    """Through the figures of the same calls at each point (sequences, tensor), of which the first has least of both."""
    rows = next(iter(points.values()))
    if any(_names(each) != _names(rows) for each in points.values()):
        raise AssertionError(f"counts of different sizes have different operators: {[len(r) for r in points.values()]}")
    figures: dict[tuple[int, int], NDArray[np.float64]] = {}
    for key, each in points.items():
        found = [[*(getattr(row, name) for name in _FIGURES), *(row.contraction or (0, 0, 0, 0))] for row in each]
        figures[key] = np.array(found, dtype=np.float64).reshape(len(rows), len(_FIGURES) + 4)
    return Operators(
        rows=tuple(rows),
        figures=_bilinear(figures, split),
        split_sequence=np.array([_splits_sequence(row.module) for row in rows], dtype=np.bool_),
        of_experts=np.array([row.module.endswith(".experts") for row in rows], dtype=np.bool_),
    )


def _names(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return [(row.operator, row.module, row.phase) for row in rows]


def _aligned(one: Sequence[Row], two: Sequence[Row]) -> list[Row]:
    """The calls of one sequence, as two sequences make them: those that only one makes are taken to be twice as large.

    Calls that only two sequences make are left out."""
    aligned = [dataclasses.replace(row, **{name: 2 * getattr(row, name) for name in _FIGURES}) for row in one]
    matcher = difflib.SequenceMatcher(a=_names(one), b=_names(two), autojunk=False)
    for block in matcher.get_matching_blocks():
        aligned[block.a : block.a + block.size] = two[block.b : block.b + block.size]
    return aligned


def _bilinear(points: dict[tuple[int, int], NDArray[np.float64]], split: int | None) -> NDArray[np.float64]:
    """Coefficients of 1, sequences, 1 / tensor and their product, through the values at four points, or at two, whose
    sequences differ by 1."""
    (least, one), (_, two) = ((sequences, points[sequences, 1]) for sequences, tensor in points if tensor == 1)
    if split is None:
        none = np.zeros_like(one)
        return np.stack([one - least * (two - one), two - one, none, none])
    at = 1 - 1 / split
    slope, less = two - one, (points[2, split] - points[1, split])
    both = (slope - less) / at
    fixed, fixed_less = one - slope, points[1, split] - less
    part = (fixed - fixed_less) / at
    return np.stack([fixed - part, slope - both, part, both])


def _splits_sequence(module: str) -> bool:
    """Norms, residual sums and dropout between matrices, of which each rank of tensor computes some positions."""
    path = module.split(".")
    if path[0] != "blocks":
        return path[0] in ("norm", "dropout")
    return len(path) == 2 or (len(path) == 3 and (path[2].endswith("norm") or path[2] == "dropout"))


def _working_bytes(ledger: Ledger, number: int) -> float:
    """Most bytes beside state, weight copies and kept activations while the backward pass of a block runs."""
    of_blocks = [row for row in ledger.rows if row.module.startswith("blocks.")]
    most = 0
    for moment in ledger.timeline:
        row = ledger.rows[moment.row]
        if row.phase not in ("backward", "recompute") or row.early or not row.module.startswith("blocks."):
            continue
        if _block_of(row) == number:
            most = max(most, moment.bytes_alive - moment.state_bytes - moment.weight_copy_bytes)
    # Activations of later blocks are freed by then.
    before = [row for row in of_blocks if _block_of(row) <= number]
    kept = sum(row.bytes_kept for row in before if row.in_forward_pass)
    # Of weights: the product that follows has the matrix as its second factor; its input's copy is read in another
    # size.
    copies = sum(
        row.bytes_kept
        for row in before
        if row.operator == "_to_copy"
        and row.component != "other"
        and row.bytes_kept == row.bytes_written
        and row.bytes_read == 2 * row.bytes_written
    )
    return max(0.0, most - (kept - copies))


def _head_working_bytes(ledger: Ledger) -> float:
    """Most bytes beside state and kept activations of blocks while norm, head and loss run."""
    last = max(at for at, row in enumerate(ledger.rows) if row.module.startswith("blocks.") and row.phase == "forward")
    first_backward = next(
        (at for at, row in enumerate(ledger.rows) if at > last and row.module.startswith("blocks.")), len(ledger.rows)
    )
    before = most = 0
    for moment in ledger.timeline:
        alive = moment.bytes_alive - moment.state_bytes
        if moment.row <= last:
            before = alive
        elif moment.row < first_backward:
            most = max(most, alive)
    return float(max(0, most - before))
