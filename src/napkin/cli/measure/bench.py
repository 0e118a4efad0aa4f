"""`napkin bench` in its forms: operators, parts of a model, and collectives, timed beside the limits of the machine.

What all rows share is printed in a line, and what differs in a table.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError, plain, suggestion
from napkin.recipe.precision import PrecisionName
from napkin.units import format_bytes, format_rate, format_seconds, format_share, format_three_digits

if TYPE_CHECKING:
    from napkin.benchmarking.case import Case, Target
    from napkin.benchmarking.collective_bench import AlphaBeta, CollectiveRow
    from napkin.benchmarking.measuring import Conditions, Row
    from napkin.hardware.cluster import Operation
    from napkin.planning.step.machine import ThisMachine

PassName = Literal["forward", "backward", "both", "step"]
MOST_SECONDS = 3600.0
_COMPILED = "+compiled"
FORMS = "forms"


@dataclass(frozen=True)
class TimingOptions(JsonOption):
    """Options of everything that can be timed."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of what is timed; without a name, everything that can be timed is listed."""
    shapes: tuple[str, ...] = ()
    """One or several, as in context_length=256,head_dim=64; dimensions that are not named keep their size. For parts of
    a model size=small, medium, large, xl or 2.7B stands for several."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that computes; auto is the GPU if there is one."""
    threads: int | None = None
    """CPU threads; None is one per core."""
    sweep: Switch = False
    """A table over sizes: for models five sizes, four context lengths, fp32 and bf16, compiled and not, forward,
    backward and step. What does not fit says so in its row. For collectives 1 MB to 1 GB among 2, 4 and 6 ranks."""
    seconds: float = 0.5
    """Seconds of timing for each row, after its warm-up."""

    def __post_init__(self) -> None:
        _refuse_seconds("seconds", self.seconds)
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise NapkinError(f"--threads is {self.threads}: use 1 to 1024")


def _refuse_seconds(name: str, value: float) -> None:
    if not 0 < value <= MOST_SECONDS:
        raise NapkinError(f"--{name} is {value}: use more than 0 and at most {MOST_SECONDS:.0f}")


