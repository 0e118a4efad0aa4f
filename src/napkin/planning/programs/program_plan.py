"""`plan_program`: the ranks of a program of the user's own, planned without running it.

The program's own function builds module, optimizer and batch on each rank and divides them by torch's own API. It runs
here on fake tensors and a fake process group, on the ranks that differ.
"""

import dataclasses
import importlib.util
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napkin.accounting.ledger import Ledger
from napkin.accounting.quantities import Line, Summary, largest, with_calls, with_parts
from napkin.accounting.rank_seconds import Communication
from napkin.errors import NapkinError, first_line, suggestion
from napkin.hardware.ceilings import CatalogueCeilings, efficiency_of
from napkin.hardware.cluster import Cluster, find_cluster, interconnect_of
from napkin.planning.programs.agreement import require_agreement
from napkin.planning.programs.rank_classes import as_ranges, trace_classes
from napkin.planning.programs.rank_times import RankTime, rank_times
from napkin.planning.programs.tracing import Build, Program, Step
from napkin.planning.step.machine import target_of
from napkin.planning.step.site import fits
from napkin.units import format_bytes, format_flops, format_seconds

MOST_RANKS = 2**16
MOST_TRACED = 32


@dataclass(frozen=True)
class CollectiveSum:
    """Equal collectives of a rank's step."""

    operation: str
    calls: int
    data_bytes: int
    """Bytes of the whole tensors of all these collectives."""
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    """The ranks of the groups."""


@dataclass(frozen=True)
class RankPlan:
    """The step of one rank that was traced."""

    rank: int
    stands_for: tuple[int, ...]
    """All ranks that are taken to do the same, including this one."""
    traced: tuple[int, ...]
    """Ranks among them that were traced."""
    ledger: Ledger
    time: RankTime | None
    """Seconds of the rank; None if no device was named."""

    @property
    def communication(self) -> Communication:
        return Communication.of(self.ledger)

    @property
    def collectives(self) -> tuple[CollectiveSum, ...]:
        """The collectives by kind and size of their group, receives left out."""
        calls: Counter[tuple[str, int]] = Counter()
        sums: Counter[tuple[str, int]] = Counter()
        groups: defaultdict[tuple[str, int], set[tuple[int, ...]]] = defaultdict(set)
        for row in self.ledger.rows:
            call = row.collective
            if call is None or call.operation == "receive":
                continue
            ranks = call.ranks if call.peer is None else (self.rank, call.peer)
            key = call.operation, len(ranks)
            calls[key] += 1
            sums[key] += call.data_bytes
            groups[key].add(ranks)
        return tuple(
            CollectiveSum(operation, calls[operation, size], sums[operation, size], size, tuple(sorted(of)))
            for (operation, size), of in groups.items()
        )

    def as_values(self) -> dict[str, Any]:
        """All figures, for JSON."""
        ledger, time = self.ledger, self.time
        return {
            "rank": self.rank,
            "stands_for": list(self.stands_for),
            "traced": list(self.traced),
            "parameters": ledger.parameters,
            "flops": ledger.flops,
            "hardware_flops": ledger.hardware_flops,
            "peak_bytes": ledger.peak_bytes,
            "resident_bytes": ledger.resident_bytes,
            "reserved_bytes": ledger.reserved_bytes,
            "peak_by_category": ledger.peak_by_category,
            "seconds": time and time.seconds,
            "compute_seconds": time and time.price.seconds,
            "exposed_seconds": time and time.exposed_seconds,
            "hidden_seconds": time and time.hidden_seconds,
            "bubble_seconds": time and time.bubble_seconds,
            "sent_bytes": self.communication.bytes,
            "collectives": [dataclasses.asdict(each) for each in self.collectives],
            "unknown_operators": ledger.unknown_operators,
        }


