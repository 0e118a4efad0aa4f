import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting import count
from napkin.errors import NapkinError
from napkin.inference.generation import cache_for, generate, prefill
from napkin.inference.settings import Sampling
from napkin.kernels.products.quantized import integer_product
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import ContiguousCache
from napkin.model.layers import Linear
from napkin.model.quantized import Format, Int4Linear, Int8Linear, QuantizedLinear, quantize_model, quantized_twin
from napkin.model.transformer import Transformer
from oracles.model_switches import config_of, disturbed, random_tokens

SHAPES = [(128, 64, 32), (61, 128, 64), (192, 320, 32), (64, 256, 256), (80, 100, 32), (48, 150, 16)]


def random_weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def layers(rows: int, columns: int, group_size: int) -> list[QuantizedLinear]:
    weight, bias = random_weight(rows, columns), {"bias": torch.linspace(-1, 1, rows)}
    return [
        Int8Linear(rows, columns, Int8Linear.quantized(weight) | bias),
        Int4Linear(rows, columns, Int4Linear.quantized(weight, group_size) | bias),
    ]


@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
@pytest.mark.parametrize("n_vectors", [1, 3, 8, 20])
def test_products_are_those_of_the_weights_that_the_integers_stand_for(
    rows: int, columns: int, group_size: int, n_vectors: int
) -> None:
    x = torch.randn(n_vectors, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for layer in layers(rows, columns, group_size):
        assert layer.has_compiled_loop == (columns % 32 == 0 if isinstance(layer, Int8Linear) else group_size >= 32)
        assert layer.bias is not None
        expected = x.double() @ layer.weight.double().T + layer.bias
        result = layer(x[None])[0].double()
        # bf16 rounds the result and, where they are made again, the weights, each by up to 2^-9.
        assert (result - expected).norm() < 2**-7 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n_vectors", [2, 3, 16])
@pytest.mark.parametrize(("rows", "columns", "group_size"), [(131, 160, 32), (40, 576, 64), (41, 384, 128)])
def test_a_product_with_its_bias_is_rounded_once_and_the_same_for_each_vector_alone(
    rows: int, columns: int, group_size: int, n_vectors: int, dtype: torch.dtype
) -> None:
    x = torch.randn(n_vectors, columns, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for layer in layers(rows, columns, group_size):
        assert layer.bias is not None
        layer.bias = layer.bias.to(dtype)
        result = layer(x)
        alone = torch.cat([layer(each) for each in x.split(1)])
        assert torch.equal(result, alone)
        whole = layer.values * layer.scales.float().unsqueeze(-1) if isinstance(layer, Int8Linear) else None
        exact = layer.exact_weight() if isinstance(layer, Int4Linear) else whole
        assert exact is not None
        expected = x.double() @ exact.double().T + layer.bias.double()
        # A number of x is off by up to 1/65534 of the largest of 32, and bf16 rounds by up to 2^-8.
        bound = x.double().abs().amax() * exact.double().abs().sum(dim=1) / 65534 + 2**-8 * expected.abs()
        assert ((result.double() - expected).abs() <= 1.01 * bound).all()


@pytest.mark.parametrize("largest", [1.0, 100.0, 10_000.0])
@pytest.mark.parametrize(("n_vectors", "rows", "columns", "group_size"), [(3, 45, 544, 64), (70, 66, 1056, 128)])
def test_products_with_vectors_in_fp32_are_off_by_the_rounding_of_32_numbers_and_no_more(
    n_vectors: int, rows: int, columns: int, group_size: int, largest: float
) -> None:
    x = torch.randn(n_vectors, columns, generator=torch.Generator().manual_seed(3))
    x[:, 7] *= largest
    for layer in layers(rows, columns, group_size):
        whole = layer.values * layer.scales.float().unsqueeze(-1) if isinstance(layer, Int8Linear) else None
        exact = layer.exact_weight() if isinstance(layer, Int4Linear) else whole
        assert exact is not None
        with torch.inference_mode():
            result = integer_product(x, layer.values, layer.scales, layer.middles, None, layer.bias)
        assert layer.bias is not None
        expected = x.double() @ exact.double().T + layer.bias.double()
        pieces = x.double().abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, dim=1)
        filled = exact.double().abs()
        # Rounding of numbers, and sums in fp32 of terms that are up to 16 scales.
        bound = pieces @ filled.T / 65534 + 2**-18 * (x.double().abs() @ filled.T)
        assert ((result.double() - expected).abs() <= 1.01 * bound + 1e-6).all()


@pytest.mark.parametrize(("rows", "columns", "group_size"), [(70, 544, 32), (39, 1056, 96), (1030, 768, 64)])
def test_a_product_in_fp32_depends_neither_on_other_vectors_nor_on_threads(
    rows: int, columns: int, group_size: int
) -> None:
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(4))
    x[:, 7] *= 100
    threads = torch.get_num_threads()
    for layer in layers(rows, columns, group_size):
        others = layer.values, layer.scales, layer.middles, None, None
        alone = torch.cat([integer_product(each, *others) for each in x.split(1)])
        try:
            for n_threads in (1, 2):
                torch.set_num_threads(n_threads)
                for n_vectors in (2, 5, 9):
                    assert torch.equal(integer_product(x[:n_vectors], *others), alone[:n_vectors])
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_each_weight_is_the_nearest_of_its_group(rows: int, columns: int, group_size: int) -> None:
    weight = random_weight(rows, columns)
    whole, half = layers(rows, columns, group_size)
    assert isinstance(half, Int4Linear)
    for layer, steps, size in ((whole, 254, columns), (half, 15, group_size)):
        filled = torch.cat((weight, weight[:, -1:].expand(-1, -columns % size)), dim=1)
        groups = filled.unflatten(1, (-1, size)).double()
        least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        spread = 2 * groups.abs().amax(2, keepdim=True) if steps == 254 else most - least
        error = (layer.weight.double() - weight).abs()
        # Half a step, and the rounding to bf16 of scale, middle and weight.
        most = (spread / steps / 2 + 2**-7 * groups.abs().amax(2, keepdim=True)).expand_as(groups)
        assert (error <= most.flatten(1)[:, :columns]).all()
    # Two in a byte, column by column.
    assert half.middles is not None
    low, high = half.values & 15, half.values >> 4
    for column in range(0, 8):
        integers = (high if column % 2 else low)[:, column // 2].double()
        made = (integers - 8) * half.scales[:, 0].double() + half.middles[:, 0].double()
        torch.testing.assert_close(made.to(torch.bfloat16), half.weight[:, column])


def twin_in_bf16(model: Transformer, quantized: Transformer) -> Transformer:
    """The model with the quantized weights as ordinary ones."""
    twin = copy.deepcopy(model)
    made = dict(quantized.blocks.named_modules())
    with torch.no_grad():
        for name, layer in twin.blocks.named_modules():
            other = made[name]
            if isinstance(layer, Linear) and isinstance(other, QuantizedLinear):
                layer.weight.copy_(other.weight.float() / getattr(layer, "multiplier", 1.0))
        twin.head_weight.copy_(quantized.head_weight)
    return twin.to(torch.bfloat16).eval()


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize(
    "switch", ["default", "untied", "window", "experts_shared", "mup_untied_biases", "logit_softcap"]
)
@torch.no_grad()
def test_a_quantized_model_is_the_model_of_its_weights(switch: str, to: Format) -> None:
    changes: dict[str, Any] = {"d_expert": 32} if switch == "experts_shared" else {}
    model = disturbed(config_of(switch, d_model=64, d_ff=128, context_length=40, **changes)).eval()
    quantized = copy.deepcopy(model)
    quantize_model(quantized, to, group_size=32)
    tokens = random_tokens(model.config, length=12)
    expected = twin_in_bf16(model, quantized)(tokens).float()
    assert (quantized(tokens).float() - expected).norm() < 0.04 * expected.norm()
    # And near the model itself, but not it.
    exact = model(tokens)
    error = (quantized(tokens).float() - exact).norm() / exact.norm()
    assert 0 < error < (0.1 if to == "int8" else 0.6)


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_quantized_model_generates_with_a_cache_and_from_its_state(to: Format) -> None:
    model = disturbed(config_of("default", d_model=64, d_ff=128, context_length=40)).eval()
    quantized = copy.deepcopy(model)
    quantize_model(quantized, to, group_size=32)
    prompt, greedy = random_tokens(model.config, 1, 9)[0].tolist(), Sampling(temperature=0)
    ids = list(generate(quantized, prompt, 12, greedy))
    logits = prefill(quantized, [prompt], cache_for(quantized, 1, 40))
    assert ids[0] == int(logits.argmax())
    state = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    again = Transformer(model.config, seed=9)
    quantized_twin(again, to, state)
    again.load_state_dict(state)
    assert list(generate(again, prompt, 12, greedy)) == ids
    state["blocks.0.attention.output.scales"] = state["blocks.0.attention.output.scales"][:-1]
    with pytest.raises(ValueError, match=r"attention\.output"):
        quantized_twin(Transformer(model.config), to, state)


def test_an_odd_group_is_refused_and_the_model_stays() -> None:
    model = Transformer(config_of("default"))
    with pytest.raises(NapkinError, match=r"groups.*7 numbers: use"):
        quantize_model(model, "int4", group_size=7)
    assert model.embedding.weight.dtype == torch.float32
    assert all(not isinstance(layer, QuantizedLinear) for layer in model.modules())


@pytest.mark.parametrize(("to", "bytes_per_weight"), [("int8", 1.0), ("int4", 0.5)])
def test_a_decode_step_is_counted_with_the_bytes_of_its_integers(to: Format, bytes_per_weight: float) -> None:
    config = ModelConfig(vocab_size=256, context_length=64, d_model=128, n_layers=2, n_heads=2, d_ff=256)

    def step(model: torch.nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(model, Transformer)
        cache = ContiguousCache(config, capacity=8, dtype=torch.bfloat16)
        with torch.no_grad():
            return model.logits_of(model.hidden(ids, cache=cache.extend(1)))

    with FakeTensorMode():
        model = Transformer(config, dtype=torch.bfloat16)
        quantize_model(model, to, group_size=64)
        ledger = count(model, torch.zeros(1, 1, dtype=torch.int64), step, warm_up=0)
    products = [row for row in ledger.rows if row.operator == "integer_product"]
    blocks = 2 * (128 * 3 * 128 + 128 * 128 + 2 * 128 * 256 + 256 * 128)
    head = 256 * 128
    assert sum(row.flops for row in products) == 2 * (blocks + head)
    read = sum(row.bytes_read for row in products)
    scales = 2 * (blocks / 64 * 2 if to == "int4" else 2 * (3 * 128 + 128 + 2 * 256 + 128)) + 2 * 256
    vectors = 2 * (2 * (128 + 128 + 128 + 256) + 128)
    assert read == blocks * bytes_per_weight + head + scales + vectors
