"""The program whose gradient is checked: a model and its loss, in any arrangement of the same examples.

A program is a Python file, a module or an object with

    build()                                 the model
    loss(model, batch)                      the mean loss of a micro-batch; micro-batches are averaged
    loss(model, batch, tokens)              its part of a sum that is divided by all trained tokens; parts are added up
    gradients(model, examples, arrangement) instead of `loss`: the program's own loop, which leaves gradients in `model`
    examples()                              optional: what is trained on; by default random tokens
    collate(examples), pack(examples)       optional: a batch of them, padded, and packed into one row

A function that takes keyword arguments and returns transformers' `Trainer` is a program too (`checked_trainer`).
"""

import contextlib
import inspect
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from napkin.errors import NapkinError, first_line

IGNORED = -100
"""The label of a token that is not trained on, as in transformers and torch."""

Gradient = dict[str, Tensor]
"""A gradient by the names of parameters, in float64 on the CPU; without those that no loss reached."""


@dataclass(frozen=True)
class Arrangement:
    """The way in which examples are computed; `gradients` of a program is given one."""

    name: str
    order: tuple[int, ...]
    """Numbers of the examples of all ranks, in the order of the batch."""
    micro_batch_size: int
    packed: bool = False
    """True if several examples share a row."""
    packing: str = "packed"
    """The name of the packing method, of those that the program offers."""
    padding: int = 0
    """Positions of padding that are added to each row."""
    ranks: int = 1
    rank: int = 0
    seed: int = 0

    @property
    def micro_batches(self) -> list[tuple[int, ...]]:
        """The numbers of the examples of each micro-batch, of all ranks."""
        size = self.micro_batch_size
        return [self.order[begin : begin + size] for begin in range(0, len(self.order), size)]

    @property
    def own_micro_batches(self) -> list[tuple[int, ...]]:
        """The micro-batches of this rank: ranks take turns."""
        return self.micro_batches[self.rank :: self.ranks]

    def alone(self, numbers: Sequence[int]) -> "Arrangement":
        """The same arrangement for these examples only, in one micro-batch."""
        return replace(self, order=tuple(numbers), micro_batch_size=len(numbers))


class NotOffered(NapkinError):
    """An arrangement that a program does not have; says why."""


class Checked(ABC):
    """A program that computes gradients in arrangements of its examples."""

    examples: Sequence[Any]
    packings: tuple[str, ...] = ()
    """The ways of packing that are compared with padded rows."""
    can_pad = False
    """True if rows can be given more padding."""
    on_cuda = False

    @abstractmethod
    def gradient(
        self, arrangement: Arrangement, *, examples: Sequence[Any] | None = None, nudge: tuple[float, int] | None = None
    ) -> Gradient:
        """The gradient of examples in an arrangement; `examples` replace those of the program.

        `nudge` is a relative change of each weight, up or down by the seed beside it.
        """

    @abstractmethod
    def remove_dropout(self) -> list[str]:
        """Set all dropout of the model to 0 from now on, and return where it was, with its probability."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The weights at which all gradients are computed."""

    @abstractmethod
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take gradients at these weights from now on."""


class ModelAndLoss(Checked):
    """A program with `build` and `loss`, or `gradients`."""

    def __init__(self, program: Any, n_examples: int) -> None:
        self._program = program
        seed_all(0)
        self.model = called("build", program.build)
        if not isinstance(self.model, nn.Module):
            raise NapkinError(f"build() returns a {type(self.model).__name__}: return the torch module that is trained")
        self._state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.on_cuda = any(parameter.is_cuda for parameter in self.model.parameters())
        seed_all(0)
        given = getattr(program, "examples", None)
        found = called("examples", given) if callable(given) else given
        self.examples = spread_examples(found if found is not None else random_examples(self.model), n_examples)
        self._own_loop = getattr(program, "gradients", None)
        self.can_pad = self._own_loop is None and not hasattr(program, "collate")
        # A loop of one's own that does not pack says so by raising NotImplementedError.
        self.packings = ("packed",) if self._own_loop is not None or hasattr(program, "pack") else ()

    def gradient(
        self, arrangement: Arrangement, *, examples: Sequence[Any] | None = None, nudge: tuple[float, int] | None = None
    ) -> Gradient:
        model = self.model
        model.load_state_dict(self._state)
        model.zero_grad(set_to_none=True)
        if nudge is not None:
            nudge_weights(model, *nudge)
        seed_all(arrangement.seed)
        examples = self.examples if examples is None else examples
        own = [[examples[number] for number in each] for each in arrangement.own_micro_batches]
        if self._own_loop is not None:
            try:
                called("gradients", self._own_loop, model, [each for batch in own for each in batch], arrangement)
            except NotImplementedError:
                raise NotOffered(f"gradients() does not compute '{arrangement.name}'") from None
        else:
            self._accumulate(own, arrangement)
        return gradient_of(model)

    def _accumulate(self, micro_batches: Sequence[Sequence[Any]], arrangement: Arrangement) -> None:
        batches = [self._batch(each, arrangement) for each in micro_batches]
        loss = self._program.loss
        model: Any = self.model
        if arrangement.ranks > 1:
            model = nn.parallel.DistributedDataParallel(self.model)
        if len(_positional(loss)) < 3:
            for batch in batches:
                (called("loss", loss, model, batch) / len(batches)).backward()
            return
        tokens = torch.tensor(sum(trained_tokens(batch) for batch in batches))
        if arrangement.ranks > 1:
            torch.distributed.all_reduce(tokens)
        for batch in batches:
            # Gradients are averaged over ranks, and these are parts of a sum.
            (called("loss", loss, model, batch, int(tokens)) * arrangement.ranks).backward()

    def _batch(self, examples: Sequence[Any], arrangement: Arrangement) -> Any:
        if arrangement.packed:
            own = getattr(self._program, "pack", None)
            return called("pack", own, examples) if callable(own) else packed_batch(examples)
        own = getattr(self._program, "collate", None)
        return called("collate", own, examples) if own is not None else padded_batch(examples, more=arrangement.padding)

    def remove_dropout(self) -> list[str]:
        return remove_dropout(self.model)

    def weights(self) -> dict[str, Tensor]:
        return self._state

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._state = {**self._state, **weights}


def gradient_of(model: nn.Module) -> Gradient:
    """The gradient that a loop has left in the model."""
    gradients: Gradient = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole: Any = parameter.grad
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            gradients[name] = (whole.to_dense() if whole.is_sparse else whole).detach().cpu().double()
    return gradients


def nudge_weights(model: nn.Module, size: float, seed: int) -> None:
    """Change each weight by a relative `size`, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + size * signs.to(parameter.device, torch.float64)).to(parameter.dtype)


