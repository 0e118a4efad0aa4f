import dataclasses
import math

import pytest
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.feed_forward import CapacityExperts, DroplessExperts, MixtureOfExperts, SwiGLU
from napkin.model.layers import LinearFactory
from napkin.model.transformer import Transformer
from oracles.model_switches import random_tokens

MIXTURE = ModelConfig(
    vocab_size=61, context_length=16, d_model=24, n_layers=3, n_heads=4, n_experts=4, n_dense_layers=1
)


def factory() -> LinearFactory:
    return LinearFactory(generator=torch.Generator().manual_seed(0))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_experts_with_room_for_all_equal_those_that_drop_none() -> None:
    x, upstream = normal(30, 8), normal(30, 8, seed=1)
    results = []
    for experts in (
        DroplessExperts(SwiGLU, 4, 8, 12, factory()),
        CapacityExperts(SwiGLU, 4, 8, 12, factory(), capacity=4.0),
    ):
        mixture = MixtureOfExperts(8, experts, experts_per_token=2, linears=factory())
        out = mixture(x)
        results.append((out, *torch.autograd.grad(out, list(mixture.parameters()), upstream)))
        assert mixture.take_routing().dropped == 0
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_a_full_expert_drops_the_last_and_second_choices_first() -> None:
    experts = CapacityExperts(SwiGLU, 2, 8, 12, factory(), capacity=0.5)
    x = normal(4, 8)
    # Four first choices of expert 0, then four second choices of expert 1; each has room for half of an even share.
    chosen = torch.tensor([[0, 1]] * 4)
    made, dropped = experts(x, chosen, torch.tensor([4, 4]))
    assert dropped == 4
    assert (made.abs().sum(-1) > 0).view(4, 2).tolist() == [[True, True]] * 2 + [[False, False]] * 2


def test_routers_report_tokens_per_expert_and_dropped_ones() -> None:
    tokens = random_tokens(MIXTURE, 3, 16)
    for capacity in (None, 0.5):
        model = Transformer(dataclasses.replace(MIXTURE, expert_capacity=capacity))
        model(tokens)
        routings = model.routings()
        assert len(routings) == 2
        for routing in routings:
            assert routing.tokens_per_expert.sum() == 3 * 16 * 2
            room = 10**9 if capacity is None else math.ceil(capacity * 96 / 4)
            assert routing.dropped == (routing.tokens_per_expert - room).clamp(min=0).sum()
            assert not routing.balance_loss.requires_grad


def test_without_a_forward_pass_there_is_nothing_to_report() -> None:
    with pytest.raises(NapkinError, match=r"nothing.*routed"):
        Transformer(MIXTURE).routings()
    assert Transformer(dataclasses.replace(MIXTURE, n_experts=0, n_dense_layers=0)).routings() == []


def test_the_balance_loss_is_1_where_all_is_even_and_n_where_one_expert_has_all() -> None:
    mixture = MixtureOfExperts(8, DroplessExperts(SwiGLU, 4, 8, 12, factory()), experts_per_token=1)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture(normal(32, 8))
        even = mixture.take_routing()
        mixture.router.weight[2] = 1000.0
        mixture(normal(32, 8).abs())
        one_sided = mixture.take_routing()
    assert even.balance_loss.item() == pytest.approx(1)
    assert even.z_loss.item() == pytest.approx(math.log(4) ** 2)
    assert one_sided.balance_loss.item() == pytest.approx(4)
    assert one_sided.tokens_per_expert.tolist() == [0, 0, 32, 0]


def test_in_evaluation_the_loss_is_cross_entropy_alone() -> None:
    config = dataclasses.replace(MIXTURE, z_weight=0.1)
    model, tokens = Transformer(config), random_tokens(config, 3, 16)
    training = model.loss(tokens, tokens)
    plain = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(model.eval().loss(tokens, tokens), plain)
    logsumexp = model(tokens).logsumexp(-1)
    routings = model.routings()
    added = sum(0.01 * r.balance_loss + 0.001 * r.z_loss for r in routings) / 2 + 0.1 * logsumexp.square().mean()
    torch.testing.assert_close(training, plain + added)


def test_a_used_model_can_be_copied() -> None:
    import copy

    model, tokens = Transformer(MIXTURE), random_tokens(MIXTURE)
    model(tokens)
    again = copy.deepcopy(model)
    assert torch.equal(again(tokens), model(tokens))


def test_an_experts_capacity_is_rounded_up() -> None:
    experts = CapacityExperts(SwiGLU, 2, 8, 12, factory(), capacity=1.0)
    chosen = torch.zeros(5, 1, dtype=torch.int64)
    outputs, dropped = experts(torch.randn(5, 8), chosen, torch.tensor([5, 0]))
    # Half of 5 assignments are 2.5: there is room for 3.
    assert dropped == 2
    assert [bool(row.any()) for row in outputs] == [True, True, True, False, False]
