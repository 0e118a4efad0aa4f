import torch

from napkin.optim.adam import AdamW
from napkin.optim.narrow_copies import StochasticRounding


def rounded(value: torch.Tensor, step: int = 0, seed: int = 0) -> torch.Tensor:
    rounding, target = StochasticRounding(seed), torch.empty_like(value, dtype=torch.bfloat16)
    rounding.begin(step)
    rounding([target], [value.clone()])
    return target


def test_the_mean_of_what_is_rounded_is_what_it_was() -> None:
    # Between 1 and the next number of bf16, 1 + 2^-7.
    for share in (0.1, 0.5, 0.77):
        found = rounded(torch.full((200_003,), 1 + share * 2**-7)).float()
        assert set(found.unique().tolist()) == {1.0, 1 + 2**-7}
        assert abs((found.double().mean() - 1).item() * 2**7 - share) < 0.005


def test_every_number_goes_to_one_of_its_neighbours_and_bf16_to_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(10_001, generator=generator) * torch.exp(10 * torch.randn(10_001, generator=generator))
    down = (value.view(torch.int32) & -(2**16)).view(torch.float32)
    up = (down.view(torch.int32) + 2**16).view(torch.float32)
    found = rounded(value).float()
    assert torch.all((found == down) | (found == up))
    exact = torch.cat([value.bfloat16().float(), torch.tensor([0.0, -0.0, float("inf"), -float("inf")])])
    assert torch.equal(rounded(exact).float(), exact)
    assert rounded(torch.tensor([float("nan")])).isnan().all()


def test_what_is_drawn_follows_from_seed_and_step_alone() -> None:
    value = torch.linspace(1, 2, 999)
    torch.manual_seed(1)
    first = rounded(value, step=3)
    torch.manual_seed(2)
    assert torch.equal(rounded(value, step=3), first)
    assert not torch.equal(rounded(value, step=4), first)
    assert not torch.equal(rounded(value, step=3, seed=1), first)


def test_small_updates_arrive_that_rounding_to_the_nearest_loses() -> None:
    moved = {}
    for stochastic in (False, True):
        weight = torch.nn.Parameter(torch.ones(4096, 4, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=1e-4, weight_decay=0)
        optimizer.rounding = StochasticRounding(0) if stochastic else None
        for step in range(50):
            if optimizer.rounding is not None:
                optimizer.rounding.begin(step)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[stochastic] = 1 - weight.detach().float().mean().item()
    # 50 steps of 1e-4, each far below the 2^-8 that lies beneath 1.
    assert moved[False] == 0
    assert abs(moved[True] - 50e-4) < 2e-4
