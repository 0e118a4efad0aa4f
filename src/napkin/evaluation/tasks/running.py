"""Put a task to a model, item by item.

Scores of an item: from log-probabilities of choices, or from a generated text.

acc              the choice with the highest log-probability is the right one
acc_norm         ... divided by the characters of the choice, as in lm-evaluation-harness
acc_bytes        ... divided by its UTF-8 bytes
acc_tokens       ... divided by its tokens
acc_uncond       ... less its log-probability after "Answer:" alone (Brown et al. 2020, section 2.4)
brier            the squared distance of the choices' probabilities from the right one (`evaluation.calibration`)
exact_match      the generated text is the answer
prompt_strict    the generated text follows all instructions; prompt_loose without markup and framing lines
nats             minus the log-probability of a last word, whose acc is that the model would write it at temperature 0
"""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from napkin.errors import NapkinError
from napkin.evaluation.calibration import brier_score, choice_probabilities
from napkin.evaluation.tasks.prompts import Prompted, Prompting, PromptModel, common_length, examples_of, prompted
from napkin.evaluation.tasks.published import Item, Kind, Task
from napkin.evaluation.tasks.results import ItemLog, ItemResult
from napkin.grading.answers import exact_score
from napkin.grading.instructions import instructions_followed
from napkin.grading.mathematics.final_answer import final_answer, final_number
from napkin.grading.mathematics.math_answer import math_score, number_score


def choice_scores(
    item: Item, logprobs: Sequence[float], tokens: Sequence[int], unconditional: Sequence[float] | None
) -> dict[str, float]:
    """The scores of an item with choices, 0 or 1 but for Brier's, from the log-probability and the tokens of each.

    Of equal figures the first choice counts, as numpy's argmax has it.
    """
    totals = np.array(logprobs)
    figures = {
        "acc": totals,
        "acc_norm": totals / [len(choice) for choice in item.choices],
        "acc_bytes": totals / [len(choice.encode()) for choice in item.choices],
        "acc_tokens": totals / np.array(tokens),
    }
    if unconditional is not None:
        figures["acc_uncond"] = totals - np.array(unconditional)
    scores = {name: float(np.argmax(figure) == item.right) for name, figure in figures.items()}
    return scores | {"brier": brier_score(choice_probabilities(logprobs), item.right)}


def pair_scores(logprobs: Sequence[float]) -> dict[str, float]:
    """1 where the good text has the higher log-probability (Warstadt et al. 2020); equal ones are wrong."""
    good, bad = logprobs
    return {"acc": float(good > bad)}


def generated_scores(kind: Kind, item: Item, text: str) -> tuple[str | None, dict[str, float]]:
    """The answer found in a generated text, None if there is none, and its scores: those that the
    reward of the same name gives."""
    if kind == "instructions":
        strict, loose = instructions_followed(text, item.answer)
        return text, {"prompt_strict": float(all(strict)), "prompt_loose": float(all(loose))}
    find, score = _GRADERS[kind]
    return find(text), {"exact_match": score(text, item.answer)}


_GRADERS: dict[Kind, tuple[Callable[[str], str | None], Callable[[str, str], float]]] = {
    "exact": (lambda text: " ".join(text.split()), exact_score),
    "math": (final_answer, math_score),
    "number": (final_number, number_score),
}


BATCH_ITEMS = 32
"""Items that are scored at a time: they share the beginnings of their prompts, and are saved together."""

MOST_COUNTED_BATCHES = 32
"""Most batches that a plan counts: counting takes as long as encoding, twice."""

Pair = tuple[Sequence[int], Sequence[int]]


@runtime_checkable
class TaskModel(PromptModel, Protocol):
    """A model that tasks can be put to."""

    def logprobs(self, pairs: Sequence[Pair]) -> list[float]:
        """The log-probability in nats of each (context, continuation); shared beginnings are computed once."""
        ...

    def complete(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, str]]:
        """The likeliest continuation of each prompt, with its number, in the order in which they end."""
        ...

    def about(self) -> Mapping[str, Any]:
        """A model's marks: name, step, checksum of its weights, number format."""
        ...


class Scored(Protocol):
    """A continuation's log-probability, and whether the model would write it at temperature 0."""

    @property
    def total(self) -> float: ...

    @property
    def greedy(self) -> bool: ...


