"""Profile a training step: a few real ones under torch's profiler, and one recorded as a ledger.

`profile_recipe` profiles the step of a recipe: planned as for training, with new weights, on random tokens. Where a
CUDA device computes, a step's modules and its update are NVTX ranges for Nsight Systems.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from napkin.accounting.ledger import Ledger
from napkin.accounting.metering import meter_step
from napkin.accounting.microbenchmark import time_operators
from napkin.accounting.pricing import Price, computed_flops, price, roofline_seconds, roofs_of
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.host import detect_host
from napkin.planning.planner import plan_resolved, resolve
from napkin.planning.step.machine import ThisMachine
from napkin.planning.step.memory_savings import refuse_what_does_not_fit
from napkin.planning.step.run_plan import Plan
from napkin.profiling.memory_snapshot import MemorySnapshot, record_snapshot
from napkin.profiling.operator_calls import CallsOfStep, ProfiledStep, calls_of_step, matched_rows, profiled_steps
from napkin.profiling.step_profile import ProfiledSpan, StepProfile, middle, profile_rows, sites_of_calls
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state


@contextmanager
def nvtx_ranges(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Mark the forward pass of each part of `module`, and each optimizer's step, while the block runs."""
    if device.type != "cuda":
        yield
        return
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    paths = {id(child): name for name, child in module.named_modules()}

    # The hooks return None: anything else would replace arguments or output.
    def enter(child: nn.Module, _: Any) -> None:
        push(f"forward {paths.get(id(child), type(child).__name__)}")

    def leave(*_: Any) -> None:
        pop()

    def enter_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        push(f"optimizer {type(optimizer).__name__}")

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(enter_update),
        register_optimizer_step_post_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


STEPS = 5
WARM_UP = 3
"""Steps of warm-up: the first creates the optimizer's state, the second and third warm caches."""


def profile(
    step: Callable[[], Any],
    module: nn.Module | None = None,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    device: str | torch.device | None = None,
    ceilings: Ceilings | None = None,
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda doing: None,
    title: str = "a step",
) -> StepProfile:
    """Say where the seconds of a training step go, operator by operator, beside what was planned.

    Args:
        step: trains once; it is called `warm_up` + 4 · `steps` + 2 times, and trains as often.
        module: what it trains, whose parts name the rows. Without it, rows are named by the classes of modules.
        steps: that are profiled, each beside one that is timed without the profiler.
        warm_up: steps before anything is measured.
        device: where it computes; None is the module's device, or the CPU.
        ceilings: the machine; None is this one, which is measured once.
        plan: of the run whose step this is; without one, the recorded step is priced on this machine, each of its
            operators timed alone.
        progress: called with a description of each stage.
        title: a name for the step.

    A row has the calls of one operator from one module in one phase. On a CPU its seconds are those of the calls; on
    CUDA those of their kernels. Raises NapkinError where another profiler is running, or the device is neither.
    """
    root = nn.Module() if module is None else module
    where = _device_of(root, device)
    measured = measured_steps(step, root, where, steps=steps, warm_up=warm_up, progress=progress)
    if ceilings is None:
        progress("measuring this machine, once")
        ceilings = calibration_of_this_machine(where.type)
    expected = plan.price if plan else _priced(measured.ledger, ceilings, where, progress)
    return assembled(measured, where, ceilings, expected, plan.ledger if plan else None, title=title)


class MeasuredSteps(NamedTuple):
    """The profiler's record of some steps."""

    profiled: list[ProfiledStep]
    plain_seconds: list[float]
    """Seconds of a step without the profiler, one next to each profiled step."""
    ledger: Ledger
    """The ledger of the recorded step."""


