import pytest
import torch

from napkin.model.config import ModelConfig
from napkin.model.fp8 import multiply_in_fp8
from napkin.model.linear import Linear
from napkin.model.transformer import Transformer


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = 2 ** torch.ceil(torch.log2(x.abs().max() / torch.finfo(dtype).max))
    return ((x / scale).to(dtype).double()) * scale.double()


@pytest.mark.parametrize("native", [False, True])
def test_products_are_of_numbers_rounded_to_fp8(native: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(32, 48, generator=generator)
    multiply_in_fp8(torch.nn.ModuleList([layer]), native=native)
    x = torch.randn(4, 16, 32, generator=generator, requires_grad=True)
    gradient = torch.randn(4, 16, 48, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(gradient.to(y.dtype))
    rows, w = (
        rounded(x.detach().flatten(0, 1), torch.float8_e4m3fn),
        rounded(layer.weight.detach(), torch.float8_e4m3fn),
    )
    g = rounded(gradient.bfloat16().float().flatten(0, 1), torch.float8_e5m2)
    assert x.grad is not None and layer.weight.grad is not None  # noqa: PT018
    for found, expected in (
        (y.flatten(0, 1), rows @ w.T),
        (x.grad.flatten(0, 1), g @ w),
        (layer.weight.grad, g.T @ rows),
    ):
        # The product is rounded to bf16, its scale too.
        assert (found.double() - expected).abs().max() < 0.015 * expected.abs().max()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32


def test_routers_and_odd_sizes_stay_as_they_are() -> None:
    config = ModelConfig(vocab_size=32, context_length=8, d_model=32, n_layers=1, n_heads=2, n_experts=16, d_ff=40)
    model = Transformer(config)
    multiply_in_fp8(model.blocks, native=False)
    changed = {
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.multiply is not torch.nn.functional.linear
    }
    assert changed == {"blocks.0.attention.query_key_value", "blocks.0.attention.output"}
