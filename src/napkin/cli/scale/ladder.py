"""`napkin ladder`."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napkin.cli.common.options import JsonOption, Switch
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.recipe.toml_file import format_recipe
from napkin.units import format_count, format_flops, format_seconds, parse_dollars

if TYPE_CHECKING:
    from napkin.scaling.ladder import Ladder, LadderFile, Rung

LAW_FILE, NEXT_RECIPE = "law.json", "next.toml"


@dataclass(frozen=True)
class LadderOptions(RecipeOptions, JsonOption):
    """Recipes of runs whose FLOPs grow from level to level, with several model sizes at each (IsoFLOP curves), as large
    as a budget allows by their plans. With --run they train here, a law is fitted to them, and it predicts a larger
    run; otherwise their recipes are written, to be trained elsewhere, and `napkin law fit` takes the finished runs."""

    FIRST = ("seconds", "budget", "on", "out", "run", *RecipeOptions.FIRST)

    seconds: float | None = None
    """Budget: seconds of all runs, one after another."""
    budget: str | None = None
    """Budget in money, as 10usd; of the devices of --on."""
    on: str | None = None
    """Accelerators that the runs are for, as 8xH100; None is this machine."""
    levels: int = 4
    """Numbers of FLOPs."""
    sizes: int = 3
    """Model sizes at each level."""
    level_factor: float = 2.0
    """FLOPs of a level over those of the one below."""
    size_factor: float = 2.0
    """Parameters of a size over those of the one below."""
    tokens_per_parameter: float = 20.0
    """Tokens per parameter of the middle size; 20 is about optimal (Hoffmann et al. 2022)."""
    aspect: float = 64.0
    """d_model / n_layers of every model; the width of a head is the recipe's."""
    learning_rate: Literal["power-law", "mup", "recipe"] = "power-law"
    """power-law: 0.3118 · C^-0.125 of a run's FLOPs C (DeepSeek-AI 2024); mup: the recipe's, with µP's multipliers from
    its width; recipe: the recipe's for every run."""
    times: float = 8.0
    """FLOPs of the run to predict, over those of the largest level."""
    law: str = "chinchilla"
    """The law that is fitted, as in `napkin law fit`."""
    out: str | None = None
    """New folder to write the recipes to, one file per run, and that of the run to predict."""
    run: Switch = False
    """Train the runs here, fit the law and predict."""
    runs: str | None = None
    """Folder for the runs; None is runs/ and the name of the recipe with -ladder behind it."""
    at_once: int | None = None
    """Runs that train side by side, as in `napkin sweep`; the budget is that of one after the other."""


@recipe_command("ladder", LadderOptions)
def main(options: LadderOptions, source: RecipeSource) -> int:
    if options.run and (options.on is not None or options.out is not None):
        raise NapkinError("--run trains on this machine: leave --on and --out out, or write recipes without --run")
    if not 1 < options.times < 1e9:
        raise NapkinError(f"--times is {options.times}: use a number above 1")
    if options.out is not None and Path(options.out).exists():
        raise NapkinError(f"'{options.out}' exists and is not overwritten: choose another --out")
    from napkin.scaling.ladder import ladder_file_of, read_ladder, write_ladder
    from napkin.scaling.law_forms import law_form

    law_form(options.law)
    folder = Path(options.runs or source.folder("-ladder"))
    file = read_ladder(folder) if options.run else None
    if file is None:
        with progress_line("planning the ladder") as line:
            ladder, larger = _design(options, line.retitle)
        file = ladder_file_of(ladder.rungs, larger)
        if not options.json:
            _print_ladder(ladder, larger)
        elif not options.run:
            print_json({"runs": [_values(rung) for rung in ladder.rungs], "next": _values(larger)})
        if options.out is not None:
            out = Path(options.out)
            out.mkdir(parents=True)
            for name, run in file.runs.items():
                atomic_write_text(out / f"{name}.toml", format_recipe(run.parsed))
            if file.next is not None:
                atomic_write_text(out / NEXT_RECIPE, format_recipe(file.next.parsed))
            say(f"wrote {len(file.runs)} recipes and {NEXT_RECIPE} to {out}", wrap=False)
        if options.run:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise NapkinError(f"'{folder}' exists and is not of a ladder: choose another --runs")
            write_ladder(folder, file)
    elif not options.json:
        say(f"{folder} holds a ladder of {len(file.runs)} runs: it is continued", wrap=False)
    if not options.run:
        return 0
    return _train_and_predict(file, folder, options, source)


