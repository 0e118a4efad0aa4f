"""The step of a run on examples that takes most memory, found before the first one by the lengths of all batches."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.planning.step.longest_step import LongestStep, Sizes, find_longest, largest_that
from napkin.recipe.resolved import ResolvedRecipe
from napkin.tuning.example_plan import count_examples
from napkin.tuning.packing import MicroBatchShape, Packing, SequenceMicroBatch, chunks_of, micro_batches_of, shapes_of
from napkin.tuning.sequence_step import Objective, examples_of_rank, totals_of

MOST_EXAMPLES = 100_000
"""The most examples whose lengths are read; for a longer run, those of its first steps."""
FEWEST_TOKENS = 16
"""The shortest micro-batch or sequence that is proposed where memory is not enough."""

Batch = Callable[[int], Sequence[Example]]
"""The examples of a step by its number."""


class LongestExamples:
    """The sizes of the batches of a run, as rank 0 has them, and the bytes of their steps.

    `planned` puts stand-ins for what a run computes before a step, and `scored` are the examples that a step scores
    without gradients.
    """

    def __init__(
        self,
        resolved: ResolvedRecipe,
        objective: Objective,
        batch: Batch,
        *,
        max_tokens: int,
        packing: Packing,
        planned: Callable[[Sequence[Example]], Sequence[Example]] = lambda examples: examples,
        scored: Callable[[Sequence[Example]], Sequence[Example]] = lambda examples: (),
    ) -> None:
        self.resolved, self.objective, self.batch = resolved, objective, batch
        self.max_tokens = max_tokens
        self.packing: Packing = packing
        self.planned, self.scored = planned, scored

    def find(self, step_bytes: int, known: Mapping[int, int] | None = None) -> LongestStep | None:
        """The step that takes most memory, and the first that needs more than `step_bytes`; None if all steps are
        equal.

        `known` are the peaks of steps that were counted already.
        """
        training = self.resolved.recipe.training
        n_steps = min(training.steps, max(1, MOST_EXAMPLES // training.batch_size))
        shapes, sizes = list[MicroBatchShape](), list[Sizes]()
        for number in range(n_steps):
            batch = self.batch(number)
            parts = self._shapes(batch)
            shapes.append(max(parts, key=lambda part: (part.rows * part.width, part.width)))
            sizes.append((*_sizes(parts), *_sizes(self._shapes(self.scored(batch)))))
        if len(set(sizes)) == 1:
            return None
        return find_longest(
            sizes,
            self.peak_bytes,
            lambda step: str(shapes[step]),
            step_bytes=step_bytes,
            known={number: peak for number, peak in (known or {}).items() if number < n_steps},
            way_out=lambda step: self._way_out(step, step_bytes),
        )

    def peak_bytes(self, number: int) -> int:
        """The peak of a step, counted."""
        return self._counted(self.batch(number), self.max_tokens)

    def _shapes(self, examples: Sequence[Example]) -> list[MicroBatchShape]:
        shapes: list[MicroBatchShape] = []
        for chunk in chunks_of(examples):
            own = examples_of_rank(chunk, self.resolved.layout, 0)
            shapes += shapes_of(own, max_tokens=self.max_tokens, row_length=self._row_length, packing=self.packing)
        return shapes

    @property
    def _row_length(self) -> int:
        return self.resolved.recipe.model.context_length

    def _counted(self, batch: Sequence[Example], max_tokens: int) -> int:
        """The peak of a step on a batch. Of its micro-batches, those that no other is above are enough."""
        parts, scored = (
            _largest(self._micro_batches(examples, max_tokens))
            for examples in (self.planned(batch), self.scored(batch))
        )
        return count_examples(self.resolved, parts, totals_of(parts), self.objective, scored).peak_bytes

    def _micro_batches(self, examples: Sequence[Example], max_tokens: int) -> list[SequenceMicroBatch]:
        micro_batches: list[SequenceMicroBatch] = []
        for chunk in chunks_of(examples):
            own = examples_of_rank(chunk, self.resolved.layout, 0)
            micro_batches += micro_batches_of(
                own, max_tokens=max_tokens, row_length=self._row_length, packing=self.packing
            )
        return micro_batches

    def _way_out(self, number: int, step_bytes: int) -> str:
        """Find settings that fit if a step does not: smaller micro-batches, or shorter sequences."""
        batch = self.batch(number)
        longest = max(len(sequence.tokens) for example in batch for sequence in example)
        tokens = self.max_tokens
        while tokens > FEWEST_TOKENS:
            tokens //= 2
            if self._counted(batch, tokens) <= step_bytes:
                return f"micro-batches of {tokens:,} tokens would fit, --tuning.micro-batch-tokens {tokens}"
            if tokens < longest:
                break  # a sequence alone is more
        length = largest_that(
            lambda length: self._counted([_cut(example, length) for example in batch], tokens) <= step_bytes,
            FEWEST_TOKENS,
            longest,
        )
        if not length:
            return "no length would fit: recompute activations, train adapters, or take a smaller model"
        return (
            f"sequences of up to {length:,} tokens would fit, --tuning.max-length {length} with "
            f"--tuning.micro-batch-tokens {tokens}"
        )


def _sizes(parts: Sequence[MicroBatchShape]) -> Sizes:
    """Sizes of a step that its bytes grow with: of its largest micro-batches, and of those after the first, beside
    which there are gradients."""

    def largest(parts: Sequence[MicroBatchShape]) -> tuple[int, ...]:
        rows, width, targets, masked = np.array([(0, 0, 0, 0), *parts], dtype=np.int64).T
        pairs = rows * width * width
        return tuple(int(each.max()) for each in (rows * width, pairs, targets, pairs * masked))

    return (*largest(parts), *largest(parts[1:]))


def _largest(parts: Sequence[SequenceMicroBatch]) -> list[SequenceMicroBatch]:
    """The first micro-batch, and of the others those with the most tokens, the longest rows and the most targets: a
    step on these has the peak of the whole."""

    def sizes(part: SequenceMicroBatch) -> tuple[int, int, int]:
        rows, width = part.rows.inputs.shape
        return rows * width, width, len(part.rows.targets)

    later = range(1, len(parts))
    kept = {0} | {max(later, key=lambda place: sizes(parts[place])[size]) for size in range(3)} if later else {0}
    return [part for place, part in enumerate(parts) if place in kept]


def _cut(example: Example, length: int) -> Example:
    """The example with at most that many tokens of each sequence, some of them trained on."""
    cut = []
    for sequence in example:
        mask = sequence.loss_mask[:length].copy()
        mask[-1] |= length < len(sequence.tokens)
        names = {name: value[: int(mask.sum())] for name, value in sequence.values.items()}
        cut.append(TokenSequence(sequence.tokens[:length], mask, names))
    return tuple(cut)