@dataclass(frozen=True)
class OperatorOptions(TimingOptions):
    """Time an operator, such as attention, or with options of their own a part of a model (napkin bench module mlp) or
    a collective (napkin bench collective all-reduce): the median with its 95% interval, FLOP/s, bytes/s and the share
    of the machine's roof. Without a name, print what can be timed."""

    form: tuple[str, ...] = ()
    """Forms of an operator; attention implementations of a model; activations of mlp. None is all of an operator, of a
    model the one that training takes."""
    against: str | None = None
    """A form that the others are timed in turns with, for the ratio of their seconds; add +compiled for that form
    compiled."""
    precision: tuple[PrecisionName, ...] = ()
    """Formats of operators, recipes of formats for models. None is this machine's."""
    passes: Annotated[tuple[PassName, ...], tyro.conf.arg(name="pass")] = ()
    """Passes to time: forward and backward each alone, both together, or step, which is both and the update, of a
    transformer. None is forward and backward."""
    cache: Literal["warm", "cold", "both"] = "warm"
    """Whether the caches are emptied before each sample."""
    compiled: Literal["off", "on", "both"] | None = None
    """Whether torch.compile compiles it; None is off, and in a sweep both."""
    most_seconds: float = 60.0
    """A row whose warm-up and fewest samples would take longer by plan is not run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_seconds("most-seconds", self.most_seconds)


@command("bench", OperatorOptions)
def bench_operator(options: OperatorOptions) -> int:
    with progress_line("loading"):
        from napkin.benchmarking.collective_bench import COLLECTIVES
        from napkin.benchmarking.module_target import MODULES
        from napkin.benchmarking.operators import OPERATORS, OperatorTarget

    if not options.name:
        rows = [(name, "operator", ", ".join(each.forms), each.about) for name, each in OPERATORS.items()]
        rows += [(name, "model", "", about) for name, about in MODULES.items()]
        rows += [
            (name, "collective", "", "among processes of this machine, or ranks of torchrun") for name in COLLECTIVES
        ]
        rows.append((FORMS, "choices", "", "the forms that were timed and chosen on this machine"))
        print_table(("name", "kind", "forms", "what"), rows, align="llll")
        return 0
    if plain(options.name) == FORMS:
        return _print_choices(options)
    name = _known(options.name, OPERATORS, [*OPERATORS, *MODULES, *COLLECTIVES])
    return _time_cases(options, name, lambda machine: OperatorTarget(name, machine.device_type))


def _print_choices(options: OperatorOptions) -> int:
    """Print the choices of forms that are kept for this processor and this number of threads."""
    import torch

    from napkin.hardware.host import usable_cores
    from napkin.kernels.operator_forms import kept_choices, this_processor

    torch.set_num_threads(options.threads or usable_cores())
    processor, choices = (
        this_processor(),
        sorted(kept_choices(), key=lambda each: (each.operator, each.default_seconds)),
    )
    if options.json:
        print_json({"processor": processor, "choices": choices})
        return 0
    say(f"{processor.name} ({processor.capability}), {processor.threads} threads, torch {processor.torch_version}")
    rows = [
        (
            *(each.operator, each.form, f"{each.default} {format_seconds(each.default_seconds)}"),
            ", ".join(f"{name} {ratio:.2f}" for name, ratio in each.ratios.items() if name != each.default),
            ", ".join(map(str, each.shape_class)),
        )
        for each in choices
    ]
    if rows:
        print_table(("operator", "fastest", "default", "× default", "shape"), rows, align="lllll")
    else:
        say("no forms were timed: the first plan of a longer run on a CPU times those of its blocks")
    return 0


@dataclass(frozen=True)
class ModuleOptions(OperatorOptions):
    """Time a part of a model: transformer, block, self-attention or mlp."""

    recipe: str | None = None
    """TOML file of the model whose parts are timed; None is the default model."""
    preset: str | None = None
    """A published model instead, as for `napkin count`."""


@command("bench module", ModuleOptions)
def bench_module(options: ModuleOptions) -> int:
    if options.recipe is not None and options.preset is not None:
        raise NapkinError("--recipe and --preset both name a model: use one of them")
    with progress_line("loading"):
        from napkin.benchmarking.module_target import MODULES, ModuleTarget
        from napkin.cli.common.recipe_options import RecipeSource, base_recipe

    name = _known(options.name, MODULES)
    recipe = base_recipe(RecipeSource(options.recipe, ()), options.preset)
    return _time_cases(options, name, lambda machine: ModuleTarget(name, recipe, machine.device_type))


def _known(name: str, known: Iterable[str], shown: Sequence[str] = ()) -> str:
    match = next((each for each in known if plain(each) == plain(name)), None)
    if match is None:
        raise NapkinError(f"'{name}' cannot be timed: {suggestion(name, shown or list(known))}")
    return match


def _time_cases(options: OperatorOptions, name: str, target_on: "Callable[[ThisMachine], Target]") -> int:
    """Time the cases of an operator or a module, and print the rows; after an interruption those that are done."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NapkinError(f"torchrun has started several ranks, but one process times {name}: leave torchrun out")
    with progress_line("preparing") as line:
        import torch

        from napkin.benchmarking.measuring import Conditions, Limits, Measuring
        from napkin.hardware.host import keep_freed_memory
        from napkin.planning.step.machine import ThisMachine

        machine = ThisMachine(device=options.device)
        torch.set_num_threads(options.threads or machine.host.cores)
        keep_freed_memory()
        target = target_on(machine)
        cases, against = _cases(options, target, machine), None
        if options.against is not None:
            against = _form(options.against.removesuffix(_COMPILED), target), options.against.endswith(_COMPILED)
        measuring = Measuring(
            target,
            machine.device_type,
            machine.ceilings(machine.precision("auto")),
            Limits(machine.memory_bytes, options.most_seconds),
            seconds=options.seconds,
        )
        conditions = Conditions(machine.device_type)
        rows, interrupted = [], False
        try:
            # Rows that were measured before an interruption stay in the list.
            rows.extend(measuring.rows(cases, against, progress=line))
        except KeyboardInterrupt:
            interrupted = True
    if rows or not interrupted:
        _print_rows(name, rows, conditions, as_json=options.json)
    if interrupted:
        notify(f"bench: interrupted after {len(rows)} of {len(cases)} rows")
        return 130
    return 0


def _cases(options: OperatorOptions, target: "Target", machine: "ThisMachine") -> "list[Case]":
    from napkin.benchmarking.case import Case, read_shapes

    shapes = read_shapes(options.shapes, target.dimensions, target.named_sizes) if options.shapes else target.shapes
    if options.sweep and not options.shapes:
        shapes = target.sweep
    for each in options.passes:
        if each not in target.passes:
            raise NapkinError(f"--pass {each} is not a pass of it: use {', '.join(target.passes)}")
    forms = [_form(each, target) for each in options.form]
    formats = options.precision or (("fp32", "bf16") if options.sweep else ("auto",))
    precisions = [machine.precision(each) for each in formats]
    caches = {"warm": (False,), "cold": (True,), "both": (False, True)}[options.cache]
    passes: Sequence[PassName] = options.passes or [
        each for each in target.passes if each != "both" and (options.sweep or each != "step")
    ]
    compiled = _compiled(options, machine)
    return [
        Case(shape, form, precision, which, each, cold)
        for shape in map(target.whole, shapes)
        for precision in precisions
        for which in passes
        for cold in caches
        for form in forms or target.usual_forms(shape, precision)
        for each in compiled
    ]


