"""Programs to check: a small transformer and its loss, right, and with the mistakes that trainers have had."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from napkin.hooks.checked_program import padded_batch

VOCABULARY = 31


class SmallTransformer(nn.Module):
    """Two causal blocks with learned positions, which heed masks and position ids unless told otherwise."""

    def __init__(
        self, *, dropout: float = 0.0, resets_attention: bool = True, resets_positions: bool = True, masks: bool = True
    ) -> None:
        super().__init__()
        self.resets_attention, self.resets_positions, self.masks = resets_attention, resets_positions, masks
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Embedding(256, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        length = ids.shape[1]
        straight = torch.arange(length).expand_as(ids)
        position = batch.get("position_ids", straight)
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if "attention_mask" in batch and self.masks:
            seen = seen & (batch["attention_mask"][:, None] > 0) | torch.eye(length, dtype=torch.bool)
        elif not self.masks:
            # What comes after is seen, padding with it.
            seen = torch.ones_like(seen)
        if self.resets_attention:
            document = (position == 0).cumsum(1)
            seen = seen & (document[:, :, None] == document[:, None])
        x = self.tokens(ids) + self.positions(position if self.resets_positions else straight)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).chunk(3, dim=-1)
            scores = (q @ k.transpose(1, 2) / math.sqrt(16)).masked_fill(~seen, -torch.inf)
            x = x + scores.softmax(-1) @ v
            x = x + mlp(x)
        return self.head(x)


def terms(model: nn.Module, batch: dict[str, Tensor], **how: Any) -> Tensor:
    """-log p of each target; 0 where it is not trained on."""
    logits = model(batch)[:, :-1]
    return functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none", **how)


class Right:
    """Divides by the trained tokens of the whole batch."""

    settings: ClassVar[dict[str, Any]] = {}

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return SmallTransformer(**self.settings)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], tokens: int) -> Tensor:
        return terms(model, batch).sum() / tokens

    pack = True


class MeanOfMeans:
    """The loss of transformers before 4.46: each micro-batch by its own mean."""

    build = Right.build
    settings: ClassVar[dict[str, Any]] = {}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return terms(model, batch).sum() / (batch["labels"][:, 1:] != -100).sum()


class Dropout(Right):
    """Dropout is left on."""

    settings: ClassVar[dict[str, Any]] = {"dropout": 0.1}


class LeakedAttention(Right):
    """Documents of a row see those before them."""

    settings: ClassVar[dict[str, Any]] = {"resets_attention": False}


class LeakedPositions(Right):
    """Positions go on through a row."""

    settings: ClassVar[dict[str, Any]] = {"resets_positions": False}


class SeenPadding(Right):
    """Attention is not masked."""

    settings: ClassVar[dict[str, Any]] = {"masks": False, "resets_attention": False}
    pack = property()  # pyright: ignore[reportAssignmentType]


class BoundaryTargets(Right):
    """The last token of a document is trained to predict the first of the next."""

    def pack(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        rows = {
            "input_ids": [torch.tensor(each["input_ids"]) for each in examples],
            "labels": [torch.tensor(each["labels"]) for each in examples],
            "position_ids": [torch.arange(len(each["input_ids"])) for each in examples],
        }
        return {name: torch.cat(parts)[None] for name, parts in rows.items()}


class CountedPadding(MeanOfMeans):
    """The mean goes over all positions."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return terms(model, batch).mean()


class OwnLoop:
    """A loop of one's own, with its ways to divide a sum of losses; `ranks` and `parts` are their numbers."""

    build = Right.build
    settings: ClassVar[dict[str, Any]] = {}

    def divisor(self, own: int, of_rank: int, of_all: int, ranks: int, parts: int) -> float:
        """What the sum of a micro-batch is divided by before gradients are added up and averaged over ranks."""
        return of_all / ranks

    def gradients(self, model: nn.Module, examples: Sequence[Any], arrangement: Any) -> None:
        if arrangement.packed:
            raise NotImplementedError
        size = arrangement.micro_batch_size
        batches = [padded_batch(examples[begin : begin + size]) for begin in range(0, len(examples), size)]
        counts = [int((each["labels"][:, 1:] != -100).sum()) for each in batches]
        everything = torch.tensor(sum(counts))
        if arrangement.ranks > 1:
            dist.all_reduce(everything)
        for batch, own in zip(batches, counts, strict=True):
            divisor = self.divisor(own, sum(counts), int(everything), arrangement.ranks, len(batches))
            (terms(model, batch).sum() / divisor).backward()
        if arrangement.ranks > 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= arrangement.ranks


class PerRank(OwnLoop):
    """Each rank divides by its own tokens."""

    def divisor(self, own: int, of_rank: int, of_all: int, ranks: int, parts: int) -> float:
        return of_rank


class Added(OwnLoop):
    """Micro-batches are means, and added up."""

    def divisor(self, own: int, of_rank: int, of_all: int, ranks: int, parts: int) -> float:
        return own


class DividedTwice(OwnLoop):
    """Divided by the tokens of the batch, and by the number of micro-batches."""

    def divisor(self, own: int, of_rank: int, of_all: int, ranks: int, parts: int) -> float:
        return of_all / ranks * parts


class ForgottenRanks(OwnLoop):
    """A sum over ranks is wanted, and their gradients are averaged."""

    def divisor(self, own: int, of_rank: int, of_all: int, ranks: int, parts: int) -> float:
        return of_all
