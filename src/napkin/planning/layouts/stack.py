"""Programs that train, as far as a plan depends on them: what each fuses, overlaps, recomputes, sends and keeps.

A stack is data: one TOML file each in `stacks/`, with the sources of what it says. A file of one's own names the stack
that it is `like` and changes fields of it; `calibrate_stack` writes one from measured runs.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from napkin.errors import NapkinError, near_names
from napkin.hardware.device import Positive, Source
from napkin.toml_files import packaged_toml, read_toml
from napkin.train_step.compile import Recompute

LARGEST_FILE = 16_384

_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Factor = Annotated[float, msgspec.Meta(gt=0.05, lt=20)]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that a block keeps of each token until its backward pass, per number of each width that the token has."""

    d_model: _NotNegative
    """Inputs and results of norms: the residual stream and what the first products read."""
    heads: _NotNegative = 0.0
    """Queries, and the result of attention."""
    kv_heads: _NotNegative = 0.0
    """Keys and values."""
    up: _NotNegative = 0.0
    """Results of the products that widen a token, the gate's included."""
    activated: _NotNegative = 0.0
    """The input of the last product."""
    dispatched: _NotNegative = 0.0
    """Tokens as experts receive them, d_model numbers for each expert of a token."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank, by what a stack keeps."""

    weight_bytes: Positive
    """Bytes per parameter of the weights that the forward pass reads."""
    gradient_bytes: _NotNegative
    """Bytes per parameter of the gradients that micro-batches add up."""
    state_bytes: _NotNegative
    """Bytes per parameter of the optimizer's state, and of master weights beside `weight_bytes`."""
    fp8_copy_bytes: _NotNegative = 0.0
    """Further bytes per parameter of a block where products are fp8: copies of weights, transposed too."""
    fp8_copies_only: bool = False
    """True if those copies are all that a block has of its weights there, beside the master weights of the optimizer's
    state: `weight_bytes` are then of what lies outside of blocks."""
    offloaded_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Blocks whose activations wait in the host's memory for their backward pass; the seconds of the copies are taken
    to hide behind computation."""
    splits_sequence: bool = True
    """True if ranks of tensor split what is `d_model` wide, outside of matrices (Korthikanti et al. 2022)."""
    logits_bytes: _NotNegative = 6.0
    """Bytes per logit of a micro-batch while the loss is computed, its gradient included."""
    kept: dict[Recompute, Kept]
    """The activations that a block keeps, by its form of recomputation."""
    kept_in_fp8: dict[Recompute, Kept] = field(default_factory=dict)
    """The same where products are fp8, where it differs."""

    def kept_of(self, recompute: Recompute, *, fp8: bool) -> Kept:
        """The activations that a block keeps with this form of recomputation; without a table for it, those without
        recomputation."""
        tables = (self.kept_in_fp8, self.kept) if fp8 else (self.kept,)
        return next((table[recompute] for table in tables if recompute in table), self.kept["none"])


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange of tokens with experts on other ranks."""

    sends: Literal["copies", "nodes"] = "copies"
    """copies: an all-to-all with a copy of a token for each of its experts. nodes: a token crosses the network once for
    each node, and there the link once for each rank that has an expert of it (DeepEP)."""
    dispatch_bytes: Positive = 2.0
    """Bytes of a number on the way to its expert; of gradients, on the way back through the second exchange."""
    combine_bytes: Positive = 2.0
    """Bytes of a number on the way from its expert."""
    nodes_per_token: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Most nodes that the experts of a token are on; None is any number."""
    link_share: _Share | None = None
    network_share: _Share | None = None
    """Fraction of the datasheet's bandwidths that the exchange reaches; None is that of other collectives."""
    behind_other_micro_batch: bool = False
    """True if exchanges of one micro-batch hide behind the computation of another one (DualPipe)."""
    multiprocessors: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Multiprocessors that only send meanwhile."""
    padded_rows: Annotated[int, msgspec.Meta(gt=0)] = 1
    """The rows of each expert are padded to a multiple of these."""
    sent_again: bool = True
    """True if selective recomputation of a block sends its tokens again."""
    synchronising_seconds: _NotNegative = 5e-5
    """Seconds that a device waits in the forward pass of a block, because its host reads the numbers of tokens before
    it launches what follows; 0 where buffers have a fixed size. The default is assumed: six launches of 8 µs."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A program that trains."""

    name: str
    source: tuple[Source, ...] = ()
    """Publications that say what it does."""
    fuses: bool = False
    """True if elementwise kernels between products are fused, by a compiler or by hand."""
    casts_once: bool = False
    """True if weights are in the format of products, so that they are cast once per step."""
    adds_in_products: bool = False
    """True if products add to the gradients of the micro-batches before."""
    cudnn_attention: bool | None = None
    """True if attention is cuDNN's where a GPU has it; None is torch's choice."""
    overlaps_tensor: bool = False
    """True if the collectives of tensor ranks are cut into as many pieces as there are ranks, sent while the products
    beside them compute the pieces before."""
    gathers_again: bool = True
    """True if ranks of tensor wait for the inputs of products that selective recomputation gathers again; False if that
    hides behind gradients (Korthikanti et al. 2022, section 4.2.2)."""
    shards_over_context: bool = False
    """True if weights are sharded over ranks of context too where shard is 1."""
    reduces_in_fp32: bool | None = None
    """True if gradients of sharded weights are reduced in fp32; None is what the recipe says."""
    fp8_experts: bool = False
    """True if experts' products are fp8 where other products are."""
    experts_one_by_one: bool = False
    """True if each expert's products are kernels of their own, one after another, and not one kernel."""
    stops_recomputation: bool = False
    """True if full recomputation stops before the experts' last products and the way back of their tokens, whose
    results no gradient reads: torch's checkpoints do so where the router's weights multiply what these products
    read."""
    host_seconds: _NotNegative = 0.0
    """Seconds that the host takes for each operator call of a block of a mixture of experts: a block is not faster than
    its host. 0 where nothing is known, and where kernels are launched by graphs."""
    gathers_behind_compute: bool = False
    """True if updated parameters are gathered behind the forward pass, and gradients scattered behind the backward
    pass, where ranks of data share the optimizer's state."""
    exchange: Exchange = field(default_factory=Exchange)
    memory: Memory | None = None
    """Memory model of a rank; None takes what napkin's own counted step keeps."""
    computing: _Factor = 1.0
    """Calibrated ratio of computing seconds to the plan's."""
    sending: _Factor = 1.0
    """Calibrated ratio of collective seconds to the plan's."""
    factor: Annotated[float, msgspec.Meta(ge=1, lt=20)] | None = None
    """Factor that nine in ten of its runs are within; None is the one of the device's generation."""
    experts_factor: Annotated[float, msgspec.Meta(ge=1, lt=20)] | None = None
    """The factor for mixtures of experts; None is `factor`."""

    def factor_of(self, experts: bool) -> float | None:
        """The factor of a model with experts or without; None where the stack says nothing."""
        return self.experts_factor or self.factor if experts else self.factor