def _compiled(options: OperatorOptions, machine: "ThisMachine") -> tuple[bool, ...]:
    from napkin.train_step.compile import missing_compiler

    wanted = options.compiled or ("both" if options.sweep else "off")
    against_compiled = options.against is not None and options.against.endswith(_COMPILED)
    missing = missing_compiler(machine.device_type) if wanted != "off" or against_compiled else None
    if missing is not None:
        if against_compiled or (wanted != "off" and options.compiled is not None):
            raise NapkinError(f"nothing can be compiled here: {missing}; use --compiled off")
        notify(f"bench: compiled forms are left out: {missing}")
        return (False,)
    return {"off": (False,), "on": (True,), "both": (False, True)}[wanted]


def _form(name: str, target: "Target") -> str:
    if name not in target.forms:
        raise NapkinError(f"there is no form '{name}' of it here: {suggestion(name, target.forms)}")
    return name


def _print_rows(name: str, rows: "Sequence[Row]", conditions: "Conditions", *, as_json: bool) -> None:
    """Print the rows, and what else was so while they were measured."""
    if as_json:
        from napkin.benchmarking.measuring import row_values

        print_json({"name": name, "conditions": conditions.values(), "rows": [row_values(row) for row in rows]})
        return
    described = [
        {
            "form": row.case.name,
            **{dimension: str(size) for dimension, size in row.case.shape.items()},
            "precision": row.case.precision.name,
            "pass": row.case.timed,
            "cache": "cold" if row.case.cold else "warm",
        }
        for row in rows
    ]
    names = list(dict.fromkeys(key for each in described for key in each))
    differ = [key for key in names if len({each.get(key) for each in described}) > 1]
    shared = ", ".join(f"{key} {described[0][key]}" for key in names if key not in differ)
    say(f"{name}: {shared}")
    headings = [*(key.replace("_", " ") for key in differ), "median", "±", "FLOP/s", "bytes/s", "of roof", "bound"]
    compared = sorted({row.against for row in rows if row.against})
    headings += [f"over {other}" for other in compared]
    noted = any(map(_note, rows))
    cells = []
    for row, each in zip(rows, described, strict=True):
        ratio = f"{row.ratio.median:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})" if row.ratio else ""
        ratios = [ratio if row.against == other else "" for other in compared]
        cells.append([*(each.get(key, "") for key in differ), *_measured(row), *ratios, *[_note(row)] * noted])
    align = "l" * len(differ) + "rrrrrl" + "r" * len(compared) + "l" * noted
    print_table([*headings, *["note"] * noted], cells, align=align)
    _print_conditions(conditions)


def _measured(row: "Row") -> list[str]:
    seconds, work = row.seconds, row.work
    if seconds is None or row.roof_share is None:
        return [""] * 6
    return [
        format_seconds(seconds.median),
        format_share(seconds.relative_width),
        format_rate(work.flops / seconds.median) if work.flops else "",
        format_bytes(work.bytes / seconds.median) + "/s",
        format_share(row.roof_share),
        work.bound,
    ]


def _note(row: "Row") -> str:
    from napkin.hardware.conditions import MOST_WAITING

    share = row.waiting_share or 0.0
    waited = f"disturbed: waited {format_share(share)} of the time for a core" if share > MOST_WAITING else ""
    return f"not run: {row.refused}" if row.refused else waited


def _print_conditions(conditions: "Conditions") -> None:
    """Print the conditions of the measurement."""
    values: dict[str, Any] = conditions.values()
    before, after = values["before"], values["after"]
    parts = [values["device"], f"{values['threads']} threads", f"torch {values['torch']}"]
    if before["megahertz"]:
        parts.append(f"{before['megahertz']:.0f} to {after['megahertz']:.0f} MHz")
    if before["gpu"]:
        parts.append(f"{before['gpu'].get('clocks.sm', '')} to {(after['gpu'] or {}).get('clocks.sm', '')}")
    if before["load"] is not None:
        parts.append(f"load {before['load']:.2f} before")
    say()
    say("; ".join(parts) + "; ± is half of a 95% interval, the longer one")


@dataclass(frozen=True)
class CollectiveOptions(TimingOptions):
    """Time a collective by sizes and ranks: all-reduce, all-gather, reduce-scatter or all-to-all, with bandwidths and a
    fit. By itself it starts processes on this machine, which use gloo; under torchrun all ranks time it, through NCCL
    where they have GPUs."""