@runtime_checkable
class GreedyModel(Protocol):
    """A model that also says what it would write, which tasks of kind last_word ask for."""

    def score(self, pairs: Sequence[Pair]) -> Sequence[Scored]: ...


@dataclass(frozen=True)
class TaskPlan:
    """The tokens and seconds of a task, before it starts."""

    items: int
    counted_items: int
    """Number of items whose tokens were counted; those of the others are estimated from them."""
    sequences: int
    """Pairs of context and continuation, or prompts to continue."""
    tokens: int
    """Tokens of all sequences, without shared prefixes taken into account."""
    computed_tokens: int
    """Tokens of them that go through the model: shared beginnings of a batch once."""
    generated_tokens: int
    longest: int
    """Tokens of the longest sequence."""
    dropped_examples: int
    """Items that lost examples, since they would have exceeded the context."""
    cut: int
    """Items whose own prompt was truncated."""
    seconds: float | None = None
    """Extrapolated by tokens from `timed_items`, put to the model."""
    timed_items: int = 0


def chosen_items(task: Task, limit: int | None, seed: int | None) -> Task:
    """A task with at most so many items, drawn with a seed (None is 0), in the order of the file."""
    if limit is None or limit >= len(task.items):
        return task
    if limit < 1:
        raise NapkinError(f"--limit is {limit}: use 1 or more items")
    numbers = sorted(random.Random(f"items/{seed or 0}").sample(range(len(task.items)), limit))
    return dataclasses.replace(task, items=tuple(task.items[number] for number in numbers))


def fitting_items(task: Task, model: TaskModel, prompting: Prompting, *, skip_bad: bool = False) -> Task:
    """The task without items that have a choice longer than the context; these are listed in `left_out`. Raises
    NapkinError for such an item unless `skip_bad`: before the evaluation starts, not after an hour of it.
    """
    items, left_out = [], list(task.left_out)
    for item in task.items:
        # A token has a byte or more.
        if any(len((task.delimiter + choice).encode()) > model.context_length for choice in item.choices):
            try:
                prompted(task, item, model, prompting, [])
            except NapkinError as error:
                if not skip_bad:
                    raise
                left_out.append(str(error))
                continue
        items.append(item)
    if not items:
        raise NapkinError(f"no item of {task.name} fits the model's context of {model.context_length} tokens")
    return dataclasses.replace(task, items=tuple(items), left_out=tuple(left_out))


def prompted_items(task: Task, model: TaskModel, prompting: Prompting, items: Sequence[Item]) -> list[Prompted]:
    examples = {section: examples_of(task, section, prompting) for section in {item.section for item in items}}
    return [prompted(task, item, model, prompting, examples[item.section]) for item in items]


def run_task(
    task: Task,
    model: TaskModel,
    prompting: Prompting,
    log: ItemLog,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ItemResult]:
    """The results of all items, in their order; those that are in the log are not computed again."""
    left = [item for item in task.items if item.name not in log.done]
    for start in range(0, len(left), BATCH_ITEMS):
        batch = prompted_items(task, model, prompting, left[start : start + BATCH_ITEMS])
        progress(len(log.done), len(task.items))
        for results in _results(task, model, batch):
            log.add(results)
            progress(len(log.done), len(task.items))
    return [log.done[item.name] for item in task.items]


