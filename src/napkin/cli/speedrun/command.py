"""`napkin speedrun [PAGES]`: the command, which plans everything, works through the stages and writes the page."""

import contextlib
import dataclasses
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import tyro

from napkin.cli.common.options import JsonOption, Switch, command, require_above_zero
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.speedrun.first_plan import SHARES, FirstPlan, make_first_plan
from napkin.cli.speedrun.stages import (
    FORMAT,
    SPEEDRUN_FILE,
    STAGES,
    VERSION,
    Speedrun,
    SpeedrunFile,
    StageFile,
    StageStopped,
    metered,
)
from napkin.cli.speedrun.texts import write_standard_pages
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, is_temporary_of, try_lock
from napkin.json_files import read_json
from napkin.recipe.toml_file import format_recipe
from napkin.units import format_seconds

FEWEST_MINUTES, MOST_MINUTES = 2.0, 10_000.0
PAGE, LOCK = "speedrun.html", ".speedrun.lock"
INPUTS = ("pages", "pipeline.toml", "base.toml", "ladder")
"""Files that are written before speedrun.json."""


@dataclass(frozen=True)
class SpeedrunOptions(JsonOption):
    """From raw pages to a model to talk with, in the minutes that you give: a curated corpus, a tokenizer, a ladder and
    the loss it predicts, pre-training, conversations, supervised tuning, rewards, scores and a chat. Every stage is
    planned before and metered after, and speedrun.html shows both. After a kill at any moment, the same command
    continues."""

    pages: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PAGES ...]")] = ()
    """Folders or files of HTML, WARC, PDF or text, as `napkin data run` reads them. None is pages that are made of the
    docstrings of Python's own library."""
    out: str = "speedrun"
    """Folder of all results: a new one, or that of a speedrun with the same options, which then continues."""
    minutes: float = 15.0
    """Time on this machine, from which all sizes follow; at least 2."""
    seed: int = 0
    """Seed of weights, data, conversations and answers."""
    usd_per_hour: float | None = None
    """Price of this machine, for the dollars of each stage."""
    plan: Switch = False
    """Print the plan only; nothing is written."""


@command("speedrun", SpeedrunOptions)
def speedrun_command(options: SpeedrunOptions) -> int:
    if not FEWEST_MINUTES <= options.minutes <= MOST_MINUTES:
        raise NapkinError(f"--minutes is {options.minutes:g}: use {FEWEST_MINUTES:g} to {MOST_MINUTES:,.0f}")
    if not 0 <= options.seed < 2**31:
        raise NapkinError(f"--seed is {options.seed}: use 0 to {2**31 - 1}")
    require_above_zero(options, "usd_per_hour")
    folder = Path(options.out)
    if not folder.name:
        raise NapkinError(f"'{options.out}' is not a name for a folder: choose another --out")
    if options.plan:
        return print_only_plan(options)
    # The output of commands is for people: with --json it goes to standard error.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext(), locked(folder):
        run = open_or_plan(folder, options)
        if status := work_through(run):
            return status
        finish(run)
    if options.json:
        print_json({"folder": folder, "page": folder / PAGE, **as_values(run.file)})
    return 0


def print_only_plan(options: SpeedrunOptions) -> int:
    """Print what every stage would take."""
    with tempfile.TemporaryDirectory() as folder, progress_line("planning") as line:
        paths, _ = pages_of(options, Path(folder) / "pages")
        first_plan = make_first_plan(paths, options.out, options.minutes, options.seed, line.retitle)
    if options.json:
        print_json({"design": first_plan.design, "stages": first_plan.stages})
    else:
        print_plan(first_plan)
    return 0


def print_plan(made: FirstPlan) -> None:
    """Print the seconds of each stage, and the sizes."""
    rows = []
    for name, planned in made.stages.items():
        rows.append((name, format_seconds(planned[0].count or 0.0), STAGES[name].leaves))
        rows += [(f"  {row.quantity}", _figure(row), "") for row in planned[1:]]
    rows.append(("all", format_seconds(sum(planned[0].count or 0.0 for planned in made.stages.values())), ""))
    print_table(("stage", "plan", "leaves"), rows, align="lrl")
    if made.design.corpus_share < 1:
        say(f"of the pages {made.design.corpus_share:.1%} are read, whole folders: more --minutes read more")
    if made.design.epochs > 1:
        say(f"pre-training reads the corpus {made.design.epochs:.1f} times")


def _figure(row: Any) -> str:
    from napkin.accounting.quantities import format_figure

    return format_figure(row.count, row.unit)


