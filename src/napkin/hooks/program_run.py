"""The folder of a program that napkin watches: the files of a run, without a model of napkin's.

run.json, recipe.toml (the program's own settings, in a table [program]), plan.json, metrics.jsonl, measurement.json and
report.html are those of any run, so that `napkin runs` and `napkin report` read them. The program saves checkpoints and
its tokenizer by itself, elsewhere.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import tomli_w

import napkin
from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_text, draft_folder
from napkin.hooks.loop_figures import LoopFigures, program_table
from napkin.hooks.program_plan import ProgramPlan, plan_file_of_program
from napkin.hooks.verdict import verdict
from napkin.json_files import crc32, format_json
from napkin.report.page import write_report
from napkin.runs.accounting_files import MEASUREMENT_FILE, MeasurementFile
from napkin.runs.metrics import MetricsFile, StepMetrics
from napkin.runs.run_folder import FORMAT, VERSION, RunFolder, RunFormat
from napkin.runs.run_record import VERDICT_FILE


class ProgramRun:
    """Writes the files of one watched program."""

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path
        self._folder, self._metrics = folder, MetricsFile(folder.path)
        self._process = psutil.Process()

    @classmethod
    def create(cls, path: StrPath, program: str, loop: LoopFigures, settings: Mapping[str, Any]) -> "ProgramRun":
        """Create the folder. Raises NapkinError where it exists or cannot be made."""
        path = Path(path)
        if path.exists():
            raise NapkinError(f"'{path}' exists and is not overwritten: choose another run")
        described = {"trainer": program, "model": type(loop.module).__name__, "parameters": loop.parameters}
        text = tomli_w.dumps({"program": {**described, **_toml_values(settings)}})
        created = datetime.now(UTC).isoformat(timespec="seconds")
        marked = RunFormat(FORMAT, VERSION, napkin.__version__, created, crc32(text.encode()))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft_folder(path) as draft:
                atomic_write_text(draft / "run.json", format_json(marked))
                atomic_write_text(draft / "recipe.toml", text)
                draft.rename(path)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be created ({error.strerror}): choose another run") from None
        return cls(RunFolder(path))

    def write_plan(self, plan: ProgramPlan) -> None:
        self._folder.write_json("plan.json", plan_file_of_program(plan))

    def write_line(
        self,
        *,
        step: int,
        tokens: int,
        seconds: float,
        step_seconds: float,
        tokens_per_second: float,
        mfu: float,
        figures: Mapping[str, float],
    ) -> None:
        """Append a line of metrics, unless the step has one."""
        if step <= self._metrics.last_step:
            return
        validation = figures.get("validation_loss", math.nan)
        line = StepMetrics(
            step=step,
            tokens=tokens,
            loss=figures.get("loss", math.nan),
            learning_rate=figures.get("learning_rate", math.nan),
            gradient_norm=figures.get("gradient_norm", math.nan),
            seconds=seconds,
            step_seconds=step_seconds,
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            bytes=self._process.memory_info().rss,
            validation_loss=validation if math.isfinite(validation) else None,
        )
        self._metrics.append(line)

    def finish(self, loop: LoopFigures) -> None:
        """Write the measurement and the report."""
        spent = loop.spent
        parts = {"steps": spent.steps, "data": spent.data, "metered step": spent.recorded, "planning": spent.planning}
        file = MeasurementFile(
            tuple(program_table(loop)),
            {**parts, **spent.other},
            loop.steps,
            loop.mfu,
            ranks=tuple(loop.rank_seconds),
            straggler=loop.straggler,
        )
        self._folder.write_json(MEASUREMENT_FILE, file)
        atomic_write_text(self.path / VERDICT_FILE, "".join(f"{each}\n" for each in verdict(loop)), overwrite=True)
        write_report(self.path)


def free_folder(wanted: Path) -> Path:
    """`wanted`, numbered where that exists."""
    names = (wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10**4)))
    return next(path for path in names if not path.exists())


def _toml_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as TOML can hold them; other values become text."""
    plain = (str, int, float, bool)
    return {
        str(name): value if isinstance(value, plain) else str(value)
        for name, value in settings.items()
        if value is not None
    }
