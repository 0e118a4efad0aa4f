import numpy as np
import pytest
import torch

from napkin import count
from napkin.errors import NapkinError
from napkin.model.builder import DeepLinear


def test_it_is_the_product_of_its_matrices() -> None:
    model = DeepLinear(6, 3)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    product = x.double().numpy()
    for parameter in model.parameters():
        product = product @ parameter.detach().double().numpy().T
    np.testing.assert_allclose(model(x).detach().numpy(), product[..., 0], rtol=1e-5, atol=1e-6)


def test_its_parameters_and_flops_are_the_lectures() -> None:
    assert sum(parameter.numel() for parameter in DeepLinear(4, 2).parameters()) == 36
    # 6·N·B is 396,288: the first layer needs no gradient of its input.
    assert count(DeepLinear(64, 2), torch.zeros(8, 64)).flops == 330_752


def test_a_size_below_1_is_refused() -> None:
    with pytest.raises(NapkinError, match="n_layers is 0"):
        DeepLinear(4, 0)
