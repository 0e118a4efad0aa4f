"""One page for a project of several runs: the books of each stage, and its scores before and after."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from napkin.accounting.quantities import format_figure, format_ratio
from napkin.files import StrPath, atomic_write_text
from napkin.report.headline import status_of
from napkin.report.page import quantity_table
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.report.xy_picture import COLOURS
from napkin.runs.run_record import RunRecord, read_run_record

SUMMARY = ("FLOPs per step", "peak bytes", "seconds per step", "seconds per step, alone", "seconds in all")
"""The rows of a run's table that the summary compares."""


@dataclass(frozen=True)
class StagePage:
    """A stage of the page."""

    name: str
    about: str
    """A sentence on what is done."""
    run: Path
    """The folder of its run."""
    scores: Sequence[tuple[str, str, str]] = field(default_factory=tuple)
    """Rows of a score's name and its figures before and after."""


def write_stages(page: StrPath, title: str, stages: Sequence[StagePage]) -> Path:
    """Write the page of some runs, replacing an earlier one, and return its path.

    Raises NapkinError for a folder that is not a run, or whose files are malformed.
    """
    path, records = Path(page), [read_run_record(stage.run) for stage in stages]
    ids = [f"stage-{number}" for number in range(len(stages))]
    shown = [
        {
            "id": id,
            "about": stage.about,
            "status": status_of(record),
            "scores": list(stage.scores),
            "table": quantity_table(record),
        }
        for id, stage, record in zip(ids, stages, records, strict=True)
    ]
    names = {id: stage.name for id, stage in zip(ids, stages, strict=True)}
    text = render(
        "stages.html",
        title=title,
        sections={"summary": "Planned and measured", **names},
        # Stages side by side: as many columns as stages, which fit a page.
        summary=[(name, [_compared(record, name) for record in records]) for name in SUMMARY],
        stages=shown,
        colours=COLOURS,
        **WITHOUT_CHARTS,
    )
    atomic_write_text(path, text, overwrite=True)
    return path


def _compared(record: RunRecord, quantity: str) -> tuple[str, str, str]:
    """Return count, meter and their ratio; dashes where the run has no such row."""
    table = record.measurement.table if record.measurement else record.plan.table if record.plan else ()
    for row in table:
        if row.quantity == quantity:
            return format_figure(row.count, row.unit), format_figure(row.meter, row.unit), format_ratio(row)
    return "–", "–", "–"
