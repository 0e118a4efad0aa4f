"""What `napkin sweep` prints: the plan of all runs, each as it ends, and the best with its neighbours."""

import signal as signals
from typing import Any

from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.runs.metrics import StepMetrics
from napkin.scaling.best_run import Standing, as_json, edges, neighbours, ranked
from napkin.scaling.sweep import Sweep, run_seconds
from napkin.scaling.sweep_workers import Ended
from napkin.scaling.trials import Trial
from napkin.units import format_bytes, format_count, format_flops, format_seconds

MOST_ROWS = 40


def print_sweep_plan(sweep: Sweep, *, as_json: bool = False) -> None:
    """A row per run that is left to train, and what they take in all."""
    planned = sweep.planned
    if as_json:
        print_json(plan_values(sweep))
        return
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


def plan_values(sweep: Sweep) -> dict[str, Any]:
    """The plan for programs."""
    planned = sweep.planned
    runs = {
        name: {
            "parameters": plan.ledger.parameters,
            "tokens": plan.steps * plan.tokens_per_step,
            "flops": plan.steps * plan.ledger.flops,
            "peak_bytes": plan.peak_bytes,
            "seconds": run_seconds(plan),
        }
        for name, plan in planned.plans.items()
    }
    names = ("at_once", "seconds", "dollars", "flops", "peak_bytes", "disk_bytes")
    return {"folder": sweep.folder.path, "runs": runs} | {name: getattr(planned, name) for name in names}


def run_sweep(sweep: Sweep, *, quiet: bool) -> signals.Signals | None:
    """Train what is left, with a line for each run that ends."""
    n_runs, ends = len(sweep.unfinished), list[Ended]()
    with progress_line("training") as line:

        def on_step(trial: Trial, metrics: StepMetrics) -> None:
            line.retitle(f"run {len(ends) + 1} of {n_runs}: {trial.name}")
            line(metrics.step, trial.recipe.training.steps, f"loss {metrics.loss:.3f}")

        def on_end(trial: Trial, ended: Ended) -> None:
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


def print_outcome(sweep: Sweep, *, as_json: bool) -> None:
    """The runs by their loss, the best one, its neighbours, and where the best lies at an edge."""
    standings = sweep.standings()
    order = ranked(standings)
    if as_json:
        _print_json(sweep, standings, order)
        return
    if not order:
        say("no run is finished: there is no best one")
        return
    best = order[0]
    near = {trial.name for trial in neighbours(best.trial, sweep.trials)}
    say()
    print_table(("run", "loss", "above the best", "tokens", "FLOPs", "time"), [_row(each, best) for each in order[:10]])
    say()
    say(f"best: {best.folder}, loss {best.loss:.4f} nats per token", wrap=False)
    for each in order:
        if each.trial.name in near and each.loss is not None and best.loss is not None:
            say(f"  next to it: {each.trial.name}, {each.loss - best.loss:+.4f}", wrap=False)
    for edge in edges(best.trial, sweep.trials):
        say(f"warning: {edge}", wrap=False)
    say(f"compare all: napkin runs {sweep.folder}", wrap=False)


def _row(each: Standing, best: Standing) -> tuple[str, ...]:
    assert each.loss is not None
    assert best.loss is not None
    flops = "–" if each.flops is None else format_flops(each.flops)
    return (
        each.trial.name,
        f"{each.loss:.4f}",
        f"{each.loss - best.loss:+.4f}",
        format_count(each.tokens),
        flops,
        format_seconds(each.seconds),
    )


def _print_json(sweep: Sweep, standings: list[Standing], order: list[Standing]) -> None:
    best = order[0] if order else None
    print_json(
        {
            "folder": sweep.folder.path,
            "runs": [as_json(each) for each in standings],
            "failed": sweep.file.failed,
            "best": None if best is None else best.trial.name,
            "neighbours": [] if best is None else [each.name for each in neighbours(best.trial, sweep.trials)],
            "edges": [] if best is None else [vars(edge) for edge in edges(best.trial, sweep.trials)],
        }
    )
