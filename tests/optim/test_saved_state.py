"""A state_dict of torch's optimizers, loaded: training continues as it would there. What does not fit is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.optim.adafactor import Adafactor
from napkin.optim.adam import AdaGrad, Adam, AdamW, RMSProp
from napkin.optim.base import Optimizer
from napkin.optim.muon import Muon
from napkin.optim.sgd import SGD, Lion, Momentum, Nesterov
from optim.wandering import LEARNING_RATE, fresh_parameters, train

MUON: dict[str, Any] = {"lr": LEARNING_RATE, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
TWINS: dict[str, tuple[type[Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SGD, partial(torch.optim.SGD, weight_decay=0.05)),
    "momentum": (Momentum, partial(torch.optim.SGD, momentum=0.8, weight_decay=0.05)),
    "nesterov": (Nesterov, partial(torch.optim.SGD, momentum=0.8, nesterov=True)),
    "adagrad": (AdaGrad, partial(torch.optim.Adagrad, eps=1e-8, initial_accumulator_value=0.1)),
    "rmsprop": (RMSProp, partial(torch.optim.RMSprop, alpha=0.95, eps=1e-6, weight_decay=0.05)),
    "adam": (Adam, partial(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-6, weight_decay=1e-4)),
    "adamw": (AdamW, partial(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05)),
    "adamw_capturable": (AdamW, partial(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False)),
    "adafactor": (Adafactor, partial(torch.optim.Adafactor, eps=(None, 1e-2), d=2.0, weight_decay=0.05)),
}


@pytest.mark.parametrize("implementation", [{"foreach": False}, {}], ids=["reference", "foreach"])
@pytest.mark.parametrize(("ours", "theirs"), TWINS.values(), ids=TWINS.keys())
def test_training_continues_as_in_torch(
    ours: type[Any], theirs: Callable[..., torch.optim.Optimizer], implementation: dict[str, bool]
) -> None:
    through, moved = fresh_parameters(), fresh_parameters()
    rival = theirs(through)
    train(through, rival, range(11))
    with torch.no_grad():
        for parameter, value in zip(moved, through, strict=True):
            parameter.copy_(value)
    # Settings of its own are replaced, as by torch's load_state_dict.
    optimizer = ours(moved, lr=1.0, weight_decay=0.7, **implementation)
    optimizer.load_state_dict(rival.state_dict())
    train(through, rival, range(11, 60))
    train(moved, optimizer, range(11, 60))
    torch.testing.assert_close(moved, through, rtol=1e-5, atol=1e-6)
    assert optimizer.state_dict()["param_groups"][0]["step"] == (60 if counts_steps(rival) else 49)
    # What it then stores is its own, and loads again.
    again = ours(moved)
    again.load_state_dict(optimizer.state_dict())


def counts_steps(rival: torch.optim.Optimizer) -> bool:
    """Whether torch's optimizer stores the number of its steps."""
    return any("step" in state for state in rival.state.values())


def test_muon_continues_as_in_torch() -> None:
    through, moved = ([p for p in fresh_parameters() if p.ndim == 2] for _ in range(2))
    rival = torch.optim.Muon(through, **MUON)
    train(through, rival, range(5))
    with torch.no_grad():
        moved[0].copy_(through[0])
    before = moved[0].detach().clone()
    optimizer = Muon(moved, products=torch.bfloat16)
    optimizer.load_state_dict(rival.state_dict())
    train(through, rival, range(5, 6))
    train(moved, optimizer, range(5, 6))
    # Products differ in the order of their sums: by the resolution of bf16, 2^-8.
    assert (moved[0] - through[0]).norm() < 2**-6 * (moved[0] - before).norm()
    assert optimizer.param_groups[0]["momentum"] == 0.8


def test_a_narrow_state_is_widened_and_a_parameter_without_one_begins() -> None:
    parameters = fresh_parameters(torch.bfloat16)
    rival = torch.optim.AdamW(parameters)
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    rival.step()
    optimizer = AdamW(parameters)
    optimizer.load_state_dict(rival.state_dict())
    assert parameters[0] not in optimizer.state
    assert {tensor.dtype for state in optimizer.state.values() for tensor in state.values()} == {torch.float32}
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2


