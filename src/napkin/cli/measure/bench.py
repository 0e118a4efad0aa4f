"""`napkin bench`."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_table
from napkin.errors import NapkinError, plain, suggestion
from napkin.recipe.precision import PrecisionName

if TYPE_CHECKING:
    from napkin.benchmarking.case import Case, Target
    from napkin.benchmarking.measuring import Measuring
    from napkin.planning.step.machine import ThisMachine
    from napkin.recipe.recipe import Recipe

PassName = Literal["forward", "backward", "both", "step"]
MOST_SECONDS = 3600.0


@dataclass(frozen=True)
class BenchOptions(JsonOption):
    """Time an operator, a part of a model, or a collective: the median with its 95% interval, FLOP/s, bytes/s and the
    share of the machine's roof. Without a name, print what can be timed."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """An operator such as attention; transformer, block, self-attention or mlp of a recipe; a collective such as
    all-reduce."""
    shapes: tuple[str, ...] = ()
    """One or several, as in context_length=256,head_dim=64; dimensions that are not named keep their size. For parts of
    a model size=small, medium, large, xl or 2.7B stands for several."""
    form: tuple[str, ...] = ()
    """Forms of an operator; attention implementations of a model; activations of mlp. None is all of an operator, of a
    model the one that training takes."""
    against: str | None = None
    """A form that the others are timed in turns with, for the ratio of their seconds; +compiled behind it is that form
    compiled."""
    precision: tuple[PrecisionName, ...] = ()
    """Formats of operators, recipes of formats for models. None is this machine's."""
    passes: Annotated[tuple[PassName, ...], tyro.conf.arg(name="pass")] = ()
    """Passes to time: forward and backward each alone, both together, or step, which is both and the update, of a
    transformer. None is forward and backward."""
    cache: Literal["warm", "cold", "both"] = "warm"
    """Whether the caches are emptied before each sample."""
    compiled: Literal["off", "on", "both"] | None = None
    """Whether torch.compile has compiled it; None is off, in a sweep both."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes; auto is the GPU if there is one."""
    threads: int | None = None
    """CPU threads; None is one per core."""
    recipe: str | None = None
    """TOML file of the model whose parts are timed; None is the default model."""
    preset: str | None = None
    """A published model instead, as for `napkin count`."""
    sweep: Switch = False
    """A table over sizes: for models five sizes, four context lengths, fp32 and bf16, compiled and not, forward,
    backward and step. What does not fit says so in its row. For collectives 1 MB to 1 GB among 2, 4 and 6 ranks."""
    seconds: float = 0.5
    """For which each row is timed, after its warm-up."""
    most_seconds: float = 60.0
    """A row whose warm-up and fewest samples would take longer by plan is not run."""


@command("bench", BenchOptions)
def main(options: BenchOptions) -> int:
    for name, value in (("seconds", options.seconds), ("most-seconds", options.most_seconds)):
        if not 0 < value <= MOST_SECONDS:
            raise NapkinError(f"--{name} is {value}: use more than 0 and at most {MOST_SECONDS:.0f}")
    if options.threads is not None and not 1 <= options.threads <= 1024:
        raise NapkinError(f"--threads is {options.threads}: use 1 to 1024")
    with progress_line("loading"):
        from napkin.benchmarking.collective_bench import COLLECTIVES
        from napkin.benchmarking.conditions import Conditions
        from napkin.benchmarking.module_target import MODULES
        from napkin.benchmarking.operators import OPERATORS

    if not options.name:
        rows = [(name, "operator", ", ".join(each.forms), each.about) for name, each in OPERATORS.items()]
        rows += [(name, "model", "", about) for name, about in MODULES.items()]
        rows += [
            (name, "collective", "", "among processes of this machine, or ranks of torchrun") for name in COLLECTIVES
        ]
        print_table(("name", "kind", "forms", "what"), rows, align="llll")
        return 0
    name = _known(options.name, [*OPERATORS, *MODULES, *COLLECTIVES])
    if name in COLLECTIVES:
        return _collective(options, name)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NapkinError(f"torchrun has started several ranks, but one process times {name}: leave torchrun out")
    with progress_line("preparing") as line:
        machine = _machine(options)
        target = _target(options, name, machine)
        cases, against = _cases(options, target, machine), _against(options, target)
        measuring = _measuring(options, target, machine)
        conditions = Conditions(machine.device_type)
        rows, interrupted = [], False
        try:
            for row in measuring.rows(cases, against, progress=line):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
    from napkin.cli.measure.bench_output import print_rows

    if rows or not interrupted:
        print_rows(name, rows, conditions, as_json=options.json)
    if interrupted:
        notify(f"bench: interrupted after {len(rows)} of {len(cases)} rows")
        return 130
    return 0


