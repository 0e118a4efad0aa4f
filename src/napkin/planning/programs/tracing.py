"""Trace a program's step on one rank: build it, warm it up, and record the step as `count` does."""

import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

import napkin
from napkin.accounting.counting import count, plain_step
from napkin.accounting.known_values import MOST_VALUES, Values
from napkin.accounting.ledger import CollectiveCall, Ledger
from napkin.errors import NapkinError, first_line
from napkin.hardware.target import Target
from napkin.planning.programs.one_rank import AwaitsRank, Objects, OneRank, refuse_offloaded

WARM_UP_STEPS = 2
"""DDP decides on its buckets before the second step; an optimizer makes its state in the first."""

Build = Callable[[], Any]
Step = Callable[[nn.Module, Any, Any], Any]


@dataclass(frozen=True)
class TracedRank:
    """A rank's step, and what building it shows about the other ranks."""

    rank: int
    ledger: Ledger
    built: tuple[CollectiveCall, ...]
    """Collectives of the building."""
    places: tuple[tuple[tuple[int, ...], ...], ...]
    """For each mesh, the coordinates of all ranks."""
    pipelines: tuple[tuple[int, ...], ...]
    """The ranks of the groups of pipelines."""
    stage_indices: tuple[int, ...]
    shards: tuple[tuple[tuple[int, ...], ...], ...]
    """For each mesh, and each of its dimensions, the first coordinates of which parameters have shards of another
    size than the coordinate before."""

    @property
    def figures(self) -> tuple[Any, ...]:
        """Return the figures that are equal on ranks that do the same."""
        ledger = self.ledger
        calls = [
            (each.operation, each.data_bytes, each.group_size)
            for each in (row.collective for row in ledger.rows)
            if each is not None
        ]
        flops = ledger.flops, ledger.hardware_flops, ledger.causal_flops, ledger.elementwise_flops
        return (*flops, ledger.peak_bytes, ledger.resident_bytes, ledger.reserved_bytes, tuple(calls))


class Program:
    """A program by its functions, traced rank by rank."""

    def __init__(
        self,
        build: Build,
        step: Step | None,
        *,
        name: str,
        world_size: int,
        local_world_size: int,
        target: Target,
        progress: Callable[[str], None],
    ) -> None:
        self.build, self.step, self.name = build, step, name
        self.world_size, self.local_world_size = world_size, local_world_size
        self.target: Target = target
        self.progress = progress
        self._objects = Objects()
        self.traced: dict[int, TracedRank] = {}

    @property
    def n_traced(self) -> int:
        return len(self.traced)

    def rank(self, rank: int) -> TracedRank:
        """The step of a rank, traced once.

        Raises NapkinError where the program fails, or where ranks wait for each other without end.
        """
        waiting: list[int] = []
        while rank not in self.traced:
            current = waiting[-1] if waiting else rank
            try:
                self.traced[current] = self._trace(current)
                waiting = waiting[:-1]
            except AwaitsRank as awaited:
                if awaited.rank in self.traced or waiting.count(awaited.rank) > self.world_size:
                    raise NapkinError(
                        f"rank {current} waits for an object that rank {awaited.rank} never sends it: in reality it "
                        "would wait without end"
                    ) from None
                waiting.append(awaited.rank)
        return self.traced[rank]

    def _trace(self, rank: int) -> TracedRank:
        self.progress(f"tracing rank {rank} of {self.world_size}")
        surroundings = OneRank(rank, self.world_size, self._objects, local_world_size=self.local_world_size)
        with warnings.catch_warnings(), surroundings.entered():
            warnings.simplefilter("ignore")
            with surroundings.building(), self._errors_named("building", rank):
                module, optimizer, batch, step = self._parts(self.build())
            if self.target != "cpu":
                refuse_offloaded(module)
            values = Values(guesses=False)
            batch = _known(batch, values)
            with values, self._errors_named("the step", rank):
                ledger = count(
                    module,
                    batch,
                    lambda module, batch: step(module, optimizer, batch),
                    target=self.target,
                    warm_up=WARM_UP_STEPS,
                )
            places = tuple(tuple(map(tuple, each)) for each in surroundings.meshes)
            return TracedRank(
                rank=rank,
                ledger=ledger,
                built=tuple(surroundings.built),
                places=places,
                pipelines=tuple(surroundings.pipelines),
                stage_indices=tuple(surroundings.stage_indices),
                shards=_shards(module, places),
            )

    def _parts(self, built: Any) -> tuple[nn.Module, Any, Any, Step]:
        if not isinstance(built, tuple) or len(built) not in (3, 4) or not isinstance(built[0], nn.Module):
            raise NapkinError(
                f"{self.name} returns {_described(built)}: return the module, its optimizer and a batch, and "
                "if it makes one, the step"
            )
        module, optimizer, batch, *rest = built
        step = rest[0] if rest else self.step
        if step is None:
            plain = plain_step(module, None if optimizer is None else lambda _: optimizer)
            return module, optimizer, batch, lambda module, _, batch: plain(module, batch)
        if not callable(step):
            raise NapkinError(f"the step of {self.name} is {_described(step)}: use a function")
        if len(inspect.signature(step).parameters) != 3:
            raise NapkinError(
                f"{getattr(step, '__name__', 'the step')} takes {len(inspect.signature(step).parameters)} arguments: "
                "a step takes module, optimizer and batch"
            )
        return module, optimizer, batch, step

    @contextmanager
    def _errors_named(self, what: str, rank: int) -> Iterator[None]:
        """Say in one line which error the program raised, and where; name the rank if rank 0 did not raise it."""
        of_rank = f" on rank {rank}" if self.world_size > 1 else ""
        try:
            try:
                yield
            except NapkinError as error:
                # `count` suggests remedies only for a module.
                if isinstance(error.__context__, RuntimeError):
                    raise error.__context__ from None
                raise NapkinError(f"{error}{of_rank}") from None
        except NapkinError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NapkinError(
                f"{what} of {self.name} reads values that a trace does not have ({error.func}){_place(error)}{of_rank}"
                ": leave out `.item()`, boolean-mask indexing and branches on data"
            ) from None
        except SystemExit as error:
            raise NapkinError(f"{self.name} exits with status {error.code}{of_rank}: return instead") from None
        except Exception as error:
            raise NapkinError(
                f"{what} of {self.name} raises {type(error).__name__}{_place(error)}{of_rank}: {first_line(error)}"
            ) from None


