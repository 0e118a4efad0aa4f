import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.kernels.pointwise.rotary import rotate_halves
from napkin.model.positions import RotaryEmbedding
from oracles import numpy_transformer as oracle


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(tensor: Tensor) -> oracle.Array:
    return tensor.detach().double().numpy()


def assert_equals_float64(actual: Tensor, expected: oracle.Array) -> None:
    np.testing.assert_allclose(double(actual), expected, rtol=1e-5, atol=1e-5)


def test_rotation_equals_multiplication_by_complex_numbers() -> None:
    x = normal(2, 11, 3, 16)
    rotated = rotate_halves(x, *RotaryEmbedding(16, 32, theta=500.0)(11))
    for sequence in range(2):
        for head in range(3):
            assert_equals_float64(rotated[sequence, :, head], oracle.rope(double(x[sequence, :, head]), theta=500.0))


def test_rotated_dot_products_depend_on_distance_alone() -> None:
    query, key = normal(32), normal(32, seed=1)
    rotary = RotaryEmbedding(32, 100)
    queries = rotate_halves(query.expand(1, 100, 1, 32), *rotary(100))[0, :, 0]
    keys = rotate_halves(key.expand(1, 100, 1, 32), *rotary(100))[0, :, 0]
    products = queries @ keys.T
    torch.testing.assert_close(products[:-7, :-7], products[7:, 7:], rtol=0, atol=2e-5)


def test_positions_are_named_by_their_numbers_and_those_past_the_tables_are_refused() -> None:
    rotary, x = RotaryEmbedding(16, 12), normal(2, 12, 3, 16)
    whole = rotate_halves(x, *rotary(12))
    assert torch.equal(rotate_halves(x[:, 5:9], *rotary(4, start=5)), whole[:, 5:9])
    own = torch.tensor([[3, 0, 11], [7, 7, 2]])
    rotated = rotate_halves(x.gather(1, own[..., None, None].expand(-1, -1, 3, 16)), *rotary(own))
    assert torch.equal(rotated, whole.gather(1, own[..., None, None].expand(-1, -1, 3, 16)))
    for positions, named in [(13, 12), (torch.tensor([0, 12]), 12), (torch.tensor([[-1]]), -1)]:
        with pytest.raises(NapkinError, match=f"position {named}.*12.*rotary tables"):
            rotary(positions)
    assert rotary(torch.tensor([], dtype=torch.int64))[0].shape == (0, 16)
