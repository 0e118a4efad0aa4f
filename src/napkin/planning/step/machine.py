"""The devices that a plan is for: those of this machine, or of a datasheet.

Both have the same interface, so that there is one planner. The difference: this machine can be measured and can run
operators, a datasheet cannot. Its steps are timed in a probe run (`time_probe_run`): two layers of the model at full
width train for a few steps, before the run itself.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import psutil
import torch

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.microbenchmark import time_operators
from napkin.accounting.pricing import Price, price, price_with_launches, roofline_seconds
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.hardware.calibration import Calibration
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.ceilings import CatalogueCeilings, Ceilings, Efficiency, efficiency_of
from napkin.hardware.cluster import Interconnect, Node, find_cluster, interconnect_of, node_of
from napkin.hardware.competition import Sample, Sampler
from napkin.hardware.device import Device
from napkin.hardware.device_file import find_device
from napkin.hardware.host import detect_host, keep_freed_memory
from napkin.hardware.microbenchmarks import current_machine
from napkin.hardware.rank_calibration import RankCalibration, ranks_of_this_machine
from napkin.hardware.target import CudaTarget, Target
from napkin.kernels.operators import triton_obstacle
from napkin.model.config_checks import mixer_pattern
from napkin.planning.step.site import Site, fits
from napkin.recipe.precision import NARROW, Precision, PrecisionName, choose_device, choose_precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.tensors import random_state_kept
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step

Progress = Callable[[str], None]


class Machine(ABC):
    """One device, or several of one kind."""

    n_devices: int
    device_name: str
    """The vendor's name of the device."""
    measured: bool
    """True if its ceilings were measured, False if they are a datasheet's."""
    memory_bytes: int
    """Memory of one device that is available for tensors."""
    gpu_bytes: int | None
    """Total memory of one GPU; None for a CPU."""
    target: Target | None
    """The device that a step is counted for; None is the device type of the precision."""

    @abstractmethod
    def precision(self, wanted: Literal["auto"] | PrecisionName) -> Precision:
        """Resolve the precision for the device. Raises NapkinError for a format that it lacks."""

    @abstractmethod
    def training(self, training: TrainingConfig, precision: Precision) -> TrainingConfig:
        """[training] with the fields that depend on the machine written out."""

    @abstractmethod
    def triton_obstacle(self) -> str | None:
        """Why napkin's Triton kernels do not run there; None if they do."""

    @abstractmethod
    def prepare(self, training: TrainingConfig) -> None:
        """Set up this process as training does."""

    @abstractmethod
    def ceilings(self, precision: Precision) -> Ceilings:
        """The ceilings of an operator's time; the first call on this machine measures them, which takes seconds."""

    @abstractmethod
    def price(
        self, resolved: ResolvedRecipe, ledgers: Sequence[Ledger], ceilings: Ceilings, progress: Progress
    ) -> list[Price]:
        """The seconds that each of several ranks, or parts of a rank's step, takes to compute."""

    @abstractmethod
    def site(self, precision: Precision, ceilings: Ceilings) -> Site:
        """The device figures that a plan states."""


