"""`napkin mup`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, Switch
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.files import atomic_write_text

if TYPE_CHECKING:
    from napkin.scaling.mup import CoordinateCheck

WIDER = (1, 2, 4, 8)
RATES = tuple(2.0**power for power in range(-3, 4))


@dataclass(frozen=True)
class MupOptions(RecipeOptions, JsonOption):
    """Does a learning rate that was found at a small width hold at a larger one (µP, Yang et al. 2022)? First the
    coordinate check: models of several widths take a few steps, whose changes of the activations should not depend on
    the width. Then the transfer test: each width is trained at several learning rates, runs of a sweep in one folder,
    and the best rates of all widths should be within a factor of 2. The same command again continues."""

    FIRST = ("widths", "learning-rates", "runs", "plan", *RecipeOptions.FIRST)

    widths: str | None = None
    """Values of d_model with commas between; None is 1, 2, 4 and 8 times the recipe's. Heads keep their width."""
    learning_rates: str | None = None
    """Separated by commas; None is 1/8 to 8 times the recipe's, by factors of 2."""
    plain: Switch = False
    """Without µP's multipliers, to see what they change."""
    coordinates: Switch = False
    """Run only the coordinate check, which takes seconds."""
    runs: str | None = None
    """Folder for the runs; None is runs/ and the name of the recipe with -mup, or with --plain -plain, behind it."""
    at_once: int | None = None
    """Runs that train side by side, as in `napkin sweep`."""
    plan: Switch = False
    """Only print what the runs would take."""
    picture: str | None = None
    """SVG file to write: loss over learning rate, a line for each width."""


@recipe_command("mup", MupOptions)
def main(options: MupOptions, source: RecipeSource) -> int:
    if options.picture is not None:
        refuse_existing(Path(options.picture))
    from napkin.scaling.mup import transfer_trials
    from napkin.scaling.trials import read_axis

    base, rate = options.recipe, options.recipe.optimizer.resolved.learning_rate
    assert rate is not None
    widths = [base.model.d_model * factor for factor in WIDER]
    if options.widths is not None:
        widths = [int(value) for value in _values(read_axis("--model.d-model", options.widths).values, "--widths")]
    rates = [rate * factor for factor in RATES]
    if options.learning_rates is not None:
        axis = read_axis("--optimizer.learning-rate", options.learning_rates)
        rates = _values(axis.values, "--learning-rates")
    trials = transfer_trials(base, widths, rates, mup=not options.plain)
    if options.plan:
        return _transfer(options, trials, source, None)
    with progress_line("checking the coordinates") as line:
        from napkin.scaling.mup import STEEPEST, STEPS, check_coordinates, widened

        recipes = [widened(base, width, mup=not options.plain) for width in sorted(widths)]
        check = check_coordinates(recipes, progress=line)
    if not options.json:
        headings = ("change", *(f"d_model {width}" for width in check.widths), "slope")
        rows = [
            (part, *(f"{change:.3g}" for change in changes), f"{check.slope(part):+.2f}")
            for part, changes in check.changes.items()
        ]
        print_table(headings, rows)
        verdict = "do not depend" if check.holds else "depend"
        say(
            f"mean changes of the activations after {STEPS} steps {verdict} on the width: slopes in logarithms are to "
            f"be within ±{STEEPEST:g}"
        )
        say()
    if options.coordinates:
        if options.json:
            print_json({"coordinates": _check_values(check)})
        return 0
    return _transfer(options, trials, source, check)


def _values(values: tuple, option: str) -> list[float]:
    # A range, as `napkin sweep --random` takes, has no values.
    if not values:
        raise NapkinError(f"{option} is a range: give values with commas between")
    return list(values)


def _transfer(options: MupOptions, trials: tuple, source: RecipeSource, check: "CoordinateCheck | None") -> int:
    kind = "plain" if options.plain else "mup"
    folder = options.runs or source.folder(f"-{kind}")
    with progress_line("planning the runs") as line:
        from napkin.cli.scale.sweep import print_sweep_plan, run_sweep
        from napkin.scaling.mup import FARTHEST, curves, transfer, transfer_svg
        from napkin.scaling.sweep import Sweep

        sweep = Sweep.plan(trials, folder, at_once=options.at_once, progress=line.retitle)
    if not options.json or options.plan:
        print_sweep_plan(sweep, as_json=options.json)
    if options.plan:
        return 0
    signal = run_sweep(sweep, quiet=options.json)
    if signal:
        notify(f"{signal.name}: what was trained is saved; continue with: napkin mup {shlex.join(source.arguments)}")
        return 128 + signal
    by_width = curves(sweep.standings())
    transferred = transfer(by_width)
    if options.json:
        values = {
            "best": [vars(each) for each in transferred.best],
            "factor": transferred.factor,
            "holds": transferred.holds,
        }
        assert check is not None
        print_json({"folder": sweep.folder.path, "coordinates": _check_values(check), "transfer": values})
    else:
        rows = [
            (f"{each.width}", f"{each.rate:.3g}" + ("" if each.is_bracketed else ", at the edge"), f"{each.loss:.4f}")
            for each in transferred.best
        ]
        say()
        print_table(("d_model", "best learning rate", "lowest loss"), rows)
        apart = f"the best learning rates are a factor of {transferred.factor:.2f} apart"
        if transferred.holds is None:
            say(f"{apart}; one is at the edge of what was tried: give --learning-rates beyond it")
        else:
            say(f"{apart}: {'within' if transferred.holds else 'more than'} {FARTHEST:g}")
    if options.picture is not None:
        with folder_for(Path(options.picture)):
            atomic_write_text(Path(options.picture), transfer_svg(by_width, transferred))
        notify(f"wrote {options.picture}")
    return 2 if sweep.file.failed else 0


def _check_values(check: "CoordinateCheck") -> dict:
    slopes = {part: check.slope(part) for part in check.changes}
    return {"widths": check.widths, "changes": check.changes, "slopes": slopes, "holds": check.holds}