@dataclass(frozen=True, repr=False)
class ProgramPlan(Summary):
    """The step of a program on many ranks."""

    name: str
    n_ranks: int
    cluster: Cluster | None
    """The devices; None for processes on CPUs."""
    ranks: tuple[RankPlan, ...]
    """One for each kind of step; of ranks that do the same, the first."""
    notes: tuple[str, ...] = ()
    """The assumptions of the plan, a sentence each."""

    def rank(self, rank: int) -> RankPlan:
        """The plan of a rank, or of the one that stands for it. Raises NapkinError for a rank that does not exist."""
        for each in self.ranks:
            if rank in each.stands_for:
                return each
        raise NapkinError(f"there is no rank {rank}: the ranks are 0 to {self.n_ranks - 1}")

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the rank that needs most."""
        return max(each.ledger.peak_bytes for each in self.ranks)

    @property
    def reserved_bytes(self) -> int | None:
        """The most bytes that a rank's caching allocator reserves; None on CPUs."""
        reserved = [each.ledger.reserved_bytes for each in self.ranks]
        return max((each for each in reserved if each is not None), default=None)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step: those of the slowest rank; None where no device was named."""
        seconds = [each.time.seconds for each in self.ranks if each.time is not None]
        return max(seconds, default=None)

    @property
    def fits(self) -> bool:
        """True if the step of every rank fits into its device's memory, as every plan has it."""
        if self.cluster is None:
            return True
        return fits(self.peak_bytes, self.cluster.device.usable_bytes, reserved_bytes=self.reserved_bytes)

    @property
    def imbalance(self) -> dict[str, float]:
        """The largest of all ranks over their mean: of FLOPs, peak bytes and seconds."""
        figures: dict[str, list[float]] = {
            "flops": [each.ledger.hardware_flops for each in self._everyone()],
            "peak_bytes": [each.ledger.peak_bytes for each in self._everyone()],
            "seconds": [each.time.seconds for each in self._everyone() if each.time is not None],
        }
        return {name: max(of) / statistics.fmean(of) for name, of in figures.items() if any(of)}

    def _everyone(self) -> Iterator[RankPlan]:
        for each in self.ranks:
            yield from [each] * len(each.stands_for)

    def as_values(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "program": self.name,
            "n_ranks": self.n_ranks,
            "device": self.cluster and self.cluster.device.name,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "seconds": self.seconds,
            "imbalance": self.imbalance,
            "ranks": [each.as_values() for each in self.ranks],
            "notes": self.notes,
        }

    @property
    def where(self) -> str:
        """The devices, or the processes."""
        if self.cluster is None:
            return f"{self.n_ranks} processes on CPUs"
        name = self.cluster.device.name
        return name if self.n_ranks == 1 else f"{self.n_ranks} × {name}"

    def summary(self) -> Iterator[Line]:
        verdict = "" if self.cluster is None else ", it fits" if self.fits else ", it does not fit"
        yield "ProgramPlan", f"{self.name} on {self.where}{verdict}"
        for each in self.ranks:
            ledger = each.ledger
            parts = with_parts(ledger.peak_bytes, largest(ledger.peak_by_category.items()), format_bytes)
            seconds = "" if each.time is None else f", {format_seconds(each.time.seconds)}"
            yield f"ranks {as_ranges(each.stands_for)}", f"{format_flops(ledger.flops)}{seconds}, {parts}"
        for name, value in self.imbalance.items():
            yield f"imbalance of {name}", f"{value:.3f}, the largest over the mean"
        for note in self.notes:
            yield "note", note


