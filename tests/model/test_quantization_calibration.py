"""GPTQ beside optimal brain quantization by explicit inverses, AWQ beside a search on the vectors themselves."""

import copy

import numpy as np
import pytest
import torch

from napkin.model.calibration import Method, awq_quantized, calibrate, gptq_quantized, product_error
from napkin.model.quantized import Int4Linear, QuantizedLinear, quantize_model, quantized_layers, quantized_twin
from napkin.model.transformer import Transformer
from oracles.model_switches import config_of, disturbed, random_tokens


def correlated(n: int, columns: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n, columns, generator=draw) @ torch.randn(columns, columns, generator=draw)
    return mixed * torch.linspace(0.1, 4, columns)


def exact(tensors: dict[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return Int4Linear(rows, columns, tensors).exact_weight()


def brain_quantized(weight: np.ndarray, h: np.ndarray, group_size: int, *, by_size: bool) -> np.ndarray:
    """Each column in turn is rounded, and those left take the best change, by the inverse of H restricted to them."""
    w, left = weight.copy(), list(range(weight.shape[1]))
    if by_size:
        left.sort(key=lambda j: -h[j, j])
    scale = middle = np.zeros(0)
    while left:
        j = left[0]
        start = j // group_size * group_size
        if by_size or j == start:
            group = torch.from_numpy((weight if by_size else w)[:, start : start + group_size]).float()
            scale, middle = (each.double().numpy() for each in Int4Linear.grid(group))
        rounded = (np.clip(np.round((w[:, j] - middle) / scale + 8), 0, 15) - 8) * scale + middle
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        w[:, left] -= np.outer((w[:, j] - rounded) / inverse[0, 0], inverse[0])
        w[:, j] = rounded
        left.pop(0)
    return w


@pytest.mark.parametrize(("rows", "columns", "group_size"), [(5, 16, 8), (3, 12, 12), (4, 20, 4)])
@pytest.mark.parametrize("by_size", [False, True])
def test_gptq_is_optimal_brain_quantization_in_order(rows: int, columns: int, group_size: int, by_size: bool) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    x = correlated(200, columns).double()
    hessian = x.T @ x
    damped = hessian.numpy() + 0.01 * hessian.diagonal().mean().item() * np.eye(columns)
    found = exact(gptq_quantized(weight, hessian, group_size, by_size=by_size), weight)
    expected = brain_quantized(weight.double().numpy(), damped, group_size, by_size=by_size)
    assert found.numpy() == pytest.approx(expected, abs=1e-5)


def test_products_change_less_than_by_rounding_to_the_nearest() -> None:
    weight, x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)), correlated(600, 128)
    hessian = (x.T @ x).double()
    nearest = product_error(weight, exact(Int4Linear.quantized(weight, 32), weight), hessian)
    in_order, gptq = (exact(gptq_quantized(weight, hessian, 32, by_size=by_size), weight) for by_size in (False, True))
    # The columns that read the largest numbers stand last.
    assert product_error(weight, gptq, hessian) < product_error(weight, in_order, hessian) < 0.8 * nearest
    # The error is that of the products themselves.
    assert product_error(weight, gptq, hessian) == pytest.approx(
        float(((x @ (weight - gptq).T).double() ** 2).sum()), rel=1e-4
    )


def test_awq_has_the_power_that_a_search_on_the_vectors_finds() -> None:
    weight, x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)), correlated(300, 64)
    found = awq_quantized(weight, (x.T @ x).double(), x.abs().mean(dim=0).double(), 32)
    wanted, errors = x @ weight.T, []
    for step in range(21):
        s = x.abs().mean(dim=0) ** (step / 20)
        factors = (1 / (s / (s.max() * s.min()).sqrt())).to(torch.bfloat16).float()
        rounded = exact(Int4Linear.quantized(weight / factors, 32), weight)
        errors.append(((x * factors) @ rounded.T - wanted).double().square().sum().item())
    assert min(errors) < errors[0]
    error = ((x @ exact(found, weight).T) - wanted).double().square().sum().item()
    assert error == pytest.approx(min(errors), rel=1e-4)


@pytest.mark.parametrize(
    ("method", "switch"),
    [
        ("gptq", "mup"),
        ("awq", "biases_all"),
        pytest.param("gptq", "default", marks=pytest.mark.thorough),
        pytest.param("awq", "attention_latent", marks=pytest.mark.thorough),
        pytest.param("gptq", "block_parallel", marks=pytest.mark.thorough),
    ],
)
def test_a_calibrated_model_is_closer_and_is_read_again(method: Method, switch: str) -> None:
    config = config_of(switch, d_model=64, d_ff=96)
    model = disturbed(config)
    batches = [random_tokens(config, 4, 16, seed) for seed in range(2)]
    found = calibrate(copy.deepcopy(model), batches, method, group_size=32)
    assert found.keys() == quantized_layers(model).keys()
    assert all(each.error <= each.rounding_error for each in found.values())
    assert sum(each.error < each.rounding_error for each in found.values()) > len(found) / 2
    calibrated = copy.deepcopy(model)
    quantize_model(calibrated, "int4", group_size=32, calibrated={name: each.tensors for name, each in found.items()})
    twin = Transformer(config)
    quantized_twin(twin, "int4", calibrated.state_dict())
    twin.load_state_dict(calibrated.state_dict())
    with torch.no_grad():
        assert torch.equal(twin(batches[0]), calibrated(batches[0]))
        # Packed products, of few vectors, are those of the matrix.
        for layer in calibrated.modules():
            if isinstance(layer, QuantizedLinear):
                x = torch.randn(3, layer.in_features)
                expected = x.double() @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())
                assert (layer(x).double() - expected).norm() < 2**-6 * expected.norm()