def _known(batch: Any, values: Values) -> Any:
    """The batch as fake tensors with known integers and booleans."""

    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in made:
                made[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
            numbers = made[storage._cdata].view(tensor.dtype)
            made[id(tensor)] = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            if not tensor.dtype.is_floating_point and tensor.numel() <= MOST_VALUES:
                with _disable_current_modes():
                    values.remember(made[id(tensor)], tensor.detach().clone())
        return made[id(tensor)]

    return pytree.tree_map_only(Tensor, fake, batch)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in value)}" if value else "an empty tuple"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _place(error: BaseException) -> str:
    """Return the place in the program's own code that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    # A folder of the user's may have this package's name too.
    package = os.path.dirname(napkin.__file__) + os.sep
    own = [each for each in frames if "site-packages" not in each.filename and not each.filename.startswith(package)]
    return f" at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""


def _shards(module: nn.Module, places: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[Any, ...]:
    """The coordinates at which the sizes of shards change, by mesh and dimension."""
    shards: list[list[set[int]]] = [[set() for _ in next((each for each in of if each), ())] for of in places]
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, shape = parameter.device_mesh, list(parameter.shape)
        for dim, placement in enumerate(parameter.placements):
            if not isinstance(placement, Shard):
                continue
            whole = shape[placement.dim]
            part = -(-whole // mesh.size(dim))
            sizes = [max(0, min(part, whole - each * part)) for each in range(mesh.size(dim))]
            # Along the other dimensions at their first coordinate.
            shape[placement.dim] = part
            changes = {each for each in range(1, len(sizes)) if sizes[each] != sizes[each - 1]}
            for number, of in enumerate(places) if changes else ():
                own = _dimension_in(mesh, dim, of)
                if own is not None:
                    shards[number][own] |= changes
    return tuple(tuple(tuple(sorted(each)) for each in of) for of in shards)


def _dimension_in(mesh: Any, dim: int, places: tuple[tuple[int, ...], ...]) -> int | None:
    """The dimension of a root mesh along which the ranks of a mesh's dimension follow each other; None if there is
    none."""
    ranks = mesh.mesh
    with _disable_current_modes():
        ranks = ranks.movedim(dim, -1).reshape(-1, mesh.size(dim))[0].tolist()
    along = [places[rank] for rank in ranks]
    if not all(along) or len(along) < 2:
        return None
    for own in range(len(along[0])):
        if [each[own] for each in along] == list(range(len(ranks))):
            return own
    return None