@command("bench collective", CollectiveOptions)
def bench_collective(options: CollectiveOptions) -> None:
    from napkin.benchmarking.case import read_shapes
    from napkin.benchmarking.collective_bench import COLLECTIVES, DIMENSIONS, SWEEP, collective_shapes, fitted
    from napkin.benchmarking.measuring import Conditions
    from napkin.distributed.ranks import rank_info_of
    from napkin.recipe.precision import choose_device

    if not options.name:
        raise NapkinError(f"no collective is named: use one of {', '.join(COLLECTIVES)}")
    name = _known(options.name, COLLECTIVES)
    info = rank_info_of(os.environ)
    together = info.world_size > 1
    chosen = read_shapes(options.shapes, DIMENSIONS)
    if options.sweep and not chosen:
        # torchrun has decided on the number of ranks.
        chosen = [{"bytes": each["bytes"]} for each in SWEEP] if together else SWEEP
    sizes = collective_shapes(chosen, info.world_size if together else None)
    if not together and options.device == "cuda":
        raise NapkinError("--device cuda needs one process per GPU: start them with torchrun, or use --device cpu")
    device_type = choose_device(options.device) if together else "cpu"
    with progress_line(f"timing {name}", shown=info.rank == 0) as line:
        conditions = Conditions(device_type)
        time_them = _of_torchrun if together else _of_processes
        rows, fits = fitted(time_them(COLLECTIVES[name], sizes, device_type, options, line))
    if info.rank == 0:
        _print_collective(name, rows, fits, conditions, as_json=options.json)


def _of_processes(
    operation: "Operation",
    sizes: Mapping[int, Sequence[int]],
    device_type: Literal["cpu", "cuda"],
    options: CollectiveOptions,
    line: ProgressLine,
) -> "list[CollectiveRow]":
    from napkin.benchmarking.collective_bench import time_in_processes
    from napkin.hardware.host import detect_host

    host = detect_host()
    # The same number of threads as the ranks of a run on this machine.
    threads = options.threads or max(1, host.cores // max(sizes))
    free_bytes = host.available_bytes
    return time_in_processes(
        operation, sizes, threads=threads, seconds=options.seconds, free_bytes=free_bytes, progress=line
    )


def _of_torchrun(
    operation: "Operation",
    sizes: Mapping[int, Sequence[int]],
    device_type: Literal["cpu", "cuda"],
    options: CollectiveOptions,
    line: ProgressLine,
) -> "list[CollectiveRow]":
    import torch

    from napkin.benchmarking.collective_bench import time_on_this_rank
    from napkin.distributed.joining import join_ranks
    from napkin.hardware.host import usable_cores
    from napkin.recipe.training_config import TrainingConfig

    with join_ranks(TrainingConfig(device=device_type)) as ranks:
        torch.set_num_threads(ranks.threads(options.threads, usable_cores()))
        return time_on_this_rank(
            operation, sizes, ranks.info.rank, seconds=options.seconds, device_type=device_type, progress=line
        )


def _print_collective(
    name: str,
    rows: "Sequence[CollectiveRow]",
    fits: "dict[int, AlphaBeta]",
    conditions: "Conditions",
    *,
    as_json: bool,
) -> None:
    if as_json:
        from napkin.benchmarking.collective_bench import collective_values

        fitted = {str(ranks): vars(fit) for ranks, fit in fits.items()}
        values = [collective_values(row) for row in rows]
        print_json({"name": name, "conditions": conditions.values(), "rows": values, "fits": fitted})
        return
    notes = any(row.refused for row in rows)
    headings = ["ranks", "bytes", "median", "±", "algorithm", "bus", "fit/median", *["not run"] * notes]
    cells = []
    for row in rows:
        measured = [""] * 5
        if row.seconds is not None and row.fitted_seconds is not None:
            median = row.seconds.median
            measured = [
                format_seconds(median),
                format_share(row.seconds.relative_width),
                format_bytes(row.data_bytes / median) + "/s",
                format_bytes(row.sent_bytes / median) + "/s",
                format_three_digits(row.fitted_seconds / median),
            ]
        cells.append([str(row.ranks), format_bytes(row.data_bytes), *measured, *[row.refused] * notes])
    print_table(headings, cells, align="r" * 7 + "l" * notes)
    for ranks, fit in fits.items():
        say(
            f"{ranks} ranks: {format_seconds(fit.start_seconds)} + bytes that each sends / "
            f"{format_bytes(fit.bandwidth)}/s"
        )
    _print_conditions(conditions)