def plan_program(
    build: Build,
    step: Step | None = None,
    *,
    ranks: int | None = None,
    on: str | None = None,
    most_traced: int = MOST_TRACED,
    progress: Callable[[str], None] | None = None,
) -> ProgramPlan:
    """Plan the step of a program on many ranks: bytes, FLOPs, collectives and seconds of each that differs.

    Args:
        build: a function without arguments that builds on each rank what torchrun would have it build there, and
            divides it by torch's own API (`fully_shard`, `parallelize_module`, DDP, pipeline stages). It returns the
            module, its optimizer (or None) and a batch, and may return a step as the fourth. The process group exists
            when it is called. It runs in this process, on fake tensors, once for each rank that is traced.
        step: `step(module, optimizer, batch)` trains once. By default: forward pass, loss, backward pass, update.
        ranks: how many ranks there are; by default one for each device.
        on: devices of the catalogue, as in "64xH100". Without, the ranks are processes on CPUs, and have no seconds.
        most_traced: the most ranks that are traced where there are more than a few (8, which are all traced).
        progress: called with what is being done.

    Raises NapkinError, in one line that names the place, where the program fails, where ranks do not agree on their
    collectives, and for what is not planned: FSDP2's CPUOffloadPolicy on a device.
    """
    cluster = None if on is None else find_cluster(on)
    world_size = ranks if ranks is not None else 1 if cluster is None else cluster.n_devices
    if not 1 <= world_size <= MOST_RANKS:
        raise NapkinError(f"ranks is {world_size}: use 1 to {MOST_RANKS:,}")
    if cluster is not None and world_size != cluster.n_devices:
        raise NapkinError(f"{world_size} ranks on {cluster.n_devices} devices ({on}): a rank has one device")
    if most_traced < 1:
        raise NapkinError(f"most_traced is {most_traced}: use a number above 0")
    name = getattr(build, "__name__", type(build).__name__)
    local = world_size if cluster is None else min(world_size, cluster.node.devices)
    program = Program(
        build,
        step,
        name=name,
        world_size=world_size,
        local_world_size=local,
        target="cpu" if cluster is None else target_of(cluster.device),
        progress=progress or (lambda _: None),
    )
    classes = trace_classes(program, most_traced=most_traced)
    traced = classes.traced
    require_agreement({rank: each.built for rank, each in traced.items()}, of="building")
    calls = {rank: [row.collective for row in each.ledger.rows if row.collective] for rank, each in traced.items()}
    require_agreement(calls, of="a step")
    ledgers = {rank: each.ledger for rank, each in traced.items()}
    times: dict[int, RankTime] = {}
    notes: list[str] = []
    if cluster is not None:
        efficiency = efficiency_of(cluster.device)
        links = interconnect_of(cluster.device, cluster.node, efficiency)
        if links is None and world_size > 1:
            notes.append(
                f"the catalogue has no link between devices of {cluster.device.name}: collectives take no time"
            )
        times = rank_times(ledgers, CatalogueCeilings(cluster.device, efficiency), links)
    represented: defaultdict[int, list[int]] = defaultdict(list)
    for each, representative in classes.stands_for.items():
        represented[representative].append(each)
    plans = tuple(
        RankPlan(rank, tuple(represented[rank]), (rank,), ledgers[rank], times.get(rank)) for rank in sorted(traced)
    )
    if len(traced) < world_size:
        notes.append(f"{len(traced)} of {world_size:,} ranks were traced, each represents those that do the same")
    if not classes.complete:
        notes.append(f"more than {most_traced} ranks differ: others are taken to do what the nearest traced one does")
    notes += dict.fromkeys(each.ledger.assumption for each in plans if each.ledger.assumption)
    unknown = Counter[str]()
    for each in plans:
        unknown |= Counter(each.ledger.unknown_operators)
    if unknown:
        notes.append(f"{with_calls(unknown)} have no formula: their FLOPs are missing")
    return ProgramPlan(name, world_size, cluster, _merged(plans), tuple(notes))


def _merged(plans: Iterable[RankPlan]) -> tuple[RankPlan, ...]:
    """Group the traced ranks that do the same; the first of a group stands for all of it."""
    merged: dict[Any, RankPlan] = {}
    for each in plans:
        known = merged.setdefault(_alike(each), each)
        if known is not each:
            merged[_alike(each)] = dataclasses.replace(
                known,
                stands_for=tuple(sorted((*known.stands_for, *each.stands_for))),
                traced=(*known.traced, *each.traced),
            )
    return tuple(merged.values())


def _alike(plan: RankPlan) -> Any:
    ledger = plan.ledger
    sums = [(each.operation, each.calls, each.data_bytes, each.group_size) for each in plan.collectives]
    bubble = 0.0 if plan.time is None else plan.time.bubble_seconds
    flops = ledger.flops, ledger.hardware_flops, ledger.causal_flops
    return (*flops, ledger.peak_bytes, ledger.resident_bytes, ledger.reserved_bytes, tuple(sums), f"{bubble:.6g}")


def program_of(text: str, step: str | None = None) -> tuple[Build, Step | None]:
    """The functions that FILE.py:NAME names: `build`, and of the same file the step of that name.

    The file is run, with the rights of the user. Raises NapkinError where there is no such file or function.
    """
    path, colon, attribute = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise NapkinError(f"'{text}' is not a program: name a function as FILE.py:build")
    if not Path(path).is_file():
        raise NapkinError(f"there is no file '{path}': name a function as FILE.py:build")
    name = f"napkin_program_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise NapkinError(f"'{path}' exits with status {error.code} when it is imported: guard what it runs") from None
    except Exception as error:
        line = getattr(error, "lineno", None)
        place = f" at line {line}" if line else ""
        raise NapkinError(
            f"'{path}' cannot be imported ({type(error).__name__}{place}: {first_line(error)}): correct it"
        ) from None
    finally:
        sys.path.pop(0)
    files = []
    for wanted in (attribute, step):
        function = getattr(module, wanted, None) if wanted else None
        if wanted and not callable(function):
            names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            raise NapkinError(f"'{path}' has no function '{wanted}': {suggestion(wanted, names or ['build'])}")
        files.append(function)
    return files[0], files[1]