def plan_task(
    task: Task,
    model: TaskModel,
    prompting: Prompting,
    *,
    timed_items: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TaskPlan:
    """Count what a task takes; with `timed_items` put so many of the items to the model, and extrapolate by tokens.

    Of a long task batches spread over it are counted.
    """
    n_items = len(task.items)
    starts = range(0, n_items, BATCH_ITEMS)
    starts = starts[:: -(-len(starts) // MOST_COUNTED_BATCHES)]
    batches = []
    for start in starts:
        batches.append(_Work.of(task, prompted_items(task, model, prompting, task.items[start : start + BATCH_ITEMS])))
        progress(len(batches), len(starts))
    total = _Work.total(batches)
    scale = n_items / total.items
    seconds = None
    if timed_items:
        seconds = scale * total.effort * _seconds_per_effort(task, model, prompting, timed_items)
    return TaskPlan(
        items=n_items,
        counted_items=total.items,
        sequences=round(scale * total.sequences),
        tokens=round(scale * total.tokens),
        computed_tokens=round(scale * total.computed),
        generated_tokens=task.max_tokens * n_items if task.is_generated else 0,
        longest=total.longest,
        dropped_examples=round(scale * total.dropped),
        cut=round(scale * total.cut),
        seconds=seconds,
        timed_items=min(timed_items, n_items),
    )


def _seconds_per_effort(task: Task, model: TaskModel, prompting: Prompting, n_items: int) -> float:
    timed = prompted_items(task, model, prompting, task.items[:: max(1, len(task.items) // n_items)][:n_items])
    # The first pass is slower than those that follow.
    for _ in _results(task, model, timed[:1]):
        pass
    begin = time.perf_counter()
    for _ in _results(task, model, timed):
        pass
    return (time.perf_counter() - begin) / _Work.of(task, timed).effort


@dataclass(frozen=True)
class _Work:
    items: int
    sequences: int
    tokens: int
    computed: int
    generated: int
    longest: int
    dropped: int
    cut: int

    @property
    def effort(self) -> int:
        """Tokens that go through the model, which seconds are in proportion to."""
        return self.generated + self.computed

    @classmethod
    def of(cls, task: Task, batch: Sequence[Prompted]) -> "_Work":
        sequences = sorted(sequence for each in batch for sequence in _sequences(each))
        shared = sum(common_length(*pair) for pair in itertools.pairwise(sequences))
        tokens = sum(map(len, sequences))
        return cls(
            len(batch),
            len(sequences),
            tokens,
            tokens - shared,
            len(batch) * task.max_tokens if task.is_generated else 0,
            max(map(len, sequences)),
            sum(each.dropped_examples > 0 for each in batch),
            sum(each.cut_tokens > 0 for each in batch),
        )

    @classmethod
    def total(cls, batches: Sequence["_Work"]) -> "_Work":
        summed = [sum(column) for column in zip(*map(dataclasses.astuple, batches), strict=True)]
        return dataclasses.replace(cls(*summed), longest=max(each.longest for each in batches))


def _sequences(each: Prompted) -> list[tuple[int, ...]]:
    """The sequences that go through the model: of a continuation all but the last token."""
    if not each.pairs:
        return [each.context]
    return [(*context, *rest)[:-1] for context, rest in (*each.pairs, *each.unconditional)]


def _results(task: Task, model: TaskModel, batch: Sequence[Prompted]) -> Iterator[list[ItemResult]]:
    """The results of a batch: scored choices together, generated answers as they finish."""
    if task.is_generated:
        for number, text in model.complete([each.context for each in batch], task.max_tokens, task.stop):
            each = batch[number]
            found, scores = generated_scores(task.kind, each.item, text)
            yield [_result(each, scores, text=text, found=found)]
        return
    if task.kind == "last_word":
        if not isinstance(model, GreedyModel):
            raise NapkinError("this model does not tell which continuation it would write: use a LoadedModel")
        scored = model.score([pair for each in batch for pair in each.pairs])
        yield [
            _result(
                each,
                {"acc": float(found.greedy), "nats": -found.total},
                logprobs=(found.total,),
                tokens=(len(each.pairs[0][1]),),
            )
            for each, found in zip(batch, scored, strict=True)
        ]
        return
    pairs = [pair for each in batch for pair in (*each.pairs, *each.unconditional)]
    logprobs = iter(model.logprobs(pairs))
    results = []
    for each in batch:
        own = [next(logprobs) for _ in each.pairs]
        alone = [next(logprobs) for _ in each.unconditional] or None
        tokens = tuple(len(rest) for _, rest in each.pairs)
        scores = pair_scores(own) if task.kind == "pair" else choice_scores(each.item, own, tokens, alone)
        unconditional = None if alone is None else tuple(alone)
        results.append(_result(each, scores, logprobs=tuple(own), tokens=tokens, unconditional=unconditional))
    yield results


def _result(each: Prompted, scores: dict[str, float], **what: Any) -> ItemResult:
    item = each.item
    return ItemResult(
        item.name,
        item.section,
        item.group,
        scores,
        dropped_examples=each.dropped_examples,
        cut_tokens=each.cut_tokens,
        **what,
    )
