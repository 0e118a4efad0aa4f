from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin.model.feed_forward import Routing
from napkin.model.transformer import LanguageModel, Transformer, evaluation_mode
from napkin.optim.registry import build_optimizer
from oracles.model_switches import BASE, random_tokens


@dataclass(frozen=True)
class RecurrentConfig:
    vocab_size: int
    context_length: int
    d_model: int
    dropout: float = 0.0


class RecurrentModel(nn.Module):
    """A model that is not a Transformer and inherits from none of napkin's classes: a stack of GRUs."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(nn.GRU(config.d_model, config.d_model, batch_first=True) for _ in range(2))
        self.loss_chunk_size = 512
        self.run_block: Callable[..., Tensor] = lambda block, x: block(x)[0]

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        return x

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        logits = F.linear(self.hidden(tokens, documents), self.head_weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def routings(self) -> list[Routing]:
        return []


def losses_of_three_steps(model: LanguageModel) -> list[float]:
    """Trains by the protocol alone; the annotation is enforced when a type checker reads this file."""
    assert isinstance(model, nn.Module)
    optimizer = build_optimizer("muon", model)
    losses = []
    for _ in range(3):
        loss = model.loss(*(random_tokens(BASE, seed=seed) for seed in (0, 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with evaluation_mode(model), torch.no_grad():
        assert not model.training
        assert model.hidden(random_tokens(BASE)).shape == (2, 9, model.head_weight.shape[1])
    assert model.training
    return losses


def test_a_transformer_is_a_language_model() -> None:
    model = Transformer(BASE)
    assert isinstance(model, LanguageModel)
    first, _, last = losses_of_three_steps(model)
    assert last < first


def test_a_foreign_model_is_a_language_model() -> None:
    torch.manual_seed(0)
    model = RecurrentModel(RecurrentConfig(vocab_size=61, context_length=16, d_model=24))
    assert isinstance(model, LanguageModel)
    first, _, last = losses_of_three_steps(model)
    assert last < first


def test_a_module_without_a_loss_is_not_a_language_model() -> None:
    assert not isinstance(nn.Linear(2, 2), LanguageModel)
    model = Transformer(BASE)
    del model.blocks
    assert not isinstance(model, LanguageModel)
