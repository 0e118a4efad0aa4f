"""A corpus beside its plan: what was predicted of each stage, and what came out."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from napkin.curation.corpus_folder import METER
from napkin.curation.corpus_plan import CorpusPlan, Estimate, Flow
from napkin.curation.manifest import Amount, read_manifest
from napkin.errors import NapkinError
from napkin.runs.json_file import read_json


@dataclass(frozen=True)
class ReconciledRow:
    """A planned figure and the metered one."""

    place: str
    what: str
    """documents or bytes."""
    planned: Estimate
    metered: float

    @property
    def is_inside(self) -> bool:
        """Whether the metered figure is in the planned interval."""
        return self.planned.low <= self.metered <= self.planned.high


@dataclass(frozen=True)
class Reconciliation:
    """Plan and meter of a corpus."""

    rows: tuple[ReconciledRow, ...]
    stage_seconds: tuple[tuple[str, float, float], ...]
    """Names of stages that look at one document at a time, with planned and metered seconds of one core."""


def read_plan(path: Path) -> CorpusPlan:
    """The plan that `napkin data plan --out` wrote. Raises NapkinError for another file."""
    plan = read_json(path, CorpusPlan)
    if plan is None:
        raise NapkinError(f"'{path}' is not a plan: make one with `napkin data plan PIPELINE --out {path}`")
    return plan


def reconcile(corpus: Path, plan: CorpusPlan) -> Reconciliation:
    """Compare a finished corpus with a plan. Raises NapkinError where it has other stages than the plan."""
    manifest = read_manifest(corpus)
    planned, made = [stage.name for stage in plan.stages], [stage.name for stage in manifest.stages]
    if planned != made:
        raise NapkinError(
            f"the plan is for the stages {', '.join(planned) or 'none'}, '{corpus}' was made by "
            f"{', '.join(made) or 'none'}: name the plan of its pipeline"
        )
    rows = _rows("read", plan.read, manifest.input.read)
    for before, after in zip(plan.stages, manifest.stages, strict=True):
        rows += _rows(before.name, before.remained, after.remained)
    return Reconciliation(tuple(rows), _stage_seconds(corpus, plan))


def _rows(place: str, planned: Flow, metered: Amount) -> list[ReconciledRow]:
    return [
        ReconciledRow(place, "documents", planned.documents, metered.documents),
        ReconciledRow(place, "bytes", planned.bytes, metered.bytes),
    ]


def _stage_seconds(corpus: Path, plan: CorpusPlan) -> tuple[tuple[str, float, float], ...]:
    try:
        seconds = msgspec.json.decode((corpus / METER).read_bytes(), type=dict[str, list[float]])["stage_seconds"]
    except (OSError, msgspec.MsgspecError, KeyError):
        return ()
    both = zip(plan.stages, seconds, strict=False)
    return tuple((stage.name, stage.seconds, metered) for stage, metered in both if not stage.compares)
