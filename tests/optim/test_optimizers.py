"""Every optimizer, in all its implementations, against torch's or against float64."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.errors import NapkinError
from napkin.optim import base
from napkin.optim.adafactor import Adafactor
from napkin.optim.adam import AdaGrad, Adam, AdamW, RMSProp
from napkin.optim.base import Optimizer
from napkin.optim.muon import Muon, newton_schulz, newton_schulz_stacked
from napkin.optim.sgd import SGD, Lion, Momentum, Nesterov
from optim.wandering import LEARNING_RATE, SHAPES, fresh_parameters, gradient_of, learning_rate, train
from oracles import numpy_optimizers

Build = Callable[..., Optimizer]
DECAY = 0.05
ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": DECAY}
MUON: dict[str, Any] = {"momentum": 0.9, **ADAM}
LION: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": DECAY}

OURS: dict[str, Build] = {
    "sgd": partial(SGD, weight_decay=DECAY),
    "momentum": partial(Momentum, momentum=0.8, weight_decay=DECAY),
    "nesterov": partial(Nesterov, momentum=0.8, weight_decay=DECAY),
    "adagrad": partial(AdaGrad, eps=1e-8, weight_decay=DECAY),
    "rmsprop": partial(RMSProp, beta2=0.95, eps=1e-6, weight_decay=DECAY),
    "adam": partial(Adam, **ADAM | {"weight_decay": 1e-4}),
    "adamw": partial(AdamW, **ADAM),
    "lion": partial(Lion, **LION),
    "adafactor": partial(Adafactor, weight_decay=DECAY),
    "muon": partial(Muon, **MUON),
}
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, weight_decay=DECAY),
    "momentum": partial(torch.optim.SGD, momentum=0.8, weight_decay=DECAY),
    "nesterov": partial(torch.optim.SGD, momentum=0.8, nesterov=True, weight_decay=DECAY),
    "adagrad": partial(torch.optim.Adagrad, eps=1e-8, weight_decay=DECAY),
    "rmsprop": partial(torch.optim.RMSprop, alpha=0.95, eps=1e-6, weight_decay=DECAY),
    "adam": partial(torch.optim.Adam, **ADAM | {"weight_decay": 1e-4}),
    "adamw": partial(torch.optim.AdamW, **ADAM),
    "adafactor": partial(torch.optim.Adafactor, weight_decay=DECAY),
}
NUMPYS: dict[str, Callable[[], Any]] = {
    "lion": partial(numpy_optimizers.Lion, LEARNING_RATE, **LION),
    "muon": partial(numpy_optimizers.Muon, LEARNING_RATE, **MUON),
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {"reference": {"foreach": False}, "foreach": {}, "fused": {"fused": True}}
WITHOUT_KERNEL = ("rmsprop", "lion", "adafactor")
# Those that are elementwise: what is summed depends on who sums.
SAME_BITS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "lion")
BUILDS = [
    pytest.param(name, partial(build, **IMPLEMENTATIONS[implementation]), id=f"{name}-{implementation}")
    for name, build in OURS.items()
    for implementation in IMPLEMENTATIONS
    if implementation != "fused" or name not in WITHOUT_KERNEL
]
EVERY_IMPLEMENTATION = pytest.mark.parametrize(("name", "build"), BUILDS)
EVERY_ONE = pytest.mark.parametrize("build", OURS.values(), ids=OURS.keys())


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize(("name", "build"), [case for case in BUILDS if case.values[0] in TORCHS])
def test_a_thousand_steps_equal_torch(name: str, build: Build) -> None:
    ours = fresh_parameters()
    train(ours, build(ours, lr=LEARNING_RATE), range(1000))
    torch.testing.assert_close(ours, torchs_thousand_steps(name), rtol=1e-5, atol=1e-5)


@cache
def torchs_thousand_steps(name: str) -> list[Tensor]:
    parameters = fresh_parameters()
    train(parameters, TORCHS[name](parameters, lr=LEARNING_RATE), range(1000))
    return parameters


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("name", "build"), [case for case in BUILDS if case.values[0] in NUMPYS])
def test_a_thousand_steps_equal_float64(name: str, build: Build) -> None:
    ours = fresh_parameters()
    train(ours, build(ours, lr=LEARNING_RATE), range(1000))
    torch.testing.assert_close(ours, float64s_thousand_steps(name), rtol=1e-5, atol=1e-5, check_dtype=False)


@cache
def float64s_thousand_steps(name: str) -> list[Tensor]:
    theirs = [parameter.detach().double() for parameter in fresh_parameters()]
    rules = [NUMPYS[name]() for _ in SHAPES]
    for step in range(1000):
        generator = torch.Generator().manual_seed(step)
        for place, rule in enumerate(rules):
            rule.lr = learning_rate(step)
            gradient = gradient_of(theirs[place], place, generator)
            theirs[place] = torch.from_numpy(np.asarray(rule.updated(theirs[place].numpy(), gradient.numpy())))
    return theirs


def test_muon_in_bf16_takes_torchs_steps() -> None:
    ours, theirs = ([p for p in fresh_parameters() if p.ndim == 2] for _ in range(2))
    settings: dict[str, Any] = {"lr": LEARNING_RATE, "momentum": 0.9, "weight_decay": DECAY}
    train(ours, Muon(ours, **settings, products=torch.bfloat16), range(1))
    train(theirs, torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw"), range(1))
    moved = (theirs[0] - fresh_parameters()[0]).norm()
    # Products differ in the order of their sums: by the resolution of bf16, 2^-8.
    assert (ours[0] - theirs[0]).norm() < 2**-6 * moved


@pytest.mark.parametrize("shape", [(40, 40), (20, 60), (60, 20), (3, 10, 20)])
def test_newton_schulz_brings_singular_values_near_one_and_keeps_directions(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = newton_schulz(matrix)
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3
    assert values.median() > 0.6
    expected = [numpy_optimizers.newton_schulz_by_singular_values(m) for m in matrix.reshape(-1, *shape[-2:]).numpy()]
    torch.testing.assert_close(found.reshape(-1, *shape[-2:]), torch.from_numpy(np.stack(expected)))
    stacked = newton_schulz_stacked(matrix.reshape(-1, *shape[-2:]).clone()).reshape(shape)
    torch.testing.assert_close(stacked, found)


@EVERY_ONE
def test_all_implementations_and_any_buckets_give_the_same_numbers(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(name for name, other in OURS.items() if other is build)
    results = []
    for foreach, bucket_numel in ((False, 2**20), (True, 2**20), (True, 1), (True, 40)):
        monkeypatch.setattr(base, "_BUCKET_NUMEL", bucket_numel)
        parameters = fresh_parameters() + [p.detach().neg().requires_grad_() for p in fresh_parameters()]
        train(parameters[:4], build(parameters, lr=LEARNING_RATE, foreach=foreach), range(20))
        results.append(parameters)
    tolerance = 0 if name in SAME_BITS else 1e-6
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=tolerance, atol=tolerance)


@EVERY_IMPLEMENTATION
def test_bf16_parameters_take_the_fp32_update_rounded_once(name: str, build: Build) -> None:
    narrow = fresh_parameters(torch.bfloat16)
    wide = [p.detach().float().requires_grad_() for p in narrow]
    for place, (parameter, other) in enumerate(zip(narrow, wide, strict=True)):
        parameter.grad = gradient_of(parameter, place, torch.Generator().manual_seed(place))
        other.grad = parameter.grad.float()
    for parameters in (narrow, wide):
        optimizer = build(parameters, lr=LEARNING_RATE)
        optimizer.step()
        assert {t.dtype for state in optimizer.state.values() for t in state.values()} <= {torch.float32}
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_ONE
def test_a_restored_optimizer_continues_to_the_bit(build: Build, dtype: torch.dtype) -> None:
    through = fresh_parameters(dtype)
    train(through, build(through), range(30))

    parameters = fresh_parameters(dtype)
    before = build(parameters)
    train(parameters, before, range(11))
    restored = build(parameters, lr=1.0)
    restored.load_state_dict(before.state_dict())
    train(parameters, restored, range(11, 30))

    assert all(torch.equal(a, b) for a, b in zip(parameters, through, strict=True))
    assert restored.param_groups[0]["step"] == 30


@EVERY_IMPLEMENTATION
def test_a_parameter_without_a_gradient_is_left_alone_and_gradients_are_not_touched(name: str, build: Build) -> None:
    used, unused = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    optimizer = build([used, unused])
    (used * torch.arange(9.0).view(3, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(3, 3))
    assert unused not in optimizer.state
    assert not torch.equal(used, torch.ones(3, 3))
    torch.testing.assert_close(used.grad, torch.arange(9.0).view(3, 3), rtol=0, atol=0)


@EVERY_IMPLEMENTATION
def test_a_gradient_of_zeros_leaves_finite_weights(name: str, build: Build) -> None:
    parameters: list[Tensor] = fresh_parameters()
    optimizer = build(parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in parameters)


@pytest.mark.sampled(every=2)
@EVERY_IMPLEMENTATION
def test_a_step_traces_on_fake_tensors(name: str, build: Build) -> None:
    with FakeTensorMode():
        parameters = fresh_parameters()
        optimizer = build(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, {"lr": -1.0}) for name in OURS]
    + [(name, {"weight_decay": float("nan")}) for name in OURS]
    + [("momentum", {"momentum": 1.0}), ("muon", {"momentum": -0.1}), ("rmsprop", {"beta2": 1.0})]
    + [("lion", {"betas": (0.9, 1.0)}), ("adafactor", {"eps": -1.0}), ("muon", {"products": torch.int8})]
    + [("adafactor", {"clip": 0.0})]
    + [(name, {"fused": True}) for name in WITHOUT_KERNEL],
)
def test_impossible_settings_are_refused(name: str, setting: dict[str, Any]) -> None:
    with pytest.raises(NapkinError, match=next(iter(setting))):
        OURS[name](fresh_parameters(), **setting)