def pages_of(options: SpeedrunOptions, folder: Path) -> tuple[tuple[str, ...], int]:
    """The pages to read; where none are named, pages that are made in `folder`, and their number."""
    if options.pages:
        return options.pages, 0
    if folder.exists():
        return (str(folder),), len(list(folder.iterdir()))
    n_pages = write_standard_pages(folder)
    notify(f"no PAGES are named: {n_pages:,} pages are made of the docstrings of Python's own library, a small text")
    return (str(folder),), n_pages


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder; while the block runs, no other command works in it."""
    if folder.is_dir() and not (folder / SPEEDRUN_FILE).exists():
        drafts = (*INPUTS, SPEEDRUN_FILE)
        names = {path.name for path in folder.iterdir()}
        names -= {name for name in names if any(is_temporary_of(name, each) for each in drafts)}
        # A process that was killed while it planned leaves its lock, and some of these.
        if names and (LOCK not in names or names - {LOCK, *INPUTS}):
            raise NapkinError(f"'{folder}' exists and is not of a speedrun: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise NapkinError(f"the folder '{folder}' cannot be made ({error.strerror}): choose another --out") from None
    try:
        if not try_lock(descriptor):
            raise NapkinError(f"another process works in '{folder}': wait for it, or choose another --out")
        yield
    finally:
        os.close(descriptor)


def open_or_plan(folder: Path, options: SpeedrunOptions) -> Speedrun:
    """The speedrun in a folder, to be continued; or a new one, which is planned. Raises NapkinError where the folder's
    speedrun has other options.
    """
    wanted = {
        "pages": list(options.pages),
        "minutes": options.minutes,
        "seed": options.seed,
        "usd_per_hour": options.usd_per_hour,
    }
    file = read_json(folder / SPEEDRUN_FILE, SpeedrunFile)
    if file is not None:
        if file.format != FORMAT or file.version != VERSION:
            raise NapkinError(
                f"'{folder / SPEEDRUN_FILE}' has format {file.format[:40]!r}, version {file.version}, this napkin "
                f"reads version {VERSION}: use the napkin that made it, or choose another --out"
            )
        for name, value in wanted.items():
            if file.options.get(name) != value:
                raise NapkinError(
                    f"'{folder}' was begun with {name.replace('_', '-')} {_said(file.options.get(name))}, not "
                    f"{_said(value)}: give the same, or choose another --out"
                )
        finished = sum(stage.is_finished for stage in file.stages.values())
        say(f"{folder} has {finished} of {len(STAGES)} stages: it goes on", wrap=False)
        return Speedrun(folder, file)
    begin = time.perf_counter()
    paths, n_pages = pages_of(options, folder / "pages")
    with progress_line("planning") as line:
        first_plan = make_first_plan(paths, str(folder), options.minutes, options.seed, line.retitle)
    print_plan(first_plan)
    write_inputs(folder, first_plan)
    stages = {name: StageFile(rows) for name, rows in first_plan.stages.items()}
    run = Speedrun(
        folder, SpeedrunFile(wanted, first_plan.design, stages, time.perf_counter() - begin, made_pages=n_pages)
    )
    # Written last: without this file, everything above is done again.
    run.replace()
    return run


def _said(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value) or "none"
    return "none" if value is None else f"{value:g}"


def write_inputs(folder: Path, made: FirstPlan) -> None:
    """Write the pipeline, the base recipe and the ladder's runs, over those of a process that was killed here."""
    from napkin.curation.engine.pipeline_file import values_of
    from napkin.scaling.ladder import write_ladder

    def without_none(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: without_none(value) for name, value in values.items() if value is not None}
        return [without_none(value) for value in values] if isinstance(values, list | tuple) else values

    pipeline = tomli_w.dumps(without_none(values_of(made.pipeline)))
    atomic_write_text(folder / "pipeline.toml", pipeline, overwrite=True)
    atomic_write_text(folder / "base.toml", format_recipe(made.recipe), overwrite=True)
    write_ladder(folder / "ladder", made.ladder)


def work_through(run: Speedrun) -> int:
    """Work through the stages that are left; returns the exit status of a command that fails or is stopped."""
    for number, (name, stage) in enumerate(STAGES.items(), 1):
        if run.file.stages[name].is_finished:
            continue
        say()
        say(f"{number} of {len(STAGES)}: {stage.title}", style="bold")
        run.commands = []
        run.save(name, begun=run.file.stages[name].begun + 1)
        begin = time.perf_counter()
        try:
            stage.work(run)
        except StageStopped as stopped:
            notify(f"speedrun: '{name}' is not finished; the same command goes on: {typed(run)}")
            return stopped.status
        rows = metered(run, name, time.perf_counter() - begin)
        run.save(name, rows=rows, commands=tuple(run.commands))
    return 0


def finish(run: Speedrun) -> None:
    """Write the page of a speedrun whose stages are all finished."""
    from napkin.cli.speedrun.page import plan_large, write_page

    if not run.file.large:
        with progress_line("planning the same recipe on 8 H100") as line:
            run.replace(large=plan_large(run.file, line.retitle))
    page = write_page(run.folder, run.file)
    print_outcome(run.file)
    say(f"page: {page}; talk with it: napkin chat {shlex.quote(run.path('rewarded'))}", wrap=False)


def typed(run: Speedrun) -> str:
    """The command that continues a speedrun."""
    options = run.file.options
    words = [*options["pages"], "--out", str(run.folder), "--minutes", f"{options['minutes']:g}"]
    words += ["--seed", str(options["seed"])] if options["seed"] else []
    words += [] if options["usd_per_hour"] is None else ["--usd-per-hour", f"{options['usd_per_hour']:g}"]
    return f"napkin speedrun {shlex.join(words)}"


def print_outcome(file: SpeedrunFile) -> None:
    """Print planned and metered seconds of each stage."""
    rows = []
    for name, stage in file.stages.items():
        seconds = next(row for row in stage.rows if row.quantity == "seconds")
        ratio = seconds.meter_over_count
        metered_seconds, share = seconds.meter or 0.0, f"{SHARES[name]:.0%}"
        figures = (format_seconds(seconds.count or 0.0), format_seconds(metered_seconds))
        rows.append((name, share, *figures, "–" if ratio is None else f"{ratio:.2f}"))
    say()
    print_table(("stage", "share", "plan", "meter", "meter/plan"), rows)


def as_values(file: SpeedrunFile) -> dict[str, Any]:
    """The outcome for programs."""
    return {
        "options": file.options,
        "design": dataclasses.asdict(file.design),
        "planning_seconds": file.planning_seconds,
        "stages": {name: {"rows": stage.rows, "commands": stage.commands} for name, stage in file.stages.items()},
        "large": file.large,
    }
