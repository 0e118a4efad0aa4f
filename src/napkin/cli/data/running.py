"""Running a pipeline with progress, and printing its books."""

from functools import partial
from pathlib import Path

from napkin.cli.common.files import folder_for
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.curation.engine.corpus_writer import Amount, Manifest
from napkin.curation.engine.pipeline_file import Pipeline
from napkin.curation.engine.pipeline_run import Engine, Outcome, curate
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.units import format_bytes, format_share


def run_and_print(
    pipeline: Pipeline,
    out: str,
    workers: int | None,
    *,
    engine: Engine = "processes",
    ray_address: str | None = None,
    as_program: bool,
) -> None:
    """Make a corpus, or go on with it, and print what came out."""
    if not out:
        raise NapkinError("--out is empty: name a folder for the corpus")
    path = Path(out)
    with progress_line("reading") as line, folder_for(path):
        outcome = curate(
            pipeline,
            path,
            workers=usable_cores() if workers is None else workers,
            engine=engine,
            ray_address=ray_address,
            on_progress=partial(_show_progress, line),
            on_message=lambda message: notify(f"data: {message}"),
        )
    if as_program:
        print_json({"out": out, "was_finished": outcome.was_finished, "manifest": outcome.manifest})
    else:
        _print(outcome, path)


def _show_progress(line: ProgressLine, done: int, total: int, what: str) -> None:
    line.retitle(what)
    line(done, total, f"{format_bytes(done)} of {format_bytes(total)}" if total else "")


def _print(outcome: Outcome, out: Path) -> None:
    manifest = outcome.manifest
    if outcome.was_finished:
        say(f"{out} is finished: nothing is left to do")
    print_table(["stage", "rule", "documents", "bytes", "of documents"], _rows(manifest), align="llrrr")
    if manifest.set_aside:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in manifest.set_aside.items())
        say(f"set aside, as set_aside.jsonl lists: {reasons}")
    say(
        f"wrote {out}: {manifest.documents:,} documents, {format_bytes(manifest.text_bytes)} of text in "
        f"{len(manifest.files):,} files"
    )


def _rows(manifest: Manifest) -> list[list[str]]:
    rows = [_row("read", "", manifest.input.read, manifest.input.read)]
    for stage in manifest.stages:
        for rule, amount in sorted(stage.dropped.items(), key=lambda each: (-each[1].documents, each[0])):
            rows.append(_row(stage.name, rule, amount, stage.entered, sign="-"))
        rows.append(_row(stage.name, "remain", stage.remained, stage.entered))
    return rows


def _row(stage: str, rule: str, amount: Amount, of: Amount, sign: str = "") -> list[str]:
    share = format_share(amount.documents / of.documents) if of.documents else "–"
    return [stage, rule, f"{sign}{amount.documents:,}", f"{sign}{format_bytes(amount.bytes)}", share]
