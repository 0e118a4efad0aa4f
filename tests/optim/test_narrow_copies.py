"""Copies of matrices that the update writes equal a cast of the matrices, whatever changed those."""

import torch

from napkin.optim.adam import AdamW
from napkin.optim.averaging import WeightAverage
from napkin.optim.narrow_copies import NarrowCopies


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((5, 7), (3,), (7, 2))]


def read(copies: NarrowCopies, matrix: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        copy = copies.of(matrix)
    assert copy is not None
    return copy


def test_an_update_that_writes_copies_is_the_update() -> None:
    expected, actual = parameters(), parameters()
    optimizers = [AdamW(each, lr=0.1, weight_decay=0.3) for each in (expected, actual)]
    copies = optimizers[1].narrow_copies = NarrowCopies([actual[0], actual[2]], torch.bfloat16)
    for step in range(3):
        for mine, theirs in zip(actual, expected, strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for matrix in (actual[0], actual[2]):
            assert torch.equal(copies.to_overwrite(matrix), matrix.to(torch.bfloat16))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_matrix_that_something_else_changed_is_cast_again() -> None:
    (matrix, *_) = parameters()
    copies, average = NarrowCopies([matrix], torch.bfloat16), WeightAverage([matrix])
    average.averages[0].fill_(2.0)
    with average.applied():
        assert read(copies, matrix).eq(2.0).all()
    assert torch.equal(read(copies, matrix), matrix.to(torch.bfloat16))
    with torch.no_grad():
        matrix.zero_()
    assert not read(copies, matrix).any()


def test_products_read_copies_under_autocast_alone_and_their_gradient_is_the_matrixs() -> None:
    (matrix, vector, _) = parameters()
    copies = NarrowCopies([matrix], torch.bfloat16)
    assert copies.narrowed(matrix) is matrix
    with torch.autocast("cpu", torch.float16):
        assert copies.narrowed(matrix) is matrix
    with torch.autocast("cpu", torch.bfloat16):
        assert copies.narrowed(vector) is vector
        narrowed = copies.narrowed(matrix)
        assert narrowed.dtype == torch.bfloat16
        (gradient,) = torch.autograd.grad((narrowed * 3).sum(), matrix)
    assert gradient.dtype == torch.float32
    assert gradient.eq(3).all()