def remove_dropout(model: nn.Module) -> list[str]:
    """Set the probabilities of dropout of all parts of a model to 0; returns them as "path: p = 0.1"."""
    removed = []
    for path, module in model.named_modules():
        kinds = isinstance(module, nn.modules.dropout._DropoutNd)
        names = ["p"] if kinds else [name for name in vars(module) if "dropout" in name or name.endswith("pdrop")]
        for name in names:
            value = getattr(module, name)
            if isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                removed.append(f"{path or type(module).__name__}{'' if kinds else f'.{name}'}: p = {value:g}")
    return removed


def trained_tokens(batch: Any) -> int:
    """Tokens that a batch trains on; the first label of a row is never a target."""
    if not (isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor)):
        raise NapkinError(
            "loss(model, batch, tokens) is given the batch's trained tokens, which are counted by its 'labels', and it "
            "has none: let collate() return a dict with labels, or write loss(model, batch)"
        )
    return int((batch["labels"][..., 1:] != IGNORED).sum())


def length_of(example: Any) -> int | None:
    """Tokens of an example; None if unknown."""
    ids = example.get("input_ids") if isinstance(example, Mapping) else example
    try:
        return len(ids)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def spread_examples(examples: Any, n: int) -> list[Any]:
    """`n` of the first thousand examples, from the shortest to the longest: where lengths differ, weights by lengths
    show. Raises NapkinError where there are fewer."""
    return [examples[number] for number in spread_numbers(examples, n)]


def spread_numbers(examples: Any, n: int) -> list[int]:
    """The numbers of the examples of `spread_examples`."""
    total = len(examples)
    if total < n:
        raise NapkinError(f"there are {total} examples, and {n} are compared: give more, or use --examples")
    first = range(min(total, 1000))
    lengths = {number: length_of(examples[number]) for number in first}
    if None in lengths.values():
        return list(range(n))
    ordered = sorted(first, key=lambda number: (lengths[number], number))
    return [ordered[place * (len(ordered) - 1) // (n - 1)] for place in range(n)]


def random_examples(model: nn.Module) -> list[dict[str, list[int]]]:
    """Random tokens of different lengths, every other example with a part that is not trained on."""
    table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if table is None:
        raise NapkinError("the model has no torch.nn.Embedding that says how many tokens there are: define examples()")
    draw = random.Random(0)
    examples = []
    for number in range(64):
        ids = [draw.randrange(1, table.num_embeddings) for _ in range(4 + number // 3)]
        prompt = 0 if number % 2 else len(ids) // 3
        examples.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return examples


def padded_batch(examples: Sequence[Mapping[str, Any]], *, more: int = 0) -> dict[str, Tensor]:
    """Examples in rows of one length: input_ids, labels, attention_mask."""
    length = max(len(example["input_ids"]) for example in examples) + more
    batch = {name: torch.full((len(examples), length), value) for name, value in _PADDING.items()}
    for row, example in enumerate(examples):
        ids = torch.as_tensor(example["input_ids"])
        batch["input_ids"][row, : len(ids)] = ids
        batch["labels"][row, : len(ids)] = torch.as_tensor(example.get("labels", example["input_ids"]))
        batch["attention_mask"][row, : len(ids)] = 1
    return batch


_PADDING = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}


def packed_batch(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Examples in one row, one after the other: input_ids, labels, and position_ids that begin at 0 with each."""
    ids = [torch.as_tensor(example["input_ids"]) for example in examples]
    labels = [torch.as_tensor(example.get("labels", example["input_ids"])).clone() for example in examples]
    for each in labels:
        # Otherwise the last token of the example before would be trained to predict it.
        each[0] = IGNORED
    positions = [torch.arange(len(each)) for each in ids]
    rows = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.cat(parts)[None] for name, parts in rows.items()}


def _positional(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]


def called(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function of the program; what it raises becomes a NapkinError of one line."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    with said_by(f"{name}() fails", None if code is None else Path(code.co_filename)):
        return function(*arguments, **named)


@contextlib.contextmanager
def said_by(what: str, file: Path | None) -> Iterator[None]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (NapkinError, NotImplementedError):
        raise
    except (Exception, SystemExit) as error:
        line, trace = "", error.__traceback__
        while trace is not None:
            if file is not None and os.path.basename(trace.tb_frame.f_code.co_filename) == file.name:
                line = f" at {file.name}:{trace.tb_lineno}"
            trace = trace.tb_next
        raise NapkinError(f"{what}{line} ({type(error).__name__}: {first_line(error)}): correct it") from error


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed)
