"""When the reference's log-probabilities are computed: before the first step, by the run's own model.

Its weights are those of the reference until then, so there is never a second model in memory. A run that is resumed
reads what it has kept; where that is gone, the model that it started from is loaded, used and dropped. Where adapters
are trained, the model without them is the reference at any time.
"""

import time
from contextlib import ExitStack
from pathlib import Path

from napkin.alignment.lazy_units import chunks_of
from napkin.alignment.reference_scores import (
    ReferenceKey,
    ReferredUnits,
    read_reference_scores,
    reference_writer,
)
from napkin.alignment.sequence_packing import Arrangement
from napkin.alignment.sequence_step import scores_of_units
from napkin.alignment.start_model import open_start, reference_model
from napkin.alignment.token_sequence import TokenSequence
from napkin.alignment.unit_plan import REFERENCE_SECONDS, REFERENCE_TOKENS
from napkin.distributed.parallel_model import ParallelModel
from napkin.errors import NapkinError
from napkin.model.adapters import adapters_off
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.signals import Interrupted, agree_on_signal
from napkin.units import format_seconds

WATCHED = "reference"
"""Under which the seconds of a run have those of this pass."""


class ReferencePass(Callback):
    """Gives units a reference's log-probabilities before the first step.

    Args:
        start: folder of the reference: the model that tuning starts from.
        units: by name, the units and their checksum; the name is part of a file's.
        max_tokens: of a micro-batch.
        arrangement: of sequences in rows.
    """

    def __init__(
        self, start: str, units: dict[str, tuple[ReferredUnits, str]], *, max_tokens: int, arrangement: Arrangement
    ) -> None:
        self.start, self.units, self.max_tokens = start, units, max_tokens
        self.arrangement: Arrangement = arrangement
        self._computed: dict[str, int] = {}
        """Tokens of what this process has computed, by name."""

    def on_start(self, loop: TrainingLoop) -> None:
        """Read the log-probabilities, or compute them and write them; a collective. A signal interrupts it: the run
        takes no step then, and computes them when it is resumed."""
        for name, (units, checksum) in self.units.items():
            if len(units):
                self._give(loop, name, units, checksum)

    def metered(self, loop: TrainingLoop) -> dict[str, float]:
        """Tokens and seconds of the whole pass, by the names of the plan's rows; nothing where some were read."""
        if any(len(units) and name not in self._computed for name, (units, _) in self.units.items()):
            return {}
        return {REFERENCE_TOKENS: sum(self._computed.values()), REFERENCE_SECONDS: loop.watch.seconds[WATCHED]}

    def _give(self, loop: TrainingLoop, name: str, units: ReferredUnits, checksum: str) -> None:
        path = loop.run.path / f"reference-{name}.safetensors"

        def key_of(start: str) -> ReferenceKey:
            return ReferenceKey(checksum, start, loop.preparation.precision.name)

        def look() -> tuple[str, str]:
            # A run that has taken steps keeps its reference, whatever has become of the folder since.
            start = loop.frozen or ("" if loop.step else open_start(self.start).fingerprint)
            return start, read_reference_scores(path, key_of(start), units.n_sequences)[1]

        # Ranks decide alike; then each reads for itself.
        start, problem = loop.ranks.broadcast_from_zero(look)
        if problem:
            if loop.ranks.is_rank_zero and path.exists():
                loop.on_message(f"'{path}' is computed again: {problem}")
            model = loop.train_state.parallel_model
            if loop.step and loop.frozen is None:
                reopened = open_start(self.start)
                start = reopened.fingerprint
                model = ParallelModel(reference_model(reopened, loop.preparation.precision), loop.ranks, model.layout)
            try:
                self._compute(loop, model, name, units, path, key_of(start))
            except Interrupted:
                return
            # The others wait until the file is there.
            loop.ranks.broadcast_from_zero(lambda: None)
        units.scores, problem = read_reference_scores(path, key_of(start), units.n_sequences)
        if units.scores is None:
            raise NapkinError(f"'{path}' cannot be used, {problem}: continue with `napkin resume {loop.run.path}`")

    def _compute(
        self,
        loop: TrainingLoop,
        model: ParallelModel,
        name: str,
        units: ReferredUnits,
        path: Path,
        key: ReferenceKey,
    ) -> None:
        """Compute the log-probabilities and write them, on rank 0. Raises Interrupted where a signal interrupts it."""
        began, n_tokens = time.perf_counter(), 0
        with ExitStack() as stack:
            stack.enter_context(loop.watch(WATCHED))
            stack.enter_context(adapters_off(loop.train_state.model))
            writer = None
            if loop.ranks.is_rank_zero:
                writer = stack.enter_context(reference_writer(path, key, units.n_sequences))
            for chunk in chunks_of(units.units):
                if agree_on_signal(loop.ranks, loop.interruption) is not None:
                    raise Interrupted
                # Without values: sequences of a unit may have different ones.
                bare = [tuple(TokenSequence(each.tokens, each.counts) for each in unit) for unit in chunk]
                scores = scores_of_units(
                    model,
                    bare,
                    max_tokens=self.max_tokens,
                    arrangement=self.arrangement,
                    autocast=loop.preparation.precision.autocast,
                )
                if writer is not None:
                    writer.add([sequence.log_probabilities for unit in scores for sequence in unit])
                n_tokens += sum(len(sequence.tokens) for unit in bare for sequence in unit)
        self._computed[name] = n_tokens
        if writer is not None:
            seconds = format_seconds(time.perf_counter() - began)
            loop.on_message(
                f"log-probabilities of the reference, {writer.n_tokens:,} tokens in {seconds}: kept in '{path}'"
            )
