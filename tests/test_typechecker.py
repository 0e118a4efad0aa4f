"""Which calls the types of shapes are enforced on while tests run."""

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import Float
from torch import Tensor

from typechecker import CALLS_CHECKED, check, checked


def test_a_call_with_types_or_shapes_that_are_new_is_checked_however_many_came_before() -> None:
    def total(rows: Float[Tensor, "n k"], pair: tuple[Float[Tensor, " k"], object]) -> Float[Tensor, ""]:
        return (rows * pair[0]).sum()

    enforced = checked(total, typechecker=check)
    one = torch.ones(2, 1), (torch.ones(1), None)
    for _ in range(2 * CALLS_CHECKED):
        enforced(*one)
    # The product is computed all the same: only the annotations tell.
    for rows, gain in ((torch.ones(2, 3), torch.ones(1)), (torch.ones(2, 1).int(), torch.ones(1)), ([], torch.ones(1))):
        with pytest.raises(TypeError, match="total"):
            enforced(rows, (gain, None))
    assert enforced(torch.ones(2, 3), (torch.ones(3), None)) == 6


def test_the_first_calls_are_checked_to_what_they_return() -> None:
    def alike(rows: Float[Tensor, "n k"], n: int) -> Float[Tensor, "n k"]:
        return rows[:n]

    enforced = checked(alike, typechecker=check)
    for _ in range(CALLS_CHECKED - 1):
        enforced(torch.ones(2, 3), 2)
    with pytest.raises(TypeError, match="alike"):
        enforced(torch.ones(2, 3), 1)


def length(text: str) -> int:
    return len(text)


def test_a_function_is_checked_from_its_first_call_on_and_prepared_no_sooner() -> None:
    prepared: list[object] = []

    def prepare(function):
        prepared.append(function)
        return check(function)

    enforced = checked(length, typechecker=prepare)
    assert prepared == []
    for _ in range(2):
        with pytest.raises(BeartypeCallHintParamViolation, match="length"):
            enforced(b"bytes")
    assert enforced("four") == 4
    assert prepared == [length]
