from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.errors import NapkinError
from napkin.optim import base
from napkin.optim.adam import AdamW

SHAPES = [(5, 7), (7,), (3, 2, 2), ()]
SETTINGS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
IMPLEMENTATIONS = pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one_by_one"])


def fresh_parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def train(parameters: list[Tensor], optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Gradients that wander and differ in size by six orders, and a learning rate that changes."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, parameter in enumerate(parameters):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = ((noise + parameter.detach()) * 10.0 ** (2 * i - 4)).to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step % 7)
        optimizer.step()


@pytest.mark.thorough
@IMPLEMENTATIONS
def test_a_thousand_steps_equal_torch(foreach: bool) -> None:
    ours, theirs = fresh_parameters(), fresh_parameters()
    optimizer, rival = AdamW(ours, **SETTINGS, foreach=foreach), torch.optim.AdamW(theirs, **SETTINGS)
    train(ours, optimizer, range(1000))
    train(theirs, rival, range(1000))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[mine][name], rival.state[other][name], rtol=1e-5, atol=1e-12)


def test_both_implementations_and_any_buckets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for foreach, bucket_numel in ((False, 2**20), (True, 2**20), (True, 1), (True, 40)):
        monkeypatch.setattr(base, "_BUCKET_NUMEL", bucket_numel)
        parameters = fresh_parameters()
        train(parameters, AdamW(parameters, **SETTINGS, foreach=foreach), range(20))
        results.append(parameters)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_to_the_bit(dtype: torch.dtype) -> None:
    through = fresh_parameters(dtype)
    train(through, AdamW(through, **SETTINGS), range(30))

    parameters = fresh_parameters(dtype)
    before = AdamW(parameters, **SETTINGS)
    train(parameters, before, range(11))
    restored = AdamW(parameters, lr=1.0)
    restored.load_state_dict(before.state_dict())
    train(parameters, restored, range(11, 30))

    assert all(torch.equal(a, b) for a, b in zip(parameters, through, strict=True))
    assert restored.param_groups[0]["step"] == 30
    assert {tensor.dtype for state in restored.state.values() for tensor in state.values()} == {torch.float32}


@IMPLEMENTATIONS
def test_bf16_parameters_take_the_fp32_update_rounded_once(foreach: bool) -> None:
    narrow = fresh_parameters(torch.bfloat16)
    wide = [p.detach().float().requires_grad_() for p in narrow]
    for parameters in (narrow, wide):
        optimizer = AdamW(parameters, **SETTINGS, foreach=foreach)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(narrow, wide, strict=True))


@IMPLEMENTATIONS
def test_a_parameter_without_a_gradient_is_left_alone(foreach: bool) -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = AdamW([used, unused], foreach=foreach)
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(3))
    assert unused not in optimizer.state
    assert not torch.equal(used, torch.ones(3))


def test_state_is_8_bytes_a_parameter_and_nothing_else() -> None:
    parameters = fresh_parameters()
    optimizer = AdamW(parameters)
    train(parameters, optimizer, range(1))
    stored = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert stored == 8 * sum(p.numel() for p in parameters)


def test_decay_alone_shrinks_geometrically() -> None:
    parameter = torch.ones(4, requires_grad=True)
    optimizer = AdamW([parameter], lr=0.1, weight_decay=0.5)
    for _ in range(10):
        parameter.grad = torch.zeros(4)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.95**10))


@IMPLEMENTATIONS
def test_a_step_traces_on_fake_tensors(foreach: bool) -> None:
    with FakeTensorMode():
        parameters = fresh_parameters()
        optimizer = AdamW(parameters, foreach=foreach)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert len(optimizer.state) == len(SHAPES)


@pytest.mark.parametrize(
    "setting", [{"lr": -1.0}, {"eps": float("nan")}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}]
)
def test_impossible_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(NapkinError, match=next(iter(setting))):
        AdamW(fresh_parameters(), **setting)  # pyright: ignore[reportArgumentType]