def test_states_of_several_groups_keep_their_settings() -> None:
    def groups(parameters: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5, "weight_decay": 0.0}]

    parameters = fresh_parameters()
    rival = torch.optim.AdamW(groups(parameters))
    schedule = torch.optim.lr_scheduler.ConstantLR(rival, factor=0.5)
    train(parameters, rival, range(3))
    optimizer = AdamW(groups(parameters))
    optimizer.load_state_dict(rival.state_dict())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == schedule.base_lrs
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


def stepped(build: Callable[..., torch.optim.Optimizer], parameters: list[Tensor] | None = None) -> dict[str, Any]:
    """The state of an optimizer after two steps."""
    parameters = parameters or [p for p in fresh_parameters() if p.ndim == 2]
    optimizer = build(parameters)
    train(parameters, optimizer, range(2))
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (AdamW, torch.optim.SGD, "has no amsgrad"),
        (AdamW, torch.optim.NAdam, "has no amsgrad"),
        (AdamW, torch.optim.RAdam, "has no amsgrad"),
        (AdamW, torch.optim.Adam, "another decoupled_weight_decay than True"),
        (Adam, torch.optim.AdamW, "another decoupled_weight_decay than False"),
        (AdamW, partial(torch.optim.AdamW, amsgrad=True), "another amsgrad than False"),
        (AdamW, partial(torch.optim.AdamW, maximize=True), "another maximize than False"),
        (SGD, partial(torch.optim.SGD, momentum=0.9), "another momentum than 0"),
        (Momentum, partial(torch.optim.SGD, momentum=0.9, nesterov=True), "another nesterov than False"),
        (Nesterov, partial(torch.optim.SGD, momentum=0.9), "another nesterov than True"),
        (Momentum, partial(torch.optim.SGD, momentum=0.9, dampening=0.1), "another dampening than 0"),
        (AdaGrad, partial(torch.optim.Adagrad, lr_decay=0.1), "another lr_decay than 0"),
        (RMSProp, partial(torch.optim.RMSprop, centered=True), "another centered than False"),
        (RMSProp, partial(torch.optim.RMSprop, momentum=0.9), "another momentum than 0"),
        (Adafactor, partial(torch.optim.Adafactor, beta2_decay=-0.5), "another beta2_decay than -0.8"),
        (Adafactor, partial(torch.optim.Adafactor, eps=(0.1, 1e-3)), "another eps1 than None"),
        (Muon, torch.optim.Muon, "another adjust_lr_fn than match_rms_adamw"),
        (Lion, torch.optim.Adam, "torch has no Lion"),
        (AdamW, Lion, "has no eps, a setting of AdamW"),
        (Lion, AdamW, "the state of parameter 0 is exp_avg, exp_avg_sq, Lion has exp_avg:"),
    ],
)
def test_the_state_of_another_rule_is_refused_in_one_line(
    ours: type[Any], theirs: Callable[..., torch.optim.Optimizer], message: str
) -> None:
    optimizer = ours([p for p in fresh_parameters() if p.ndim == 2])
    before = optimizer.state_dict()
    with pytest.raises(NapkinError, match=message) as caught:
        optimizer.load_state_dict(stepped(theirs))
    assert "\n" not in str(caught.value)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved["state"][0].pop("exp_avg"), "parameter 0 is exp_avg_sq, AdamW has exp_avg, exp_avg_sq"),
        (lambda saved: saved["state"][1].update(exp_avg=torch.ones(3)), r"exp_avg of parameter 1 has shape \(3,\)"),
        (lambda saved: saved["state"][1].update(step=torch.tensor(7.0)), "took 2, 7 steps"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), "groups of 3 parameters, the optimizer of 4"),
        (lambda saved: saved["param_groups"].append({**saved["param_groups"][0]}), "groups of 4, 4 parameters"),
        (lambda saved: saved["param_groups"][0].update(weight_decay=-1.0), "weight_decay is -1.0"),
    ],
)
def test_the_state_of_other_parameters_is_refused_in_one_line(
    damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    saved = stepped(torch.optim.AdamW, fresh_parameters())
    damage(saved)
    with pytest.raises(NapkinError, match=message) as caught:
        AdamW(fresh_parameters()).load_state_dict(saved)
    assert "\n" not in str(caught.value)
