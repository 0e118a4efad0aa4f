"""`napkin sweep`."""

import shlex
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, Switch, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeSource, base_recipe, split_axes
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_count, format_flops, format_seconds

if TYPE_CHECKING:
    from napkin.runs.metrics import StepMetrics
    from napkin.scaling.sweep import Sweep
    from napkin.scaling.sweep_workers import Ended
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
    """Pair the values instead: the first values of all fields, then the second ones, and so on."""
    random: int | None = None
    """Draw this many combinations at random, from lists of values and from ranges such as --optimizer.learning-rate
    1e-4..1e-2, which are uniform in the logarithm."""
    seed: int = 0
    """Seed of the random combinations."""
    preset: str | None = None
    """A published model to start from, as in `napkin train`."""
    runs: str | None = None
    """Folder for the runs; None is runs/RECIPE-sweep, with the recipe's name. Its runs are like all others: `napkin
    report`, `napkin resume`, and `napkin runs` for all of them."""
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
    """The runs that the options ask for. Raises NapkinError where options contradict each other."""
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


MOST_ROWS = 40


def print_sweep_plan(sweep: "Sweep", *, as_json: bool = False) -> None:
    """A row per run that is left to train, and what they take in all."""
    planned = sweep.planned
    if as_json:
        print_json({"folder": sweep.folder.path, **planned.as_values()})
        return
    from napkin.scaling.sweep import run_seconds

    rows = [
        (
            name,
            format_count(plan.ledger.parameters),
            format_count(plan.steps * plan.tokens_per_step),
            format_flops(plan.steps * plan.ledger.flops),
            format_bytes(plan.peak_bytes),
            format_seconds(run_seconds(plan)),
        )
        for name, plan in planned.plans.items()
    ]
    print_table(("run", "parameters", "tokens", "FLOPs", "peak bytes", "time"), rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        say(f"... and {len(rows) - MOST_ROWS:,} more")
    done = len(sweep.trials) - len(planned.plans) - len(sweep.file.failed)
    parts = [f"{len(planned.plans):,} runs", *([f"{done:,} more are finished"] if done else [])]
    side = "one after the other" if planned.at_once == 1 else f"{planned.at_once} side by side"
    price = "" if planned.dollars is None else f", ${planned.dollars:,.2f}"
    say(
        f"{', '.join(parts)}; {side}: {format_seconds(planned.seconds)}{price}, {format_flops(planned.flops)}, "
        f"{format_bytes(planned.peak_bytes)} of memory, {format_bytes(planned.disk_bytes)} of disk; "
        f"{planned.n_counted} kinds of steps counted"
    )
    for name, why in sweep.file.failed.items():
        say(f"failed before, tried again with --retry: {name}: {why}")


def run_sweep(sweep: "Sweep", *, quiet: bool) -> signals.Signals | None:
    """Train the unfinished runs, with a line for each run that ends."""
    n_runs, ends = len(sweep.unfinished), list["Ended"]()
    with progress_line("training") as line:

        def on_step(trial: "Trial", metrics: "StepMetrics") -> None:
            line.retitle(f"run {len(ends) + 1} of {n_runs}: {trial.name}")
            line(metrics.step, trial.recipe.training.steps, f"loss {metrics.loss:.3f}")

        def on_end(trial: "Trial", ended: "Ended") -> None:
            ends.append(ended)
            line(len(ends), n_runs, "runs")
            for note in ended.notes:
                notify(f"{trial.name}: {note}")
            if ended.state == "failed":
                notify(f"{trial.name} failed: {ended.message}")
            elif not quiet:
                say(f"{trial.name}: {ended.state} after {format_seconds(ended.seconds)}", wrap=False)

        stopped = sweep.run(on_step=on_step, on_end=on_end)
    trained = [each for each in ends if each.state == "finished" and each.step_seconds]
    if trained and not quiet:
        beside = sum(each.seconds - each.step_seconds for each in trained) / len(trained)
        say(f"{len(trained)} runs trained, {format_seconds(beside)} of each beside its steps and evaluations")
    return stopped


def print_outcome(sweep: "Sweep", *, as_json: bool) -> None:
    """The runs by their loss, the best one, its neighbours, and where the best lies at an edge."""
    if as_json:
        print_json(sweep.as_values())
        return
    from napkin.scaling.sweep import edges, neighbours, ranked

    order = ranked(sweep.standings())
    if not order:
        say("no run is finished: there is no best one")
        return
    best = order[0]
    near = {trial.name for trial in neighbours(best.trial, sweep.trials)}
    say()
    rows = []
    for each in order[:10]:
        assert each.loss is not None
        assert best.loss is not None
        rows.append(
            (
                each.trial.name,
                f"{each.loss:.4f}",
                f"{each.loss - best.loss:+.4f}",
                format_count(each.tokens),
                "–" if each.flops is None else format_flops(each.flops),
                format_seconds(each.seconds),
            )
        )
    print_table(("run", "loss", "above the best", "tokens", "FLOPs", "time"), rows)
    say()
    say(f"best: {best.folder}, loss {best.loss:.4f} nats per token", wrap=False)
    for each in order:
        if each.trial.name in near and each.loss is not None and best.loss is not None:
            say(f"  next to it: {each.trial.name}, {each.loss - best.loss:+.4f}", wrap=False)
    for edge in edges(best.trial, sweep.trials):
        say(f"warning: {edge}", wrap=False)
    say(f"compare all: napkin runs {sweep.folder}", wrap=False)
