"""The prompts of a task: with examples, as text or as a conversation, and as token ids.

Rules for what does not fit the context: examples are dropped, the first one first; then the prompt loses its oldest
tokens. Both are counted. A continuation that alone exceeds the context is refused.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from napkin.errors import NapkinError
from napkin.evaluation.tasks.published import Item, Task


@runtime_checkable
class PromptModel(Protocol):
    """A model's tokenizer and chat template, as tasks use them."""

    @property
    def context_length(self) -> int: ...

    @property
    def start_ids(self) -> Sequence[int]:
        """The ids before every text."""
        ...

    @property
    def document_ids(self) -> Sequence[int]:
        """The ids that a text without a prompt follows: the start ids, or a separator of documents; empty if there is
        none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the tokens that precede every text."""
        ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a conversation of (role, content), up to where the answer begins."""
        ...


@dataclass(frozen=True)
class Prompting:
    """The settings by which a task is put to a model."""

    shots: int = 0
    """Examples before each question."""
    seed: int | None = None
    """Examples are drawn with it from the dev items; None takes the first ones."""
    chat: bool = False
    """True for conversations in the model's chat template."""
    unconditional: bool = False
    """True if choices are scored without their question too."""


Pairs = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(context, continuation) of several continuations, as ids."""


@dataclass(frozen=True)
class Prompted:
    """An item as token ids."""

    item: Item
    context: tuple[int, ...]
    """The prompt of a generated answer; of choices it is part of `pairs`."""
    pairs: Pairs = ()
    """(context, continuation) of each choice."""
    unconditional: Pairs = ()
    dropped_examples: int = 0
    cut_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        """Length of the longest sequence that the model reads."""
        return max([len(self.context), *(len(context) + len(rest) - 1 for context, rest in self.pairs)])


def examples_of(task: Task, section: str, prompting: Prompting) -> list[Item]:
    """The examples of a section: of its dev items where there are any, else of all.

    They depend on the dev file and the seed alone, so that all items of a section share them. Raises NapkinError where
    there are too few.
    """
    if not prompting.shots:
        return []
    own = [item for item in task.dev if item.section == section] or list(task.dev)
    if len(own) < prompting.shots:
        raise NapkinError(
            f"{prompting.shots} examples are asked for, the dev split has {len(own)}"
            f"{f' for {section}' if section else ''}: name a larger one with --dev, or use fewer --shots"
        )
    if prompting.seed is None:
        return own[: prompting.shots]
    return random.Random(f"{prompting.seed}/{section}").sample(own, prompting.shots)


def prompted(task: Task, item: Item, model: PromptModel, prompting: Prompting, examples: Sequence[Item]) -> Prompted:
    """An item as the model reads it. Raises NapkinError for one that cannot fit, even without examples."""
    limit = model.context_length
    # An item is not its own example, wherever the dev items come from.
    shown = [each for each in examples if (each.prompt, each.choices) != (item.prompt, item.choices)]
    if task.is_generated:
        limit -= task.max_tokens
        if limit < 1:
            raise NapkinError(
                f"an answer of up to {task.max_tokens} tokens leaves no room for a prompt in a context of "
                f"{model.context_length}: use a smaller --answer-tokens"
            )
    dropped, found = 0, _encoded(task, item, model, prompting, shown, 0)
    while found.n_tokens > limit and dropped < len(shown):
        dropped += 1
        found = _encoded(task, item, model, prompting, shown[dropped:], dropped)
    if found.n_tokens <= limit:
        return found
    for number, (_, continuation) in enumerate(found.pairs, 1):
        if len(continuation) > limit:
            raise NapkinError(
                f"item {item.name}: choice {number} has {len(continuation)} tokens, the model's context is {limit}: "
                "leave it out with --skip-bad, or use a model with a longer context"
            )
    cut = found.n_tokens - limit
    # Scoring leaves out the oldest tokens of a pair by itself.
    context = found.context if found.pairs else found.context[cut:]
    return Prompted(item, context, found.pairs, found.unconditional, found.dropped_examples, cut)


def _encoded(
    task: Task, item: Item, model: PromptModel, prompting: Prompting, examples: Sequence[Item], dropped: int
) -> Prompted:
    if task.kind == "pair":
        start = tuple(model.document_ids)
        return Prompted(item, (), _divided(model, start, "", item.choices))
    if prompting.chat:
        context = tuple(model.encode_chat(messages_of(task, item, examples)))
        rest = (item.answer,) if task.kind == "last_word" else item.choices
        pairs = tuple((context, tuple(model.encode(each))) for each in rest)
    else:
        text, start = prompt_text(task, item, examples), tuple(model.start_ids)
        context = (
            ()
            if item.choices or task.kind == "last_word"
            else (*start, *model.encode(text)) or tuple(model.document_ids)
        )
        rest = (item.answer,) if task.kind == "last_word" else item.choices
        continuations = [task.delimiter + each for each in rest]
        pairs = _divided(model, start, text, continuations) if continuations else ()
    alone: Pairs = ()
    if prompting.unconditional and item.choices:
        delimiter = "" if prompting.chat else task.delimiter
        continuations = [delimiter + choice for choice in item.choices]
        alone = _divided(model, tuple(model.start_ids), task.answer_context, continuations)
    return Prompted(item, context, pairs, alone, dropped)


def prompt_text(task: Task, item: Item, examples: Sequence[Item]) -> str:
    """Description, examples and the item's prompt."""
    shown = [f"{each.prompt}{task.delimiter}{each.shown}{task.separator}" for each in examples]
    return _description(task, item) + "".join(shown) + item.prompt


def messages_of(task: Task, item: Item, examples: Sequence[Item]) -> list[tuple[str, str]]:
    """The prompt as a conversation, in which the model has answered the examples."""
    messages: list[tuple[str, str]] = []
    for each in examples:
        messages += [("user", each.prompt), ("assistant", each.shown)]
    messages.append(("user", item.prompt))
    role, first = messages[0]
    messages[0] = (role, _description(task, item) + first)
    return messages


def _description(task: Task, item: Item) -> str:
    return task.description.replace("{section}", item.section.replace("_", " "))


def _divided(model: PromptModel, start: tuple[int, ...], text: str, continuations: Sequence[str]) -> Pairs:
    """For each continuation, context and continuation as ids: those of the whole text, divided where the context ends.

    Spaces at the end of a context belong to the continuation, as in text that tokenizers were trained on. Where a token
    spans the boundary, both parts are encoded alone: every byte of the continuation is predicted, and no other.
    """
    bare = text.rstrip()
    context = model.encode(bare)
    before = (*start, *context) or tuple(model.document_ids)
    if not before:
        raise NapkinError(
            "the model has no token that stands before a text, so the first token of one has no probability: "
            "use a model with one (bos_token with add_bos_token, or eos_token_id)"
        )
    pairs = []
    for continuation in continuations:
        rest = text[len(bare) :] + continuation
        whole = model.encode(bare + rest)
        ids = whole[len(context) :] if whole[: len(context)] == context else model.encode(rest)
        pairs.append((before, tuple(ids)))
    return tuple(pairs)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