def _collective(options: BenchOptions, name: str) -> int:
    from napkin.cli.measure.bench_collectives import bench_collective

    taken = {"name", "shapes", "device", "threads", "seconds", "sweep", "json"}
    for each in dataclasses.fields(options):
        if each.name not in taken and getattr(options, each.name) != each.default:
            option = {"passes": "pass"}.get(each.name, each.name.replace("_", "-"))
            raise NapkinError(f"--{option} is for operators and models, and {name} is a collective: leave it out")
    bench_collective(
        name,
        options.shapes,
        device=options.device,
        threads=options.threads,
        seconds=options.seconds,
        sweep=options.sweep,
        as_json=options.json,
    )
    return 0


def _known(name: str, known: list[str]) -> str:
    found = next((each for each in known if plain(each) == plain(name)), None)
    if found is None:
        raise NapkinError(f"'{name}' cannot be timed: {suggestion(name, known)}")
    return found


def _machine(options: BenchOptions) -> "ThisMachine":
    import torch

    from napkin.hardware.host import keep_freed_memory
    from napkin.planning.step.machine import ThisMachine

    machine = ThisMachine(device=options.device)
    torch.set_num_threads(options.threads or machine.host.cores)
    keep_freed_memory()
    return machine


def _target(options: BenchOptions, name: str, machine: "ThisMachine") -> "Target":
    from napkin.benchmarking.module_target import MODULES, ModuleTarget
    from napkin.benchmarking.operators import OperatorTarget

    if name in MODULES:
        return ModuleTarget(name, _recipe(options), machine.device_type)
    for option in ("recipe", "preset"):
        if getattr(options, option) is not None:
            raise NapkinError(f"--{option} is for models, and {name} is an operator: give its --shapes")
    return OperatorTarget(name, machine.device_type)


def _recipe(options: BenchOptions) -> "Recipe":
    from napkin.model.published_models import preset
    from napkin.recipe.recipe import Recipe
    from napkin.recipe.toml_file import read_recipe

    if options.recipe is not None and options.preset is not None:
        raise NapkinError("--recipe and --preset both name a model: use one of them")
    if options.preset is not None:
        return dataclasses.replace(Recipe(), model=preset(options.preset))
    return Recipe() if options.recipe is None else read_recipe(options.recipe)


def _measuring(options: BenchOptions, target: "Target", machine: "ThisMachine") -> "Measuring":
    from napkin.benchmarking.measuring import Limits, Measuring

    return Measuring(
        target,
        machine.device_type,
        machine.ceilings(machine.precision("auto")),
        Limits(machine.memory_bytes, options.most_seconds),
        seconds=options.seconds,
    )


def _cases(options: BenchOptions, target: "Target", machine: "ThisMachine") -> "list[Case]":
    from napkin.benchmarking.case import Case
    from napkin.benchmarking.shapes import read_shapes

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


def _compiled(options: BenchOptions, machine: "ThisMachine") -> tuple[bool, ...]:
    from napkin.train_step.compile import missing_compiler

    wanted = options.compiled or ("both" if options.sweep else "off")
    named = wanted != "off" and options.compiled is not None
    missing = missing_compiler(machine.device_type) if wanted != "off" or _is_compiled(options) else None
    if missing is not None:
        if named or _is_compiled(options):
            raise NapkinError(f"nothing can be compiled here: {missing}; use --compiled off")
        notify(f"bench: what is compiled is left out: {missing}")
        return (False,)
    return {"off": (False,), "on": (True,), "both": (False, True)}[wanted]


def _is_compiled(options: BenchOptions) -> bool:
    return options.against is not None and options.against.endswith("+compiled")


def _against(options: BenchOptions, target: "Target") -> tuple[str, bool] | None:
    if options.against is None:
        return None
    return _form(options.against.removesuffix("+compiled"), target), _is_compiled(options)


def _form(name: str, target: "Target") -> str:
    if name not in target.forms:
        raise NapkinError(f"there is no form '{name}' of it here: {suggestion(name, target.forms)}")
    return name