class ThisMachine(Machine):
    """This machine, divided among the ranks that run on it."""

    measured = True
    target: Target | None = None

    def __init__(self, ranks: Ranks = ALONE, *, device: Literal["auto", "cpu", "cuda"] = "auto") -> None:
        self.ranks = ranks
        self.n_devices = ranks.world_size
        self.host = detect_host()
        self.device_type: Literal["cpu", "cuda"] = choose_device(device)
        if self.device_type == "cuda":
            self.device_name = self.host.accelerators[0].name
            self.gpu_bytes = self.host.accelerators[0].memory_bytes
            self.memory_bytes = torch.cuda.mem_get_info()[0]
        else:
            self.device_name = self.host.cpu_name
            self.gpu_bytes = None
            available = min(self.host.available_bytes, psutil.virtual_memory().available)
            # The ranks of one machine divide its memory equally.
            self.memory_bytes = available // self._ranks_per_device

    @property
    def _ranks_per_device(self) -> int:
        return self.ranks.info.local_world_size if self.device_type == "cpu" else 1

    def precision(self, wanted: Literal["auto"] | PrecisionName) -> Precision:
        return choose_precision(wanted, self.device_type, self.host)

    def training(self, training: TrainingConfig, precision: Precision) -> TrainingConfig:
        """Device, precision and threads."""
        threads = self.ranks.threads(training.threads, self.host.cores)
        return dataclasses.replace(training, device=self.device_type, precision=precision.name, threads=threads)

    def triton_obstacle(self) -> str | None:
        """The reason why Triton does not run on the kind of device that trains; None if it does."""
        return triton_obstacle(self.device_type)

    def prepare(self, training: TrainingConfig) -> None:
        """Set the number of threads and the handling of freed memory as in training."""
        assert training.threads is not None
        torch.set_num_threads(training.threads)
        keep_freed_memory()

    def ceilings(self, precision: Precision) -> Calibration:
        """Measured once, and cached on the disk."""
        return calibration_of_this_machine(self.device_type)

    def price(
        self, resolved: ResolvedRecipe, ledgers: Sequence[Ledger], ceilings: Ceilings, progress: Progress
    ) -> list[Price]:
        """Time each operator alone, and a probe run of a few layers, if the step fits; otherwise use rooflines."""
        free = self.memory_bytes
        if not fits(max(ledger.peak_bytes for ledger in ledgers), free):
            return [price(ledger, ceilings) for ledger in ledgers]
        timed: Mapping[Hashable, float] = {}
        with Sampler(self.device_type) as sampler:
            progress("timing the operators")
            for ledger in ledgers:
                timed = time_operators(
                    ledger,
                    lambda row: roofline_seconds(row, ceilings),
                    device_type=self.device_type,
                    # The tensors of one operator are only a part of the step's.
                    max_bytes=free // 4,
                    known=timed,
                    sampler=sampler,
                )
            progress("training a few layers")
            disturbed = isinstance(ceilings, Calibration) and ceilings.disturbed
            between, factor = time_probe_run(
                resolved, ledgers[0], ceilings, timed, max_bytes=free // 2, sampler=sampler, disturbed=disturbed
            )
            conditions = sampler.conditions()
        # The other ranks of this machine wait while it is timed.
        between *= 1.0 if self._rank_calibration is None else self._rank_calibration.contention
        return [
            price(ledger, ceilings, timed, between=between, factor=factor, conditions=conditions) for ledger in ledgers
        ]

    @functools.cached_property
    def _rank_calibration(self) -> RankCalibration | None:
        """The factors by which ranks slow each other down and communicate, if all of them share this machine's CPU."""
        info = self.ranks.info
        if self.device_type != "cpu" or not 1 < info.world_size == info.local_world_size:
            return None
        return ranks_of_this_machine(current_machine("cpu"), info.world_size)

    def site(self, precision: Precision, ceilings: Ceilings) -> Site:
        """Measured peaks, for a CPU divided by its ranks. Prices of a GPU are those of the catalogue."""
        assert isinstance(ceilings, Calibration)
        bandwidth, gpu = ceilings.memory_bandwidth / self._ranks_per_device, None
        # On a CPU each byte of a copy is read and written, and so is what its ranks send each other.
        half = bandwidth / 2
        host, interconnect = half, Interconnect(half, half, self.n_devices, 0.0, 0.0, 0.0)
        if self.device_type != "cpu":
            with contextlib.suppress(NapkinError):
                gpu = find_device(self.device_name)
            host = gpu.host_bandwidth if gpu else None
            interconnect = interconnect_of(gpu, node_of(gpu), efficiency_of(gpu)) if gpu else None
        if self._rank_calibration is not None:
            interconnect = self._rank_calibration.interconnect
        return Site(
            device_name=self.device_name,
            matmul_peak=ceilings.matmul_peak(precision.products) / self._ranks_per_device,
            memory_bytes=self.memory_bytes,
            bytes_per_second=bandwidth,
            n_devices=self.n_devices,
            interconnect=interconnect,
            **_costs(gpu, self.n_devices),
            disturbed=ceilings.disturbed or bool(self._rank_calibration and self._rank_calibration.disturbed),
            host_bandwidth=host,
        )


