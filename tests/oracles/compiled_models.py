"""Thirteen models and steps under torch.compile, small enough to be compiled for real on a CPU within a test."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.torch_models import GPT2, Llama

TOKENS = (4, 128)
"""Rows and length of a batch."""


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    """Makes the module, compiled in all or in part."""
    batch: Callable[[], tuple[Tensor, ...]]
    autocast: bool = False
    micro_batches: int = 1
    compiled_update: bool = False

    def training(self) -> "Training":
        return Training(self)


class Training:
    """A module with its optimizer and batch; `step` trains once."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.module, self.batch = case, case.build(), case.batch()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), foreach=True)
        self.update = torch.compile(self.optimizer.step) if case.compiled_update else self.optimizer.step

    def step(self, module: nn.Module, batch: Any) -> None:
        for _ in range(self.case.micro_batches):
            with torch.autocast("cpu", torch.bfloat16) if self.case.autocast else nullcontext():
                loss = module(*batch)
            loss.backward()
        self.update()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """All that stays from step to step."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.module.parameters(), *self.module.buffers(), *self.batch, *moments]


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 100, TOKENS), torch.randint(0, 100, TOKENS)


def vectors() -> tuple[Tensor]:
    return (torch.randn(256, 64),)


def images() -> tuple[Tensor]:
    return (torch.randn(8, 3, 32, 32),)


class Layers(nn.Module):
    """Linear layers with an activation and a norm between them."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.widen, self.norm, self.narrow = nn.Linear(64, 512), norm(512), nn.Linear(512, 64)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.norm(self.activation(self.widen(x)))).square().mean()


class OneLayer(nn.Module):
    """A linear layer and an activation: one kernel in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.widen(x)).sum()


class Broken(Layers):
    """A graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.widen(x))
        torch._dynamo.graph_break()
        return self.narrow(self.norm(x).relu()).square().mean()


class Images(nn.Module):
    """Convolutions with batch norms, whose running statistics a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(32)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip((self.first, self.second), self.norms, strict=True):
            x = F.silu(norm(convolution(x)))
        return self.head(x.mean((2, 3))).logsumexp(-1).mean()


class Encoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True) for _ in range(2))
        self.embedding, self.layers = nn.Embedding(100, 64), nn.Sequential(*layers)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            (self.layers(self.embedding(ids)) @ self.embedding.weight.T).flatten(0, 1), targets.flatten()
        )


class Mixture(nn.Module):
    """Experts that all see all tokens, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 64, 256) / 8), nn.Parameter(torch.randn(4, 256, 64) / 16)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        mixed = torch.einsum(
            "net,te->nt",
            torch.einsum("etn,enm->etm", (F.silu(torch.einsum("tn,enm->etm", x, self.up))), self.down)
            .permute(2, 0, 1)
            .permute(0, 1, 2),
            weights,
        )
        return mixed.square().mean()


def _gpt2() -> nn.Module:
    return GPT2(100, TOKENS[1], 2, 64, 4)


def _llama(checkpointing: bool = False) -> nn.Module:
    return Llama(100, TOKENS[1], 2, 64, 4, 2, 128, checkpointing=checkpointing)


def _by_blocks() -> nn.Module:
    """A model whose blocks alone are compiled, each in place."""
    module = _gpt2()
    for block in module.blocks:  # pyright: ignore
        block.compile()
    return module


CASES: dict[str, Case] = {
    "one layer": Case(lambda: torch.compile(OneLayer()), vectors),  # pyright: ignore[reportArgumentType]
    "layers": Case(lambda: torch.compile(Layers()), vectors),  # pyright: ignore[reportArgumentType]
    "GPT-2": Case(lambda: torch.compile(_gpt2()), tokens),  # pyright: ignore[reportArgumentType]
    "graph break": Case(lambda: torch.compile(Broken()), vectors),  # pyright: ignore[reportArgumentType]
    "batch norms": Case(lambda: torch.compile(Images()), images),  # pyright: ignore[reportArgumentType]
    "Llama": Case(lambda: torch.compile(_llama()), tokens),  # pyright: ignore[reportArgumentType]
    "Llama, bf16": Case(lambda: torch.compile(_llama()), tokens, autocast=True),  # pyright: ignore[reportArgumentType]
    "Llama, checkpointed": Case(lambda: torch.compile(_llama(True)), tokens),  # pyright: ignore[reportArgumentType]
    "blocks in place": Case(_by_blocks, tokens),
    "encoder": Case(lambda: torch.compile(Encoder()), tokens),  # pyright: ignore[reportArgumentType]
    "encoder, dropout": Case(lambda: torch.compile(Encoder(0.1)), tokens),  # pyright: ignore[reportArgumentType]
    "mixture": Case(lambda: torch.compile(Mixture()), vectors),  # pyright: ignore[reportArgumentType]
    "micro-batches, compiled update": Case(
        lambda: torch.compile(Layers(partial(F.leaky_relu, negative_slope=0.2), nn.RMSNorm)),  # pyright: ignore
        vectors,
        micro_batches=2,
        compiled_update=True,
    ),
}
