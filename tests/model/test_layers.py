from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.kernels.norms.normalization import layer_norm_reference
from napkin.kernels.pointwise.rotary import rotate_interleaved
from napkin.model.attention import CausalSelfAttention, ForwardContext
from napkin.model.block import BLOCKS, BlockParts
from napkin.model.config import ModelConfig
from napkin.model.feed_forward import FEED_FORWARDS, DroplessExperts, MixtureOfExperts, SharedMixtureOfExperts, SwiGLU
from napkin.model.layers import Dropout, Embedding, Linear, LinearFactory, fan_in_std, glorot_std, truncated_normal
from napkin.model.norm import LayerNorm, RMSNorm
from napkin.model.positions import RotaryEmbedding, unrotated
from napkin.model.transformer import Transformer
from oracles import numpy_switches as switches
from oracles import numpy_transformer as oracle


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def factory(seed: int = 1) -> LinearFactory:
    return LinearFactory(generator=torch.Generator().manual_seed(seed))


def double(tensor: Tensor) -> oracle.Array:
    return tensor.detach().double().numpy()


def assert_equals_float64(actual: Tensor, expected: oracle.Array) -> None:
    np.testing.assert_allclose(double(actual), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_equals_torch_and_numpy() -> None:
    norm = RMSNorm(48, eps=1e-3)
    x = 0.1 * normal(5, 7, 48)
    with torch.no_grad():
        norm.gain.copy_(normal(48, seed=1))
    expected = np.stack([oracle.rms_norm(row, double(norm.gain), 1e-3) for row in double(x)])
    assert_equals_float64(norm(x), expected)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (48,), norm.gain, 1e-3), rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bf16_is_rounded_once() -> None:
    x = (100 * normal(4, 1000)).bfloat16()
    assert torch.equal(RMSNorm(1000)(x), RMSNorm(1000)(x.float()).bfloat16())


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = RMSNorm(8)(x)
    out.sum().backward()
    assert out.count_nonzero() == 0
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_self_attention_equals_numpy(n_kv_heads: int) -> None:
    layer = CausalSelfAttention(32, 4, n_kv_heads, linears=factory())
    x = normal(2, 9, 32)
    weights = double(layer.query_key_value.weight), double(layer.output.weight)
    for sequence, output in zip(x, layer(x, ForwardContext(RotaryEmbedding(8, 16, theta=100.0)(9))), strict=True):
        expected = oracle.self_attention(double(sequence), *weights, n_heads=4, n_kv_heads=n_kv_heads, theta=100.0)
        assert_equals_float64(output, expected)


def test_swiglu_equals_numpy() -> None:
    layer = SwiGLU(24, 40, linears=factory())
    x = normal(6, 24)
    assert_equals_float64(layer(x), oracle.swiglu(double(x), double(layer.gate_up.weight), double(layer.down.weight)))


def test_draws_are_a_normal_distribution_cut_at_three_std() -> None:
    draws = double(truncated_normal(400, 500, std=0.5, generator=torch.Generator().manual_seed(0))).ravel() / 0.5
    limit_density = np.exp(-4.5) / np.sqrt(2 * np.pi)
    kept = 0.9973002039367398
    assert np.abs(draws).max() <= 3
    assert abs(draws.mean()) < 0.01
    assert abs(draws.var() - (1 - 6 * limit_density / kept)) < 0.01
    # A clamped normal would pile 0.13% of the draws onto each limit; here 0.03% lie in the last twentieth.
    assert (draws > 2.95).mean() < 0.0006
    assert abs((draws < 1).mean() - (0.8413447 - 0.00135) / kept) < 0.005


def test_a_linear_layer_keeps_the_variance_of_its_input() -> None:
    out = Linear(256, 512, generator=torch.Generator().manual_seed(0))(normal(64, 256))
    assert abs(out.var().item() - 1) < 0.1


def test_parameters_are_born_in_the_default_dtype_with_the_same_draws() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        narrow = Linear(8, 8, generator=torch.Generator().manual_seed(0)).weight
    finally:
        torch.set_default_dtype(torch.float32)
    wide = Linear(8, 8, generator=torch.Generator().manual_seed(0)).weight
    assert torch.equal(narrow, wide.bfloat16())