def measured_steps(
    step: Callable[[], Any],
    module: nn.Module,
    device: torch.device,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    progress: Callable[[str], None] = lambda doing: None,
) -> MeasuredSteps:
    """Record one step; then profile `steps` of them, each beside one without the profiler, in turns of their order.

    Machines waver by more than the profiler takes: only steps that are next to each other can be compared. `step` is
    called `warm_up` + 4 · `steps` + 2 times in all.
    """
    if steps < 1 or warm_up < 0:
        raise NapkinError(f"profile: {steps} steps after {warm_up} of warm-up: use at least 1 after at least 0")
    progress("warming up")
    for _ in range(warm_up):
        step()
    progress("recording a step")
    ledger = meter_step(module, step, device_type=device.type).ledger
    step()
    progress("profiling")
    profiled: list[ProfiledStep] = []
    plain: list[float] = []
    for number in range(steps):
        step()
        if number % 2:
            plain.append(_timed(step, device))
        with nvtx_ranges(module, device):
            # A session's first step is slower.
            profiled += profiled_steps(step, device, steps=1, warm_up=1)
        if not number % 2:
            plain.append(_timed(step, device))
    return MeasuredSteps(profiled, plain, ledger)


def assembled(
    measured: MeasuredSteps,
    device: torch.device,
    ceilings: Ceilings,
    price: Price | None = None,
    planned_ledger: Ledger | None = None,
    *,
    title: str = "a step",
) -> StepProfile:
    """The profile of steps that were measured, beside their price."""
    profiled, plain, ledger = measured
    roofs = roofs_of(ledger.rows, ceilings)
    operators = [row.operator for row in ledger.rows]
    divided = [calls_of_step(each) for each in profiled]
    matched = [matched_rows([call.operator for call in each.calls], operators) for each in divided]
    rows, outside = profile_rows(zip(divided, matched, strict=True), ledger, roofs, price)
    seconds = [(each.end - each.begin) / 1e9 for each in profiled]
    shown = seconds.index(middle(seconds))
    return StepProfile(
        rows=rows,
        outside=outside,
        seconds=sum(seconds) / len(seconds),
        profiled_seconds=tuple(seconds),
        plain_seconds=tuple(plain),
        ledger=ledger,
        row_moments=_moments(divided[shown], matched[shown], profiled[shown].begin, len(operators)),
        trace=tuple(_spans(profiled[shown], divided[shown], matched[shown], ledger)),
        trace_seconds=seconds[shown],
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else detect_host().cpu_name,
        device_type=device.type,
        roofs=roofs,
        price=price,
        planned_ledger=planned_ledger,
        title=title,
    )


def _device_of(module: nn.Module, device: str | torch.device | None) -> torch.device:
    first = next(module.parameters(), None)
    of_step = torch.device(device) if device is not None else torch.device("cpu") if first is None else first.device
    if of_step.type not in ("cpu", "cuda"):
        raise NapkinError(f"profile: the step is on {of_step}: only a CPU or a CUDA device can be profiled")
    return of_step


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _priced(ledger: Ledger, ceilings: Ceilings, device: torch.device, progress: Callable[[str], None]) -> Price | None:
    progress("timing the operators")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    try:
        timed = time_operators(
            ledger, lambda row: roofline_seconds(row, ceilings), device_type=device.type, max_bytes=free // 4
        )
        return price(ledger, ceilings, timed)
    except NapkinError:
        # Products in a format that the machine was not measured in, such as fp64.
        return None


def _moments(step: CallsOfStep, rows: list[int | None], begin: int, count: int) -> tuple[float | None, ...]:
    moments: list[float | None] = [None] * count
    for call, number in zip(step.calls, rows, strict=True):
        if number is not None:
            moments[number] = (call.end - begin) / 1e9
    return tuple(moments)


def _spans(profiled: ProfiledStep, step: CallsOfStep, rows: list[int | None], ledger: Ledger) -> Iterable[ProfiledSpan]:
    sites = sites_of_calls(step, rows, ledger)
    for call, site, number in zip(step.calls, sites, rows, strict=True):
        row = None if number is None else ledger.rows[number]
        flops, touched = (0.0, 0) if row is None else (computed_flops(row), row.bytes_read + row.bytes_written)
        yield ProfiledSpan(*site, call.begin - profiled.begin, call.end - profiled.begin, flops, touched)
    for kernel, number in step.kernels:
        site = ("", "", "") if number is None else sites[number]
        begin, end = kernel.begin - profiled.begin, kernel.end - profiled.begin
        yield ProfiledSpan(*site, begin, end, kernel=kernel.name, stream=kernel.stream)