def _design(options: LadderOptions, progress: Any) -> "tuple[Ladder, Rung]":
    from napkin.scaling.ladder import Design, Ladder

    if (options.seconds is None) == (options.budget is None):
        raise NapkinError("a ladder has one budget: give --seconds 600, or --budget 10usd with --on")
    ladder = Ladder.within(
        options.recipe,
        seconds=options.seconds,
        dollars=None if options.budget is None else float(parse_dollars(options.budget)),
        design=Design(**{field.name: getattr(options, field.name) for field in fields(Design)}),
        on=options.on,
        progress=progress,
    )
    largest = max(rung.level for rung in ladder.rungs)
    return ladder, ladder.rung(options.times * largest, progress=progress)


def _print_ladder(ladder: "Ladder", larger: "Rung") -> None:
    rows = []
    for rung in (*ladder.rungs, larger):
        values = _values(rung)
        rows.append(
            (
                rung.trial.name,
                format_count(values["parameters"]),
                format_count(values["tokens"]),
                f"{values['tokens'] / values['parameters']:.1f}",
                format_flops(values["flops"]),
                f"{values['learning_rate']:.2e}",
                format_seconds(values["seconds"]),
            )
        )
    print_table(("run", "parameters", "tokens", "tokens per parameter", "FLOPs", "learning rate", "time"), rows)
    taken = sum(_values(rung)["seconds"] for rung in ladder.rungs)
    price = ladder.rungs[0].plan.site.usd_per_hour
    money = "" if price is None else f", ${taken / 3600 * price:,.2f}"
    flops = format_flops(sum(rung.flops for rung in ladder.rungs))
    say(f"{len(ladder.rungs)} runs: {format_seconds(taken)}{money}, {flops}; the last row is the run to predict")


def _values(rung: "Rung") -> dict[str, Any]:
    from napkin.scaling.sweep import run_seconds

    plan = rung.plan
    return {
        "run": rung.trial.name,
        **rung.trial.values,
        "parameters": plan.ledger.parameters,
        "tokens": plan.steps * plan.tokens_per_step,
        "flops": rung.flops,
        "learning_rate": plan.recipe.optimizer.learning_rate,
        "seconds": run_seconds(plan),
    }


def _train_and_predict(file: "LadderFile", folder: Path, options: LadderOptions, source: RecipeSource) -> int:
    from napkin.cli.scale.sweep import run_sweep
    from napkin.scaling.ladder import LADDER_FILE
    from napkin.scaling.sweep import Sweep

    with progress_line("planning the runs") as line:
        sweep = Sweep.plan(file.trials, folder, at_once=options.at_once, besides=(LADDER_FILE,), progress=line.retitle)
    signal = run_sweep(sweep, quiet=options.json)
    if signal:
        notify(f"{signal.name}: what was trained is saved; continue with: napkin ladder {shlex.join(source.arguments)}")
        return 128 + signal
    for name, why in sweep.file.failed.items():
        notify(f"left out of the law: {name}: {why}")
    assert file.next is not None
    from napkin.scaling.ladder import fit_and_predict

    law, predicted = fit_and_predict(sweep, file.next.parsed, options.law)
    law.write(folder / LAW_FILE, overwrite=True)
    atomic_write_text(folder / NEXT_RECIPE, format_recipe(file.next.parsed), overwrite=True)
    if options.json:
        print_json({"folder": folder, "next": vars(predicted) | {"loss": vars(predicted.loss)}})
        return 0
    for line in predicted.lines():
        say(line)
    law_file, recipe = shlex.quote(str(folder / LAW_FILE)), shlex.quote(str(folder / NEXT_RECIPE))
    say(f"train it: napkin train {recipe} --law {law_file}; other runs: napkin law predict {law_file}", wrap=False)
    return 0
