import numpy as np
import torch
from torch import Tensor

from napkin.kernels.rope import rotate_halves
from napkin.model.rope import RotaryEmbedding
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
