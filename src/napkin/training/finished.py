"""Whether a run has anything left to do: asked before its text is verified and its step is planned."""

from napkin.accounting.metering import METERED_STEP
from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint
from napkin.checkpoint.state import Checkpoint
from napkin.errors import CorruptFile
from napkin.files import StrPath
from napkin.report.page import REPORT_FILE
from napkin.runs.measurement_file import MEASUREMENT_FILE
from napkin.runs.metrics import METRICS_FILE, read_metrics_record
from napkin.runs.run_folder import RunFolder


def finished_checkpoint(folder: StrPath) -> Checkpoint | None:
    """The last checkpoint of a run that has nothing left to do, verified; else None.

    All steps are done, the books are closed, no line of metrics.jsonl is damaged, and the recipe is the one that the
    run was created with.
    """
    run = RunFolder.open(folder)
    newest = next(iter(checkpoint_paths(run.checkpoints)), None)
    if newest is None:
        return None
    try:
        # What is small is read first: of most runs that are resumed, the metrics and the weights are not.
        state = read_checkpoint(newest, verify=False).state
        if state.step < run.recipe.training.steps or state.history.unfinished is not None:
            return None
        if run.recipe_was_changed or not _books_are_closed(run):
            return None
        return read_checkpoint(newest)
    except CorruptFile:
        # Training skips it, and continues from an earlier one.
        return None


def _books_are_closed(run: RunFolder) -> bool:
    metered = (run.path / MEASUREMENT_FILE).exists() or run.recipe.training.steps <= METERED_STEP
    if not metered or not (run.path / REPORT_FILE).exists():
        return False
    record = read_metrics_record(run.path / METRICS_FILE)
    return not record.messages() and record.incomplete is None
