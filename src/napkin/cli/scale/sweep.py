"""`napkin sweep`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, Switch, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeSource, base_recipe, split_axes
from napkin.cli.common.terminal import notify
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.scaling.trials import Trial


@dataclass(frozen=True)
class SweepOptions(JsonOption):
    """Train one run for each combination of values of a recipe's fields, given with commas between: napkin sweep
    RECIPE.toml --model.d-model 64,128 --optimizer.learning-rate 1e-3,3e-3. All are planned before the first starts.
    The same command again continues: what is finished is skipped, what was stopped is resumed."""

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE.toml]")] = None
    """The recipe that all runs have in common; none is the defaults. `napkin recipe` prints one."""
    grid: Switch = False
    """Every combination of the values; this is the default."""
    list: Switch = False
    """The first values of all fields, the second ones, and so on."""
    random: int | None = None
    """That many combinations, drawn at random: of lists of values, and of ranges as --optimizer.learning-rate
    1e-4..1e-2, uniformly in the logarithm."""
    seed: int = 0
    """Seed of the random combinations."""
    preset: str | None = None
    """A published model to start from, as in `napkin train`."""
    runs: str | None = None
    """Folder for the runs; None is runs/ and the name of the recipe with -sweep behind it. A run in it is one like
    all others: `napkin report`, `napkin resume`, and `napkin runs` for all of them."""
    at_once: int | None = None
    """Runs that train side by side, each with its part of the cores; None is one or, if --training.threads is given,
    as many as have cores and memory."""
    retry: Switch = False
    """Also train the runs that have failed before, from their last checkpoint."""
    plan: Switch = False
    """Only print what the sweep would take."""


@takes(SweepOptions)
def main(arguments: Sequence[str]) -> int:
    """Plan the sweep, train its runs, print the best."""
    own, texts = split_axes(arguments)
    options = parse(SweepOptions, "sweep", own)
    trials = trials_of(options, texts)
    folder = options.runs or RecipeSource(options.recipe, ()).folder("-sweep")
    with progress_line("planning the sweep") as line:
        from napkin.cli.scale.sweep_output import print_outcome, print_sweep_plan, run_sweep
        from napkin.scaling.sweep import Sweep

        sweep = Sweep.plan(trials, folder, at_once=options.at_once, retry=options.retry, progress=line.retitle)
    if not options.json or options.plan:
        print_sweep_plan(sweep, as_json=options.json)
    if options.plan:
        return 0
    signal = run_sweep(sweep, quiet=options.json)
    print_outcome(sweep, as_json=options.json)
    if signal:
        notify(f"{signal.name}: what was trained is saved; continue with: napkin sweep {shlex.join(arguments)}")
        return 128 + signal
    return 2 if sweep.file.failed else 0


def trials_of(options: SweepOptions, texts: dict[str, str]) -> "tuple[Trial, ...]":
    """The runs that the options ask for. Raises NapkinError where they contradict each other."""
    modes = {"--grid": options.grid, "--list": options.list, "--random": options.random is not None}
    chosen = [name for name, is_chosen in modes.items() if is_chosen]
    if len(chosen) > 1:
        raise NapkinError(f"{' and '.join(chosen)} exclude each other: use one of them")
    base = base_recipe(RecipeSource(options.recipe, ()), options.preset)
    if not texts:
        raise NapkinError(
            "there is nothing to vary: name fields and values, as --optimizer.learning-rate 1e-3,3e-3, or train the "
            "one run with `napkin train`"
        )
    from napkin.scaling.trials import grid, listed, read_axis, sampled

    axes = [read_axis(name, text) for name, text in texts.items()]
    if options.random is not None:
        return sampled(base, axes, options.random, seed=options.seed)
    return listed(base, axes) if options.list else grid(base, axes)
