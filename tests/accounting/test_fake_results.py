"""Results that are made again, beside those that torch's fake tensors compute each time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting import fake_results
from napkin.accounting.fake_results import call_on_fakes

aten = torch.ops.aten

Call = Callable[[Callable[..., Any]], Any]
"""Makes calls by the function that it is given, which takes an operator and its arguments."""


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape or (6, 4), dtype=dtype)


CALLS: dict[str, Call] = {
    "new storage": lambda call: call(aten.mm.default, matrix(), matrix(4, 5)),
    "a whole number widens less than a float": lambda call: [
        call(aten.mul.Tensor, matrix(dtype=torch.int64), factor) for factor in (1, 1.0, True)
    ],
    "transposed": lambda call: call(aten.t.default, matrix()),
    "a part of a view": lambda call: call(aten.slice.Tensor, call(aten.t.default, matrix()), 0, 1, 3),
    "several views": lambda call: call(aten.split.Tensor, matrix(), 2),
    "several results": lambda call: call(aten.native_layer_norm.default, matrix(), [4], None, None, 1e-5),
    "a missing result": lambda call: call(
        aten.native_layer_norm_backward.default,
        matrix(),
        matrix(),
        [4],
        matrix(6, 1),
        matrix(6, 1),
        None,
        None,
        [True, False, False],
    ),
    "in place": lambda call: call(aten.add_.Tensor, matrix(), matrix()),
    "in place on itself": lambda call: (lambda x: call(aten.mul_.Tensor, x, x))(matrix()),
    "written elsewhere": lambda call: call(aten.mul.out, matrix(), matrix(), out=matrix()),
    "the same tensor or a copy": lambda call: [
        call(aten._to_copy.default, matrix(), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    ],
    "a list": lambda call: call(aten._foreach_add_.List, [matrix(), matrix(3)], [matrix(), matrix(3)]),
    "without arguments": lambda call: call(aten.arange.default, 7, device="cpu", pin_memory=False),
    "default format": lambda call: [
        with_default(dtype, lambda: call(aten.full.default, [3], 0.5)) for dtype in (torch.float32, torch.float64)
    ],
    "conjugated": lambda call: call(aten._conj.default, matrix(dtype=torch.complex64)),
    "resized": lambda call: call(aten.add.Tensor, resized(matrix()), 1),
    "expanded": lambda call: call(aten.add.Tensor, matrix(1, 4).expand(6, 4), matrix(4)),
}


LEFT_TO_TORCH = ("in place on itself", "conjugated")


def with_default(dtype: torch.dtype, run: Callable[[], Any]) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return run()
    finally:
        torch.set_default_dtype(before)


def resized(tensor: Tensor) -> Tensor:
    """The tensor in a larger storage."""
    tensor.untyped_storage().resize_(1000)
    return tensor


class Described:
    """Calls operators and describes what they return: layouts, storages, and which argument each result shares."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __call__(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        given = fake_tensors((args, kwargs))
        self.found.append([type(result), *(self.describe(each, given) for each in fake_tensors(result))])
        return result

    def describe(self, tensor: FakeTensor, given: list[FakeTensor]) -> Any:
        return (
            (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
            (tensor.untyped_storage().nbytes(), tensor.is_conj(), tensor._is_view(), tensor.requires_grad),
            [each is tensor for each in given],
            [each.untyped_storage()._cdata == tensor.untyped_storage()._cdata for each in given],
            torch._C._dispatch_key_set(tensor),
        )


class Again(TorchDispatchMode):
    """Calls operators where a count does: below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.known = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        result, known = call_on_fakes(func, args, kwargs or {})
        # Arguments are made by it.
        self.known += known is not None and func.overloadpacket is not aten.empty
        return result


def fake_tensors(value: Any) -> list[FakeTensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_made_again_is_what_torch_makes(name: str) -> None:
    with FakeTensorMode() as mode:
        mode.cache_enabled = False
        expected = Described()
        CALLS[name](expected)
    for _ in range(3):
        with FakeTensorMode(), Again() as again:
            made = Described()
            CALLS[name](made)
        assert made.found == expected.found
        assert (again.known > 0) == (name not in LEFT_TO_TORCH)


def test_a_call_that_may_return_either_of_two_arguments_is_made_anew() -> None:
    with FakeTensorMode():
        x, y = matrix(), matrix()
        call_on_fakes(aten.mul.out, (x, y), {"out": x})
        written, _ = call_on_fakes(aten.mul.out, (x, matrix()), {"out": y})
    assert written is y


def test_what_depends_on_values_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "_calls", {})
    with FakeTensorMode():
        for _ in range(2):
            one = torch.tensor(1.0)  # torch knows its value
            doubled, known = call_on_fakes(aten.add.Tensor, (one, one), {})
            assert doubled.item() == 2
            assert known is None
        with pytest.raises(DynamicOutputShapeException):
            call_on_fakes(aten.nonzero.default, (matrix(),), {})
    real, known = call_on_fakes(aten.add.Tensor, (torch.ones(2), 1), {})
    assert real.tolist() == [2, 2]
    assert known is None


def test_all_calls_are_dropped_where_they_would_become_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "_calls", {})
    monkeypatch.setattr(fake_results, "_MOST_CALLS", 3)
    with FakeTensorMode():
        for size in range(1, 9):
            assert call_on_fakes(aten.neg.default, (matrix(size),), {})[0].shape == (size,)
            assert len(fake_results._calls) <= 3