def test_layer_norm_equals_torch_and_its_spelled_out_form_with_gradients() -> None:
    norm, x = LayerNorm(48, eps=1e-3), (3 + 0.1 * normal(5, 7, 48)).requires_grad_()
    with torch.no_grad():
        norm.gain.copy_(normal(48, seed=1))
        assert norm.bias is not None
        norm.bias.copy_(normal(48, seed=2))
    inputs, upstream = (x, norm.gain, norm.bias), normal(5, 7, 48, seed=3)
    ours = norm(x)
    theirs = torch.nn.functional.layer_norm(x, (48,), norm.gain, norm.bias, 1e-3)
    by_hand = layer_norm_reference(x.double(), norm.gain.double(), norm.bias.double(), 1e-3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, by_hand.float(), rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(by_hand, inputs, upstream.double())
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, upstream), expected, rtol=1e-4, atol=1e-4)


def test_layer_norm_of_bf16_is_rounded_once() -> None:
    x = (100 * normal(4, 1000)).bfloat16()
    assert torch.equal(LayerNorm(1000)(x), LayerNorm(1000)(x.float()).bfloat16())


@pytest.mark.parametrize(("name", "kind"), FEED_FORWARDS.items())
def test_feed_forward_layers_equal_numpy_with_gradients(name: str, kind: type) -> None:
    layer, x = kind(12, 20, bias=True, linears=factory()), (3 * normal(6, 12)).requires_grad_()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * normal(*parameter.shape, seed=4))
    config = SimpleNamespace(feed_forward=name, mup_base_d_model=None, d_model=12)

    def expected(x: oracle.Array) -> oracle.Array:
        weights = {f"f.{name}": double(parameter) for name, parameter in layer.named_parameters()}
        return switches.feed_forward(weights, "f", x, config)

    assert_equals_float64(layer(x), expected(double(x)))
    upstream, way = normal(6, 12, seed=5), normal(6, 12, seed=6)
    (gradient,) = torch.autograd.grad(layer(x), x, upstream)
    ahead, behind = (expected(double(x) + step * double(way)) for step in (1e-6, -1e-6))
    slope = float(((ahead - behind) * double(upstream)).sum()) / 2e-6
    assert float((double(gradient) * double(way)).sum()) == pytest.approx(slope, rel=1e-4)


def test_dropout_drops_its_share_keeps_the_mean_and_passes_all_in_evaluation() -> None:
    torch.manual_seed(0)
    layer, x = Dropout(0.25), torch.ones(200, 500, requires_grad=True)
    out = layer(x)
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert out.mean().item() == pytest.approx(1, abs=0.01)
    assert out.detach().unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], out)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    ("pairing", "scaling"), [("halves", "yarn"), ("interleaved", "none"), ("interleaved", "llama3"), ("halves", "ntk")]
)
def test_rotations_equal_multiplication_by_complex_numbers(pairing: str, scaling: str) -> None:
    x = normal(1, 40, 1, 16)
    settings = {"theta": 500.0, "pairing": pairing, "scaling": scaling, "factor": 4.0, "original_context": 10.0}
    embedding = RotaryEmbedding(16, 40, **settings)  # pyright: ignore[reportArgumentType]
    config = SimpleNamespace(
        rope_theta=500.0,
        rope_pairing=pairing,
        rope_scaling=scaling,
        rope_factor=4.0,
        rope_original_context=10,
        rope_length=None,
    )
    expected = switches.turned(double(x)[0], config)
    assert_equals_float64(embedding.rotate(x, *embedding(40))[0], expected)


def test_matrices_start_with_the_std_of_their_rule() -> None:
    # 0.9866 is the std of a normal distribution cut off at ±3.
    def std(linears: LinearFactory, *shape: int) -> float:
        return linears.linear(*shape).weight.std().item() / 0.9866

    generator = torch.Generator().manual_seed(0)
    fan_in, glorot = (LinearFactory(std=rule, generator=generator) for rule in (fan_in_std, glorot_std))
    assert std(fan_in, 400, 200) == pytest.approx(400**-0.5, rel=0.02)
    assert std(glorot, 400, 200) == pytest.approx((2 / 600) ** 0.5, rel=0.02)
    # Stacked matrices are drawn as each by itself.
    assert std(glorot, 400, 200, 200, 200) == pytest.approx((2 / 600) ** 0.5, rel=0.02)


