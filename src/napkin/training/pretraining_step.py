"""The step of pre-training: next-token prediction on a batch of windows."""

from typing import NamedTuple

from torch import Tensor

from napkin.data.prefetch import Batch
from napkin.train_step.step import Watch
from napkin.training.loop import TrainingLoop
from napkin.training.metered_step import IsFit, MeteredStep
from napkin.training.preparation import Preparation


class WeightedBatch(NamedTuple):
    """A batch, and the weights of its micro-batches; None where all weigh the same."""

    tensors: Batch
    weights: list[float] | None


class PretrainingStep(MeteredStep):
    """Trains on the batch of the loop's next step."""

    def batch(self, loop: TrainingLoop, number: int) -> WeightedBatch:
        """The rows of this rank."""
        loop.reading_batch = True
        with loop.guarded(_preparation(loop).train_tokens):
            batch = loop.fetcher[number]
        loop.reading_batch = False
        weights = loop.train_state.micro_batch_weights(batch[1]) if loop.ranks.world_size > 1 else None
        return WeightedBatch(batch, weights)

    def train(self, loop: TrainingLoop, number: int, batch: WeightedBatch, watch: Watch, is_fit: IsFit) -> Tensor:
        """See `TrainState.step`."""
        loss, _ = loop.train_state.step(number, *batch.tensors, weights=batch.weights, watch=watch, is_fit=is_fit)
        return loss

    def micro_batches(self, loop: TrainingLoop, batch: WeightedBatch) -> int:
        """Of this rank."""
        return len(batch.tensors[0]) // loop.recipe.training.resolved_micro_batch_size

    def tensors(self, batch: WeightedBatch) -> dict[str, Tensor]:
        """All of the batch."""
        return dict(zip(("inputs", "targets", "documents"), batch.tensors, strict=False))

    def tokens(self, loop: TrainingLoop) -> tuple[int, int, float | None]:
        """Every step has as many."""
        each = loop.recipe.tokens_per_step
        return loop.step * each, each, _preparation(loop).train_tokens.epochs(loop.step * each)


def _preparation(loop: TrainingLoop) -> Preparation:
    assert isinstance(loop.preparation, Preparation)
    return loop.preparation