class CatalogueMachine(Machine):
    """Devices of the catalogue, by their datasheet."""

    measured = False

    def __init__(
        self, device: Device, n_devices: int = 1, *, node: Node | None = None, efficiency: Efficiency | None = None
    ) -> None:
        """`node` and `efficiency` are by default those that the tables have for the device."""
        self.device = device
        self.n_devices = n_devices
        self.node = node or node_of(device)
        self.efficiency = efficiency or efficiency_of(device)
        self.device_name = device.name
        self.memory_bytes = device.usable_bytes
        self.gpu_bytes = None if device.torch_device == "cpu" else device.memory_bytes
        self.target = target_of(device)

    def precision(self, wanted: Literal["auto"] | PrecisionName) -> Precision:
        """Resolve "auto" to bf16 if the device has it."""
        name = self.device.choose_format("auto") if wanted == "auto" else wanted
        native = name in NARROW and name in self.device.peaks
        precision = Precision(name, self.device.torch_device, self.device.torch_device if native else "emulated")
        self.device.peak(precision.products)
        return precision

    def training(self, training: TrainingConfig, precision: Precision) -> TrainingConfig:
        """Only the precision: device and threads are resolved on the machine that trains."""
        return dataclasses.replace(training, precision=precision.name)

    def triton_obstacle(self) -> str | None:
        """Judged by the vendor: torch's builds for GPUs include Triton."""
        return (
            None if isinstance(self.target, CudaTarget) else f"{self.device_name} is not a GPU that Triton compiles for"
        )

    def prepare(self, training: TrainingConfig) -> None: ...

    def ceilings(self, precision: Precision) -> CatalogueCeilings:
        """Fractions of the datasheet's figures."""
        return CatalogueCeilings(self.device, self.efficiency)

    def price(
        self, resolved: ResolvedRecipe, ledgers: Sequence[Ledger], ceilings: Ceilings, progress: Progress
    ) -> list[Price]:
        return [price_with_launches(ledger, ceilings, factor=self.efficiency.factor) for ledger in ledgers]

    def site(self, precision: Precision, ceilings: Ceilings) -> Site:
        """Peak, memory, price and power of the catalogue."""
        device = self.device
        return Site(
            device_name=device.name,
            matmul_peak=device.peak(precision.products),
            memory_bytes=device.usable_bytes,
            bytes_per_second=device.memory_bandwidth,
            n_devices=self.n_devices,
            interconnect=interconnect_of(device, self.node, self.efficiency),
            **_costs(device, self.n_devices),
            measured=False,
            host_bandwidth=device.host_bandwidth,
        )


def machine_of(on: str | Machine | None, *, ranks: Ranks = ALONE, device: Literal["auto", "cpu", "cuda"]) -> Machine:
    """The machine of a plan: devices of the catalogue, as `find_cluster` reads them; None is this machine.

    Raises NapkinError for a name that is not in the catalogue.
    """
    if isinstance(on, Machine):
        return on
    if on is None:
        return ThisMachine(ranks, device=device)
    cluster = find_cluster(on)
    return CatalogueMachine(cluster.device, cluster.n_devices, node=cluster.node)


def target_of(device: Device) -> Target:
    """The device as a count depends on it; one that does not run PyTorch's kernels is counted as a CPU."""
    if device.compute_capability:
        multiprocessors = device.multiprocessors or CudaTarget().multiprocessors
        return CudaTarget(device.compute_capability, multiprocessors=multiprocessors)
    # ROCm's PyTorch has the same allocator, and flash attention.
    return CudaTarget(cudnn_attention=False) if device.vendor == "AMD" else "cpu"


def _costs(device: Device | None, n_devices: int) -> dict[str, Any]:
    """Dollars per hour and watts of all devices, as a `Site` has them, and whose offer the price is."""
    price = device.price if device else None
    return {
        "usd_per_hour": n_devices * price.usd_per_hour if price else None,
        "offer": str(price) if price else None,
        "watts": n_devices * device.watts if device and device.watts else None,
    }


# Operators that are timed alone have their tensors in the cache and no overhead between them; in a step autograd and
# Python run in between, and the tensors have left the cache. The overhead of the probe run relative to its operators is
# taken as that of the whole model.

LAYERS = 2
WARM_UP_STEPS = 2
STEPS = range(3, 12)
"""Fewest and most steps that are timed; between the two, as many as take `SECONDS`."""
SECONDS = 0.8
MOST_SECONDS = 8.0
"""A probe run that would take longer than this in all is not made."""

PROBED_FACTOR = 1.045
"""Error of the predicted seconds, as a factor, in nine cases of ten with a probe run whose steps all take equally long:
what benchmarks/step_seconds.py finds on a quiet machine. What varies comes on top."""
DISTURBED_FACTOR = 1.2
"""The same for a machine that other processes were using while it was calibrated or the step was timed."""
NINE_IN_TEN = 1.645
"""Standard deviations on either side that nine in ten of a normal distribution lie within."""
REPEAT_SECONDS = 0.3
"""Seconds of timing the largest operators once more."""
UNPROBED_FACTOR = 2.0
"""The same where only operators were timed: the Python between them weighs most in small steps."""