NAPKIN = Stack(name="napkin")
_PACKAGE, _FOLDER = "napkin.planning.layouts", "stacks"


@functools.cache
def stacks() -> dict[str, Stack]:
    """All stacks of the package, by name."""
    folder = resources.files(_PACKAGE).joinpath(_FOLDER)
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".toml"))
    return {name.removesuffix(".toml"): packaged_toml(_PACKAGE, f"{_FOLDER}/{name}", Stack) for name in names}


def find_stack(name: str | Path) -> Stack:
    """Find a stack by its name, or read the TOML file that describes one.

    Raises NapkinError for an unknown name and for a file that does not describe a stack.

    >>> find_stack("megatron").adds_in_products, find_stack("napkin") == NAPKIN
    (True, True)
    """
    if isinstance(name, Path) or name.lower().endswith(".toml"):
        return read_stack(Path(name))
    known = stacks()
    if name.lower() in known:
        return known[name.lower()]
    near = near_names(name.lower(), known)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}, or a TOML file"
    raise NapkinError(f"{name!r} is not a known stack: {hint}")


def read_stack(path: Path) -> Stack:
    """Read a stack from a TOML file: the fields of `Stack`, or `like` and the fields that differ."""
    values = read_toml(path, "a TOML file that describes a stack", most_bytes=LARGEST_FILE)
    like = values.pop("like", "napkin")
    if not isinstance(like, str) or like not in stacks():
        raise NapkinError(f"'{path}': like: {like!r} is not a known stack: use one of {', '.join(stacks())}")
    base = msgspec.to_builtins(stacks()[like])
    _refuse_unknown(path, values)
    try:
        return msgspec.convert(_merged(base, {"name": path.stem, **values}), Stack)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        where = where.rstrip("`").lstrip(".") or "the file"
        raise NapkinError(f"'{path}': {where}: {what[:1].lower()}{what[1:].replace('`', '')}") from None


def _refuse_unknown(path: Path, values: Mapping[str, Any]) -> None:
    groups: dict[str, type] = {"": Stack, "exchange.": Exchange, "memory.": Memory}
    for prefix, kind in groups.items():
        part = values if not prefix else values.get(prefix[:-1], {})
        known = [each.name for each in dataclasses.fields(kind)]
        for name in part if isinstance(part, Mapping) else ():
            if name not in known:
                near = near_names(name, known)
                hint = f"did you mean {prefix}{near[0]}?" if near else f"use one of {', '.join(known)}"
                raise NapkinError(f"'{path}': unknown field {prefix}{name}: {hint}")


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
