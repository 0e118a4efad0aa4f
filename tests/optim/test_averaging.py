import pytest
import torch

from napkin.errors import NapkinError
from napkin.optim.averaging import WeightAverage


def test_the_average_weighs_each_step_as_the_closed_form_says() -> None:
    """a_T = w_0 · Π d_t + Σ_t (1 - d_t) · w_t · Π_{s > t} d_s, with d_t = min(decay, (1 + t) / (10 + t))."""
    generator = torch.Generator().manual_seed(0)
    course = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    parameter = course[0].float().requires_grad_()
    average = WeightAverage([parameter], decay=0.8)
    for weights in course[1:]:
        parameter.data.copy_(weights)
        average.update()
    decays = [1.0, *(min(0.8, (1 + t) / (10 + t)) for t in range(1, 60))]
    expected = torch.zeros(5, dtype=torch.float64)
    for t in range(60):
        later = torch.tensor(decays[t + 1 :], dtype=torch.float64).prod()
        expected += (1 - decays[t] if t else 1.0) * later * course[t]
    torch.testing.assert_close(average.averages[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_weights_that_stand_still_are_their_own_average() -> None:
    parameter = torch.randn(7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    average = WeightAverage([parameter])
    for _ in range(10):
        average.update()
    assert torch.equal(average.averages[0], parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_in_fp32_and_lent_to_the_parameters_for_a_while(dtype: torch.dtype) -> None:
    parameters = [torch.ones(3, 2, dtype=dtype).requires_grad_(), torch.zeros(4, dtype=dtype).requires_grad_()]
    average = WeightAverage(parameters, decay=0.5)
    assert sum(a.nbytes for a in average.averages) == 4 * sum(p.numel() for p in parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)
    average.update()
    now = [parameter.detach().clone() for parameter in parameters]
    with average.applied():
        for parameter, mean in zip(parameters, average.averages, strict=True):
            assert mean.dtype == torch.float32
            assert torch.equal(parameter, mean.to(dtype))
            assert parameter.requires_grad
        assert not torch.equal(parameters[0], now[0])
    assert all(torch.equal(p, n) for p, n in zip(parameters, now, strict=True))
    with pytest.raises(ZeroDivisionError), average.applied():
        _ = 1 / 0
    assert all(torch.equal(p, n) for p, n in zip(parameters, now, strict=True))


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(NapkinError, match="decay is"):
        WeightAverage([torch.zeros(1)], decay)
