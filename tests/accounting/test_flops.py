from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from napkin import count
from oracles.brute_force_flops import ScalarProducts
from oracles.tiny_models import (
    Case,
    attention,
    convolutions,
    deep_linear,
    encoder,
    language_model,
    linear_stack,
    napkin_transformer,
    own_function,
    products,
)

# Random configurations a family: 109 in all.
CONFIGURATIONS = {
    linear_stack: 20,
    deep_linear: 20,
    products: 25,
    convolutions: 20,
    attention: 12,
    encoder: 4,
    language_model: 4,
    napkin_transformer: 4,
}


@pytest.fixture(autouse=True)
def _exact_numbers() -> Iterator[None]:
    # Stopped early, checkpointing leaves out what follows the last product whose inputs are wanted; which one that is
    # depends on who does the products.
    torch.set_default_dtype(torch.float64)
    with set_checkpoint_early_stop(False):
        yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(
    ("family", "seeds"),
    [(family, range(size)) for family, size in CONFIGURATIONS.items()]
    + [pytest.param(family, range(1000, 1100), marks=pytest.mark.torture) for family in CONFIGURATIONS],
)
def test_flops_equal_the_multiplications_and_additions_done_one_by_one(family: Callable[[Random], Case], seeds: range):
    for seed in seeds:
        _compare_flops_with_those_done_one_by_one(family, seed)


def _compare_flops_with_those_done_one_by_one(family: Callable[[Random], Case], seed: int) -> None:
    torch.manual_seed(seed)
    module, batch = family(Random(seed))
    results = _loss_and_gradients(module, batch)

    ledger = count(module, batch)
    assert not ledger.unknown_operators, seed

    # Only flash attention skips what is masked and computes scores again.
    flash = any("flash" in row.operator for row in ledger.rows)
    plain, again, causal = ScalarProducts(), ScalarProducts(recompute_scores=flash), ScalarProducts(skip_masked=flash)
    for oracle in (plain, again, causal):
        with oracle:
            torch.testing.assert_close(_loss_and_gradients(module, batch), results)

    recomputed = [row for row in ledger.rows if row.phase == "recompute"]
    assert ledger.flops + sum(row.flops for row in recomputed) == plain.flops, seed
    assert ledger.causal_flops + sum(row.causal_flops for row in recomputed) == causal.flops, seed
    assert ledger.hardware_flops == again.flops, seed

    with ScalarProducts() as forward:
        module(*batch)
    # A fused loss computes a part of the backward pass in its forward pass.
    early = sum(row.flops for row in ledger.rows if row.early)
    assert ledger.forward_flops + early == forward.flops, seed


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("family", [*CONFIGURATIONS, own_function])
@pytest.mark.parametrize("seed", range(100, 103))
def test_flops_of_matrix_products_equal_torchs_own_count(family: Callable[[Random], Case], seed: int):
    torch.manual_seed(seed)
    module, batch = family(Random(seed))
    # torch's counter finds no FLOPs in the CPU's flash attention, addmm_, mv and dot, and too many in grouped
    # convolutions.
    with sdpa_kernel(SDPBackend.MATH):
        ledger = count(module, batch)
        with FlopCounterMode(display=False) as counter:
            _loss_and_gradients(module, batch)
    by_torch = {packet.__name__: flops for packet, flops in counter.get_flop_counts().get("Global", {}).items()}
    by_operator: Counter[str] = Counter()
    for row in ledger.rows:
        by_operator[row.operator] += row.flops
    for operator in ("mm", "addmm", "bmm", "baddbmm"):
        assert by_operator[operator] == by_torch.get(operator, 0)


def _loss_and_gradients(module: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor | None]:
    wanted = [tensor for tensor in (*module.parameters(), *batch) if tensor.requires_grad]
    for tensor in wanted:
        tensor.grad = None
    loss = module(*batch)
    # Tensor.backward would hide the backward pass from the oracle: a mode is off inside the methods that it sees.
    torch.autograd.backward(loss)
    return [loss.detach(), *(tensor.grad for tensor in wanted)]