def time_probe_run(
    resolved: ResolvedRecipe,
    counted: Ledger,
    ceilings: Ceilings,
    timed: Mapping[Hashable, float],
    *,
    max_bytes: int,
    sampler: Sampler,
    disturbed: bool = False,
) -> tuple[float, float]:
    """The ratio of a step's seconds to those of its operators timed alone, and the expected error as a factor.

    Takes about a second, and at most `max_bytes`. Where the probe run would take too much time or memory, nothing is
    run and (1, `UNPROBED_FACTOR`) is returned. `counted` is the ledger of the step, `timed` are the operator calls
    whose seconds are already known; `sampler`, which is in use, times steps and calls; `disturbed` is whether other
    processes were running while `ceilings` were measured.
    """
    recipe, device_type = resolved.per_device, resolved.precision.device_type
    # All micro-batches from the second on are equal.
    batch_size = min(recipe.training.batch_size, 2 * recipe.training.resolved_micro_batch_size)
    # Layers with experts come after the dense ones, and each token mixer once in its pattern.
    pattern = len(mixer_pattern(recipe.model.mixers))
    layers = min(max(LAYERS, recipe.model.n_dense_layers + 1, pattern), recipe.model.n_layers)
    probe = dataclasses.replace(resolved, recipe=recipe, world_size=1)
    probe = probe.with_model(n_layers=layers).with_training(batch_size=batch_size)
    ledger = counted if probe == resolved else count_step(probe)

    def expected(row: Row) -> float:
        return roofline_seconds(row, ceilings)

    def timing(**further: Any) -> Mapping[Hashable, float]:
        return time_operators(
            ledger, expected, device_type=device_type, max_bytes=max_bytes, sampler=sampler, **further
        )

    known = timing(known=timed)
    alone = price(ledger, ceilings, known).seconds
    if ledger.peak_bytes > max_bytes or alone * (WARM_UP_STEPS + STEPS.start) > MOST_SECONDS:
        return 1.0, UNPROBED_FACTOR
    with random_state_kept(device_type):
        steps = _timed_steps(probe, sampler)
    # The largest operators once more: seconds have passed, and what they take now shows how much the machine wavers.
    again = timing(max_seconds=REPEAT_SECONDS)
    twice = [row.call for row in ledger.rows if row.call in known and row.call in again]
    before, after = (sum(seconds[call] for call in twice) for seconds in (known, again))
    drift = after / before if before and after else 1.0
    conditions = sampler.conditions()
    disturbed = disturbed or (conditions is not None and conditions.busy)
    factor = stated_factor(sampler.undisturbed(steps), drift, disturbed=disturbed)
    return sampler.seconds(steps) / alone, factor


def stated_factor(steps: Sequence[float], drift: float, *, disturbed: bool) -> float:
    """The factor that a step's seconds are expected to stay within, in nine cases of ten.

    `steps` are seconds of the probe run's steps, which are alike; `drift` is how much longer the same operators took
    the second time, as a factor; `disturbed` is whether other processes were running meanwhile.
    """
    middle = statistics.median(steps)
    # The median distance from the median: one slow step is no reason for a wide interval. 1.4826 makes it a standard
    # deviation.
    spread = 1.4826 * statistics.median(abs(taken / middle - 1) for taken in steps)
    parts = [math.log(PROBED_FACTOR), NINE_IN_TEN * spread, NINE_IN_TEN * math.log(drift)]
    if disturbed:
        parts.append(math.log(DISTURBED_FACTOR))
    return min(UNPROBED_FACTOR, math.exp(math.hypot(*parts)))


def _timed_steps(resolved: ResolvedRecipe, sampler: Sampler) -> list[Sample]:
    recipe, device_type = resolved.recipe, resolved.precision.device_type
    train_state = build_train_state(resolved)
    generator = torch.Generator().manual_seed(0)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(device_type)
    batch = (tokens, tokens, torch.zeros_like(tokens)) if recipe.data.separate_documents else (tokens, tokens)
    taken: list[Sample] = []
    for number in range(WARM_UP_STEPS + STEPS.stop):
        sample = sampler.sample(lambda number=number: train_state.step(number, *batch))
        if number >= WARM_UP_STEPS:
            taken.append(sample)
        if len(taken) >= STEPS.start and sum(sampler.undisturbed(taken)) > SECONDS:
            break
    return taken
