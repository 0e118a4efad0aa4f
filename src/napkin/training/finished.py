"""Whether a run has anything left to do: asked before its text is verified and its step is planned."""

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint
from napkin.checkpoint.state import Checkpoint
from napkin.errors import CorruptFile
from napkin.files import StrPath
from napkin.runs.run_folder import RunFolder


def finished_checkpoint(folder: StrPath) -> Checkpoint | None:
    """The last checkpoint of a run that has nothing left to do, verified; else None."""
    run = RunFolder.open(folder)
    newest = next(iter(checkpoint_paths(run.checkpoints)), None)
    if newest is None:
        return None
    try:
        state = read_checkpoint(newest, verify=False).state
        if state.step < run.recipe.training.steps or state.history.unfinished is not None:
            return None
        return read_checkpoint(newest)
    except CorruptFile:
        # Training skips it, and continues from an earlier one.
        return None