def profile_recipe(
    recipe: Recipe,
    *,
    steps: int = STEPS,
    ranks: Ranks = ALONE,
    progress: Callable[[str], None] = lambda doing: None,
    title: str = "a step",
    keep_snapshot: Callable[[MemorySnapshot], Any] | None = None,
) -> StepProfile:
    """Plan a recipe's step on this machine and profile it.

    The weights are new and the tokens random, which changes neither operators nor shapes; only a router of experts
    would divide other tokens otherwise. Nothing is read but the tokenizer's size and nothing is written.

    Of several ranks, each profiles its own step, and all have to call this; the result is this rank's, with a line for
    each rank. `keep_snapshot` gets the memory snapshot of two more steps. Raises NapkinError where the step does not
    fit into memory.
    """
    machine = ThisMachine(ranks, device=recipe.training.device)
    resolved, plan, compiled = _agreed(recipe, machine, ranks, progress)
    machine.prepare(resolved.recipe.training)
    train_state = build_train_state(resolved, ranks, compiled=compiled)
    device = torch.device(resolved.precision.device_type)
    step = _step_of(train_state, resolved)
    measured = measured_steps(step, train_state.model, device, steps=steps, progress=progress)
    if keep_snapshot is not None:
        progress("taking the memory snapshot")
        keep_snapshot(record_snapshot(step, train_state.model, device))
    ceilings = machine.ceilings(resolved.precision)
    if plan is None:
        profile = assembled(measured, device, ceilings, title=title)
    else:
        profile = assembled(measured, device, ceilings, plan.price, plan.ledger, title=title)
    return profile if ranks.world_size == 1 else replace(profile, ranks=tuple(ranks.all_gather(_told(profile))))


def _agreed(
    recipe: Recipe, machine: ThisMachine, ranks: Ranks, progress: Callable[[str], None]
) -> tuple[ResolvedRecipe, Plan | None, bool]:
    """The resolved recipe, the plan, which rank 0 alone has, and whether blocks are compiled."""
    made: list[Plan] = []

    def make() -> tuple[dict[str, Any], Any, bool]:
        plan = plan_resolved(resolve(recipe, machine, progress=progress), machine, progress=progress)
        refuse_what_does_not_fit(plan)
        made.append(plan)
        chosen = plan.resolved.recipe
        # Each rank might time another form as the fastest.
        training = {name: getattr(chosen.training, name) for name in ("micro_batch_size", "kernels")}
        return training, chosen.model.attention, chosen.training.compile == "on"

    training, attention, compiled = ranks.broadcast_from_zero(make)
    if made:
        return made[0].resolved, made[0], compiled
    model, training = replace(recipe.model, attention=attention), replace(recipe.training, **training)
    return resolve(replace(recipe, model=model, training=training), machine), None, compiled


def _step_of(train_state: TrainState, resolved: ResolvedRecipe) -> Callable[[], Any]:
    recipe, device = resolved.per_device, resolved.precision.device_type
    generator = torch.Generator().manual_seed(0)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(device)
    batch = (tokens, tokens, torch.zeros_like(tokens)) if recipe.data.separate_documents else (tokens, tokens)
    # Always step 0 of the schedule: all steps compute the same.
    return lambda: train_state.step(0, *batch)


def _told(found: StepProfile) -> dict[str, float]:
    """A rank's seconds, as sent to the other ranks."""
    collectives = {"wait_tensor", *(row.operator for row in found.ledger.rows if row.collective is not None)}
    waiting = sum(row.figures.seconds for row in found.rows if row.operator in collectives)
    return {
        "seconds": found.seconds,
        "operators": found.total.seconds - waiting,
        "collectives": waiting,
        "outside": found.seconds - found.total.seconds,
        "overhead": found.overhead,
    }
