"""Operators as they are registered: what torch asks of an operator, few functions per call, one call per group."""

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.kernels.loss import cross_entropy  # noqa: F401
from napkin.kernels.norms import normalization
from napkin.kernels.pointwise import activations  # noqa: F401
from napkin.optim.adam import AdamW
from napkin.optim.clipping import clip_gradients, norm_and_factor
from napkin.optim.narrow_copies import NarrowCopies

ops = torch.ops.napkin


def normal(*shape: int, needs: bool = False) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(needs)


def adamw_arguments() -> tuple[Any, ...]:
    lists = [[normal(5), normal(3, 2)] for _ in range(4)]
    lists[3] = [each.square() for each in lists[3]]
    copies = [each.bfloat16() for each in lists[0]]
    return *lists, copies, torch.tensor(0.5), 0.1, 0.9, 0.95, 1e-8, 0.1, 2


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "fused_norm": lambda: (
        normal(4, 6, needs=True),
        normal(4, 6, needs=True),
        normal(6, needs=True),
        None,
        1e-5,
        False,
        None,
    ),
    "fused_swiglu": lambda: (normal(4, 6, needs=True),),
    "fused_cross_entropy_": lambda: (normal(4, 6), torch.tensor([1, 5, -1, 0]), -1, 0.0, 0.0, True),
    "fused_adamw_": adamw_arguments,
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_nothing_wrong_with_an_operator(name: str) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(ops, name).default, CALLS[name](), test_utils=tests)


def calls_of(function: Callable[[], object]) -> int:
    function()
    profile = cProfile.Profile()
    profile.runcall(function)
    return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]


def test_a_call_is_of_fewer_functions_than_one_of_a_custom_op_of_torch() -> None:
    theirs = torch.library.custom_op(
        "napkin_tests::norm",
        normalization.norm_reference,
        mutates_args=(),
        schema=str(ops.fused_norm.default._schema).partition("fused_norm")[2],
    )
    theirs.register_autograd(normalization._differentiate, setup_context=normalization._save)
    arguments = CALLS["fused_norm"]()
    ours, custom = (calls_of(lambda op=op: op(*arguments)) for op in (ops.fused_norm, theirs))
    # Although ours also asks whether Triton computes it.
    assert ours < custom


class Calls(TorchDispatchMode):
    """Counts the calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_matrices_of_a_group_are_updated_by_one_call_and_clipped_by_it_bit_for_bit() -> None:
    updated = []
    for in_update in (False, True):
        matrices = [torch.nn.Parameter(normal(9, n + 2)) for n in range(30)]
        groups = [{"params": matrices[:20]}, {"params": matrices[20:], "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=0.1)
        optimizer.narrow_copies = NarrowCopies(matrices, torch.bfloat16)
        with Calls() as calls:
            for matrix in matrices:
                matrix.grad = normal(*matrix.shape) + matrix.detach()
            if in_update:
                _, optimizer.gradient_factor = norm_and_factor(matrices, 1.0)
            else:
                clip_gradients(matrices, 1.0)
            optimizer.step()
        assert calls.of["fused_adamw_"] == 2
        assert calls.of["_foreach_mul_"] == (0 if in_update else 1)
        updated.append([each.detach() for each in (*matrices, *optimizer.narrow_copies.tensors)])
    assert all(torch.equal(one, other) for one, other in zip(*updated, strict=True))