def test_under_mup_one_adam_step_changes_the_output_equally_at_every_width() -> None:
    def change(width: int) -> float:
        linears = LinearFactory(mup_multiplier=64 / width, generator=torch.Generator().manual_seed(0))
        layer, x = linears.linear(width, width), normal(32, width)
        before = layer(x)
        (gradient,) = torch.autograd.grad((before * normal(32, width, seed=1)).sum(), layer.weight)
        with torch.no_grad():
            layer.weight -= 1e-3 * gradient.sign()
        return (layer(x) - before).square().mean().sqrt().item()

    # With one multiplier for all the change would be 4 times as large at 4 times the width.
    assert change(1024) == pytest.approx(change(256), rel=0.1)


def test_a_multiplied_layer_starts_as_any_other() -> None:
    x = normal(16, 256)
    linears = LinearFactory(mup_multiplier=0.25, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linears.linear(256, 128)(x), factory().linear(256, 128)(x))


def test_attention_by_itself_is_causal_with_rotary_positions() -> None:
    layer, x = CausalSelfAttention(64, 4, 4, linears=factory()), normal(2, 10, 64)
    assert torch.equal(layer(x), layer(x, ForwardContext(RotaryEmbedding(16, 32)(10))))
    # Products of other sizes may be added up in another order.
    torch.testing.assert_close(layer(x[:, :6]), layer(x)[:, :6])
    interleaved = CausalSelfAttention(64, 4, rotate=rotate_interleaved, linears=factory())
    context = ForwardContext(RotaryEmbedding(16, 10, pairing="interleaved")(10))
    assert torch.equal(interleaved(x), interleaved(x, context))
    still = CausalSelfAttention(64, 4, rotate=unrotated, linears=factory())
    assert torch.equal(still(x), still(x, ForwardContext()))
    for sizes, message in [((64, 5), "64 does not divide into n_heads 5"), ((64, 4, 3), "into n_kv_heads 3 groups")]:
        with pytest.raises(NapkinError, match=message):
            CausalSelfAttention(*sizes)


def made_anywhere(device: str | None, dtype: torch.dtype | None) -> dict[str, nn.Module]:
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    parts = BlockParts(CausalSelfAttention(8, 2), SwiGLU(8, 16), lambda: RMSNorm(8), nn.Identity)
    experts = DroplessExperts(SwiGLU, 4, 8, 16, LinearFactory())
    config = ModelConfig(vocab_size=7, context_length=4, d_model=8, n_layers=1, n_heads=2, biases="all", norm="layer")
    return {
        "Linear": Linear(8, 8, bias=True, **place),
        "Embedding": Embedding(8, 8, **place),
        "RMSNorm": RMSNorm(8, **place),
        "LayerNorm": LayerNorm(8, **place),
        "CausalSelfAttention": CausalSelfAttention(8, 2, qkv_bias=True, **place),
        "MixtureOfExperts": MixtureOfExperts(8, experts, experts_per_token=2, **place),
        "SharedMixtureOfExperts": SharedMixtureOfExperts(8, experts, SwiGLU(8, 8), experts_per_token=2, **place),
        "Transformer": Transformer(config, **place),
        **{kind: layer(8, 16, bias=True, **place) for kind, layer in FEED_FORWARDS.items()},
        **{f"{kind} block": block(parts, **place) for kind, block in BLOCKS.items()},
    }


def test_layers_are_made_on_the_device_and_in_the_dtype_that_they_are_given() -> None:
    def places(device: str | None, dtype: torch.dtype | None) -> set[tuple[str, torch.dtype]]:
        made = made_anywhere(device, dtype).values()
        return {(parameter.device.type, parameter.dtype) for layer in made for parameter in layer.parameters()}

    assert places("meta", torch.bfloat16) == {("meta", torch.bfloat16)}
    assert places(None, torch.float64) == {("cpu", torch.float64)}
    assert places("meta", None) == {("meta", torch.float32)}
    assert places(None, None) == {("cpu", torch.float32)}
    assert torch.get_default_dtype() == torch.float32


def test_a_dtype_changes_no_draw() -> None:
    config = ModelConfig(vocab_size=7, context_length=4, d_model=8, n_layers=1, n_heads=2)
    wide, narrow = Transformer(config), Transformer(config, dtype=torch.bfloat16)
    for mine, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(mine, other.bfloat16())
