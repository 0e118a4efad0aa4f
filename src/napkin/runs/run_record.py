"""All files of a run's folder, read and validated for a report.

Files other than the recipe are written during the run; they are None, or empty, until then.
"""

from dataclasses import dataclass
from pathlib import Path

from napkin.accounting.utilisation import mfu_of_steps
from napkin.errors import NapkinError
from napkin.runs.answers_file import Answers, read_newest_answers
from napkin.runs.evaluation_file import Evaluation
from napkin.runs.json_file import malformed, read_if_present, read_json
from napkin.runs.measurement_file import MeasurementFile
from napkin.runs.metrics import METRICS_FILE, StepMetrics, read_metrics_record
from napkin.runs.plan_file import PlanFile
from napkin.runs.run_format import recipe_was_changed


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder."""

    name: str
    recipe: str
    plan: PlanFile | None
    metrics: tuple[StepMetrics, ...]
    measurement: MeasurementFile | None
    evaluation: Evaluation | None
    samples: str | None
    problems: tuple[str, ...] = ()
    """A sentence for each problem of metrics.jsonl: damaged, displaced and missing lines."""
    incomplete: str | None = None
    """That its last line is incomplete, as a kill or the moment may leave it."""
    recipe_was_changed: bool = False
    """Whether recipe.toml is known to be another one than the run was created with."""
    answers: Answers | None = None
    """To held-out tasks, of the last evaluation of a run of reinforcement learning."""

    @property
    def mfu(self) -> float | None:
        """Of all steps together: as measured where a process has made them all, else of the logged steps."""
        measured, steps = self.measurement, self.metrics[-1].step if self.metrics else 0
        if measured is not None and measured.mfu is not None and measured.steps >= steps:
            return measured.mfu
        return mfu_of_steps((logged.mfu, logged.step_seconds) for logged in self.metrics)


def read_run_record(run: Path) -> RunRecord:
    """Read the files of a run that exist.

    Raises NapkinError, naming the file, where `run` is not a run folder or a file is malformed. Of metrics.jsonl the
    intact lines are read, and `problems` names the others.
    """
    recipe = read_if_present(run / "recipe.toml")
    if recipe is None:
        raise NapkinError(
            f"'{run}' is not a run folder: it holds no recipe.toml; name a folder that `napkin train` has written"
        )
    samples = read_if_present(run / "samples.txt")
    metrics = read_metrics_record(run / METRICS_FILE)
    return RunRecord(
        name=run.resolve().name,
        recipe=_text(run / "recipe.toml", recipe),
        plan=read_json(run / "plan.json", PlanFile),
        metrics=metrics.metrics,
        measurement=read_json(run / "measurement.json", MeasurementFile),
        evaluation=read_json(run / "evaluation.json", Evaluation),
        # A byte-level model may generate invalid UTF-8.
        samples=None if samples is None else samples.decode("utf-8", errors="replace"),
        problems=tuple(metrics.messages()),
        incomplete=None if metrics.incomplete is None else metrics.describe_incomplete(),
        recipe_was_changed=recipe_was_changed(run),
        answers=read_newest_answers(run),
    )


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(path, error) from error
