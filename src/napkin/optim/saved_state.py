"""What `load_state_dict` takes: the state of the same optimizer of napkin, or of torch's optimizer of the same rule.

torch counts steps per parameter, in a tensor of its state, and has other names for some settings. A `TorchTwin` says
which of its settings are ours under which name, and which have to have one value, as the rules differ with another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from napkin.errors import NapkinError

Group = dict[str, Any]

# How torch computes a step, not what; and what its optimizers did before their first one.
_LEFT_OUT = frozenset("foreach fused capturable differentiable initial_accumulator_value".split())


def _as_it_is(group: Group) -> Group:
    return group


@dataclass(frozen=True)
class TorchTwin:
    """torch's optimizer of the same rule."""

    name: str
    """Its class, in torch.optim."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Its settings that have another name here."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Its settings that are none here: the values with which the rules are the same."""
    optional: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The same for those that older versions of torch do not store."""
    unpacked: Callable[[Group], Group] = _as_it_is
    """Splits a setting that is several here."""


def in_our_terms(state_dict: Mapping[str, Any], own_groups: list[Group], twin: TorchTwin | None, name: str) -> Group:
    """A state_dict as napkin's optimizers store it; what is napkin's already is returned unchanged.

    `own_groups` are those of the optimizer that loads it, whose class is called `name`. Raises NapkinError if it is not
    the state of that class or of its twin over as many parameters.
    """
    groups = state_dict["param_groups"]
    _check_sizes([len(group["params"]) for group in own_groups], [len(group["params"]) for group in groups])
    if all("step" in group for group in groups):
        for own, group in zip(own_groups, groups, strict=True):
            for key in own.keys() - group.keys():
                raise NapkinError(f"the state has no {key}, a setting of {name}: it is another optimizer's")
        return dict(state_dict)
    if twin is None:
        raise NapkinError(f"the state is not napkin's: torch has no {name}, whose state could be loaded")
    state: dict[int, dict[str, Any]] = {index: dict(each) for index, each in state_dict["state"].items()}
    translated = [
        _translated(own, group, twin) | {"step": _common_step(group, state), "params": group["params"]}
        for own, group in zip(own_groups, groups, strict=True)
    ]
    # SGD without momentum stores a buffer of None.
    return {
        "state": {
            index: tensors
            for index, each in state.items()
            if (tensors := {key: tensor for key, tensor in each.items() if key != "step" and tensor is not None})
        },
        "param_groups": translated,
    }


def check_tensors(index: int, saved: Mapping[str, Any], expected: Mapping[str, Tensor], name: str) -> None:
    """Raise NapkinError if a parameter's saved tensors have other names or shapes than an optimizer's own."""
    if saved.keys() != expected.keys():
        raise NapkinError(
            f"the state of parameter {index} is {_listed(saved)}, {name} has {_listed(expected)}: it is another "
            "optimizer's, or another parameter's"
        )
    for key, tensor in expected.items():
        if saved[key].shape != tensor.shape:
            raise NapkinError(
                f"{key} of parameter {index} has shape {tuple(saved[key].shape)}, the parameter needs "
                f"{tuple(tensor.shape)}: give the optimizer the same parameters in the same order"
            )


def _check_sizes(own: list[int], saved: list[int]) -> None:
    if own != saved:
        raise NapkinError(
            f"the state has groups of {_listed(saved)} parameters, the optimizer of {_listed(own)}: give it the same "
            "parameters in the same groups"
        )


def _translated(own: Group, theirs: Group, twin: TorchTwin) -> Group:
    """A group's settings under our names; those that torch does not have are the optimizer's own."""
    theirs = {key: _plain(value) for key, value in twin.unpacked(theirs).items() if key not in _LEFT_OUT}
    for key, values in {**twin.fixed, **twin.optional}.items():
        if key not in theirs:
            if key in twin.fixed:
                raise NapkinError(f"the state has no {key}: it is neither napkin's nor of torch.optim.{twin.name}")
        elif theirs.pop(key) not in values:
            raise NapkinError(
                f"the state was made with another {key} than {' or '.join(map(str, values))}: napkin has no such rule"
            )
    return own | {twin.renamed.get(key, key): value for key, value in theirs.items()}


def _plain(value: Any) -> Any:
    """Learning rates may be tensors of one number; JSON makes lists of tuples."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _common_step(group: Group, state: Mapping[int, Mapping[str, Any]]) -> int:
    """The steps that all parameters of a group took; 0 if it does not say."""
    states = (state.get(index, {}) for index in group["params"])
    steps = {int(torch.as_tensor(each["step"]).item()) for each in states if "step" in each}
    if len(steps) > 1:
        raise NapkinError(
            f"parameters of one group took {_listed(sorted(steps))} steps, napkin counts them per group: put those "
            "with as many steps into one group"
        )
    return steps.pop() if steps else 0


def _listed(values: Any) -> str:
    return ", ".join(map(str, values)) or "none"
