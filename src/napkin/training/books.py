"""measurement.json, which a run has from its last checkpoint on, whenever the process is killed."""

import contextlib
import dataclasses
from contextlib import AbstractContextManager

from napkin.accounting.quantity_table import QuantityTable
from napkin.accounting.run_measurement import Measurement
from napkin.checkpoint.checksums import frozen_path
from napkin.checkpoint.folder import checkpoint_path, checkpoint_paths, read_checkpoint
from napkin.checkpoint.load import load_train_state
from napkin.checkpoint.stored_tensors import stored_bytes
from napkin.errors import NapkinError
from napkin.planning.stored_quantities import CHECKPOINT_BYTES, FROZEN_BYTES
from napkin.runs.measurement_file import MEASUREMENT_FILE, write_measurement
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import MeteredStep


class Books(Callback):
    """Writes measurement.json before the last checkpoint, and again after it, with the seconds that it took.

    A run whose last checkpoint is on the disk thus has its measurement. One that has none, because an earlier process
    was killed before it had metered a step, is metered when it is resumed.
    """

    def __init__(self, step: MeteredStep) -> None:
        self._step = step
        self.measurement: Measurement | None = None
        """Of this process's steps; None where there were too few to meter one and time another."""
        self.table = QuantityTable()

    def running(self, loop: TrainingLoop) -> AbstractContextManager:
        """Watches what other processes do to the steps."""
        return self._step.sampling(loop)

    def on_end(self, loop: TrainingLoop) -> None:
        """Write what is measured so far; meter a step of a run that is complete but for its measurement."""
        if loop.ranks.broadcast_from_zero(lambda: self._is_left_open(loop)):
            self._step.meter_discarded(loop)
            checkpoint = read_checkpoint(checkpoint_path(loop.run.checkpoints, loop.step), verify=False)
            load_train_state(checkpoint, loop.train_state)
        # The checkpoint is what matters: an error is raised when it is on the disk.
        with contextlib.suppress(NapkinError, OSError):
            self.write(loop)

    def write(self, loop: TrainingLoop) -> None:
        """Write measurement.json, on rank 0, if there is a measurement."""
        measurement, plan = self._step.measurement(loop), loop.preparation.plan
        if measurement is None or plan is None:
            return
        if loop.step > loop.first_step:
            self.measurement = measurement
        if loop.frozen is not None and loop.ranks.is_rank_zero:
            measurement = dataclasses.replace(measurement, further={**measurement.further, **_stored(loop)})
        whole, price = loop.step == loop.recipe.training.steps, plan.site.usd_per_hour
        self.table = write_measurement(
            loop.run,
            plan.table(),
            measurement,
            whole=whole,
            usd_per_hour=price,
            ranks=self._step.ranks,
            straggler=self._step.straggler,
        )

    def _is_left_open(self, loop: TrainingLoop) -> bool:
        """Whether an earlier process made the last of several steps, and was killed before it wrote a measurement."""
        is_complete = loop.first_step == loop.recipe.training.steps > 1
        return is_complete and not (loop.run.path / MEASUREMENT_FILE).exists()


def _stored(loop: TrainingLoop) -> dict[str, float]:
    """Bytes of the tensors on the disk, of a run that keeps frozen weights: of these, and of the newest checkpoint."""
    found: dict[str, float] = {FROZEN_BYTES: stored_bytes([frozen_path(loop.run.checkpoints)])}
    for newest in checkpoint_paths(loop.run.checkpoints)[:1]:
        found[CHECKPOINT_BYTES] = stored_bytes(newest.glob("*.safetensors"))
    return found
