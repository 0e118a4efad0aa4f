"""Every switch of the model through `napkin count`."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from napkin import count
from napkin.model.transformer import Transformer
from napkin.optim.adam import AdamW
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.brute_force_flops import ScalarProducts
from oracles.model_switches import SWITCHES, config_of, random_tokens
from oracles.tiny_models import LossOf

EVERY_SWITCH = pytest.mark.parametrize("switch", SWITCHES)

# The oracle sees no products inside napkin's own operator; test_components counts attention in each implementation.
SPELLED_OUT = [switch for switch in SWITCHES if switch not in ("attention_flash", "attention_compiled")]


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss_and_gradients(module: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor | None]:
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)
    loss = module(*batch)
    torch.autograd.backward(loss)
    return [loss.detach(), *(parameter.grad for parameter in parameters)]


@pytest.mark.sampled(every=28)
@pytest.mark.parametrize("switch", SPELLED_OUT)
@pytest.mark.usefixtures("_float64")
def test_flops_equal_the_multiplications_and_additions_done_one_by_one(switch: str) -> None:
    # One layer: the oracle multiplies numbers in Python. Without a dense layer before it the experts are the layer.
    config = config_of(switch, n_layers=1, n_dense_layers=0, d_ff=12, vocab_size=7)
    module = LossOf(Transformer(config))
    batch = random_tokens(config, 1, 5), random_tokens(config, 1, 5, seed=1)
    results = loss_and_gradients(module, batch)
    ledger = count(module, batch)
    assert not ledger.unknown_operators
    assert ledger.parameters == sum(parameter.numel() for parameter in module.parameters())
    with ScalarProducts() as oracle:
        torch.testing.assert_close(loss_and_gradients(module, batch), results)
    assert ledger.flops == oracle.flops


@pytest.mark.sampled(every=30)
@EVERY_SWITCH
def test_peak_bytes_are_the_allocators(switch: str) -> None:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Large enough for activations to be the most of it.
        config = config_of(switch, n_layers=1, n_dense_layers=0, d_model=96, head_dim=None, d_ff=96, context_length=64)
        module = LossOf(Transformer(config))
        optimizer = AdamW(module.parameters())
        batch = random_tokens(config, 4, 64), random_tokens(config, 4, 64, seed=1)

        def step() -> None:
            module(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        kept = [t for r in module.model.routings() for t in vars(r).values()]
        resident = storage_bytes([*module.parameters(), *module.buffers(), *state, *batch, *kept])
        counted = count(LossOf(Transformer(config)), batch, optimizer=AdamW)
        growth, _ = growth_at_peak(step)
        assert counted.peak_bytes == pytest.approx(resident + growth, rel=1e-3)
    finally:
        torch.set_num_threads(n_threads)
