from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin import Ledger, count
from napkin.machine_code.processor import has_native_bf16
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.optim.adam import AdamW
from napkin.optim.clipping import clip_gradients
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.tiny_models import LossOf
from oracles.torch_models import GPT2, Llama

PRECISIONS = ("fp32", "bf16 autocast", "bf16")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW for-loop": partial(torch.optim.AdamW, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "napkin AdamW": AdamW,
}
# (checkpointing, micro-batches)
FORMS = ((False, 1), (True, 1), (False, 2))
# Each precision with each optimizer in each form, once; the rest of a configuration is drawn.
GRID = tuple(product(PRECISIONS, OPTIMIZERS, FORMS))
# Of that grid, every second cell as on a chessboard: each precision, optimizer and form still meets each of the others.
PLACES = tuple(product(range(len(PRECISIONS)), range(len(OPTIMIZERS)), range(len(FORMS))))
QUICK = tuple(seed for seed, place in enumerate(PLACES) if sum(place) % 2 == 0)
LONG = (*(seed for seed in range(len(GRID)) if seed not in QUICK), *range(1000, 1226))


@dataclass(frozen=True)
class Configuration:
    model: str
    precision: str
    optimizer: str
    batch_size: int
    micro_batches: int
    length: int
    vocab_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    checkpointing: bool
    tied: bool
    clipped: bool
    gradients_zeroed: bool

    @classmethod
    def drawn(cls, seed: int) -> "Configuration":
        random = Random(seed)
        precision, optimizer, (checkpointing, micro_batches) = GRID[seed % len(GRID)]
        n_kv_heads = random.choice([1, 2, 4])
        return cls(
            model=random.choice(["GPT-2", "Llama", "napkin"]),
            precision=precision,
            optimizer=optimizer,
            batch_size=random.choice([4, 8]),
            micro_batches=micro_batches,
            length=random.choice([64, 96, 128]),
            vocab_size=random.choice([4000, 6000]),
            n_layers=random.choice([1, 1, 1, 1, 2]),
            n_heads=n_kv_heads * random.choice([2, 4]) if n_kv_heads < 4 else 4,
            n_kv_heads=n_kv_heads,
            head_dim=64,
            checkpointing=checkpointing or (micro_batches > 1 and random.random() < 0.5),
            tied=random.random() < 0.5,
            clipped=random.random() < 0.3,
            gradients_zeroed=random.random() < 0.2,
        )


class Training:
    """A configuration's module, optimizer, batch and step; on fake tensors or on real ones."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = c = configuration
        torch.set_default_dtype(torch.bfloat16 if c.precision == "bf16" else torch.float32)
        self.module = _model(c)
        torch.set_default_dtype(torch.float32)
        self.optimizer = OPTIMIZERS[c.optimizer](self.module.parameters())
        tokens = torch.zeros(c.batch_size, c.length, dtype=torch.int64)
        self.batch = (tokens, tokens.clone())

    def step(self, module: nn.Module, batch: tuple[Tensor, ...]) -> None:
        c = self.configuration
        for inputs in zip(*(tensor.chunk(c.micro_batches) for tensor in batch), strict=True):
            mixed = torch.autocast("cpu", torch.bfloat16) if c.precision == "bf16 autocast" else nullcontext()
            with mixed:
                loss = module(*inputs)
            (loss / c.micro_batches).backward()
        if c.clipped:
            clip_gradients(module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not c.gradients_zeroed)

    def tensors(self) -> list[Tensor]:
        """What stays from step to step."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        moments = [value for value in state if isinstance(value, Tensor)]
        return [*self.module.parameters(), *self.module.buffers(), *self.batch, *gradients, *moments]


# Scratch grows with the threads.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(every=28)
@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.torture) for seed in LONG)])
def test_peak_and_resident_bytes_are_the_allocators(seed: int):
    configuration = Configuration.drawn(seed)
    if configuration.precision != "fp32" and not has_native_bf16():
        # Emulated products take forty times as long.
        configuration = replace(configuration, batch_size=2, length=configuration.length // 2)
    counted = _count(configuration)
    assert sum(counted.peak_by_category.values()) == counted.peak_bytes
    assert not counted.unknown_operators

    training = Training(configuration)
    training.step(training.module, training.batch)
    resident = storage_bytes(training.tensors())
    assert counted.resident_bytes == pytest.approx(resident, abs=16)

    _, growth = growth_at_peak(lambda: training.step(training.module, training.batch))
    assert counted.peak_bytes == pytest.approx(resident + growth, rel=1e-3)
    assert not counted.unknown_scratch


def _count(configuration: Configuration) -> Ledger:
    with FakeTensorMode():
        training = Training(configuration)
        return count(training.module, training.batch, training.step)


def _model(c: Configuration) -> nn.Module:
    d_model = c.n_heads * c.head_dim
    if c.model == "GPT-2":
        return GPT2(c.vocab_size, c.length, c.n_layers, d_model, c.n_heads, checkpointing=c.checkpointing)
    if c.model == "Llama":
        sizes = (c.vocab_size, c.length, c.n_layers, d_model, c.n_heads, c.n_kv_heads, 2 * d_model)
        return Llama(*sizes, checkpointing=c.checkpointing)
    config = ModelConfig(
        vocab_size=c.vocab_size,
        context_length=c.length,
        d_model=d_model,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        tie_embeddings=c.tied,
    )
    return LossOf(Transformer(config))


@pytest.mark.torture
@pytest.mark.parametrize("model", [GPT2, Llama])
def test_peak_bytes_of_a_whole_124m_model_are_the_allocators(model: Callable[[], nn.Module]):
    tokens = torch.zeros(1, 1024, dtype=torch.int64)
    batch = (tokens, tokens.clone())
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> None:
        module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    resident = storage_bytes([*module.parameters(), *module.buffers(), *moments, *batch])
    counted = count(module, batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert counted.resident_bytes == resident
    assert counted.peak_bytes == pytest.approx(resident + growth_at_peak(step)[0], rel=1e-6)
