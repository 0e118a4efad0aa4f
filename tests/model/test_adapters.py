"""Adapters compute what merged matrices do, train only themselves, and start as nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from napkin.errors import NapkinError
from napkin.kernels.products.linear import narrow_linear
from napkin.model.adapters import adapted_layers, adapters_off, add_adapters, merge_adapters
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import hold_frozen_narrow
from napkin.model.transformer import Transformer

SIZES: dict[str, Any] = {"vocab_size": 31, "context_length": 16, "d_model": 24, "n_layers": 2, "n_heads": 4}
SIZES["tie_embeddings"] = False
CONFIGS = {
    "llama": ModelConfig(**SIZES, n_kv_heads=2),
    "gpt2": ModelConfig(**SIZES, feed_forward="gelu_tanh", norm="layer", biases="all", positions="learned"),
    "mup": ModelConfig(**SIZES, mup_base_d_model=8, block="parallel", biases="qkv"),
}
MODULES = {
    "all": ("attention", "mlp", "head"),
    "query and value": ("attention.query", "attention.value"),
    "one": ("mlp.up",),
}
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 31, (2, 12)))


def adapted(config: ModelConfig, modules: tuple[str, ...], *, with_magnitude: bool, dtype: torch.dtype) -> Transformer:
    """A model whose adapters do something."""
    model = Transformer(config, dtype=dtype)
    add_adapters(model, rank=3, alpha=7.0, modules=modules, with_magnitude=with_magnitude)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, _, adapter in adapted_layers(model):
            adapter.b.copy_(torch.randn(adapter.b.shape, generator=generator) * 0.3)
            if adapter.magnitude is not None:
                adapter.magnitude *= torch.rand(adapter.magnitude.shape, generator=generator) + 0.5
    return model


def numpy_heights(config: ModelConfig, layer: str) -> dict[str, int]:
    """The matrices that are stacked in a layer, from the top."""
    head_dim, kv = config.resolved_head_dim, config.resolved_n_kv_heads
    return {
        "query_key_value": {
            "attention.query": config.n_heads * head_dim,
            "attention.key": kv * head_dim,
            "attention.value": kv * head_dim,
        },
        "output": {"attention.output": config.d_model},
        "gate_up": {"mlp.gate": config.resolved_d_ff, "mlp.up": config.resolved_d_ff},
        "up": {"mlp.up": config.resolved_d_ff},
        "down": {"mlp.down": config.d_model},
        "head": {"head": config.vocab_size},
    }[layer.rpartition(".")[2]]


def numpy_merged(model: Transformer, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights of a plain model that does the same, by the papers' equations in NumPy."""
    groups = {
        "attention": ["attention.query", "attention.key", "attention.value", "attention.output"],
        "mlp": ["mlp.gate", "mlp.up", "mlp.down"],
    }
    wanted = {each for name in modules for each in groups.get(name, [name])}
    state = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    merged = {name: array.copy() for name, array in state.items() if ".adapter." not in name}
    for name in [name.removesuffix(".adapter.a") for name in state if name.endswith(".adapter.a")]:
        a, b, magnitude = (state.get(f"{name}.adapter.{each}") for each in ("a", "b", "magnitude"))
        assert a is not None
        assert b is not None
        row = taken = done = 0
        for matrix, height in numpy_heights(model.config, name).items():
            if matrix in wanted:
                whole = (
                    state[f"{name}.weight"][row : row + height]
                    + 7.0 / 3 * b[done : done + height] @ a[taken : taken + 3]
                )
                if magnitude is not None:
                    lengths = np.sqrt((whole**2).sum(axis=1))
                    whole = whole * (magnitude[done : done + height] / lengths)[:, None]
                merged[f"{name}.weight"][row : row + height] = whole
                taken, done = taken + 3, done + height
            row += height
    return {name: torch.from_numpy(array) for name, array in merged.items()}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("with_magnitude", [False, True])
@pytest.mark.parametrize("modules", MODULES)
def test_adapters_compute_what_merged_matrices_do(config: str, with_magnitude: bool, modules: str) -> None:
    model = adapted(CONFIGS[config], MODULES[modules], with_magnitude=with_magnitude, dtype=torch.float64)
    plain = Transformer(CONFIGS[config], dtype=torch.float64)
    expected = numpy_merged(model, MODULES[modules])
    plain.load_state_dict(expected)
    assert (model(TOKENS) - plain(TOKENS)).abs().max() < 1e-12
    assert (model.loss(TOKENS[:, :-1], TOKENS[:, 1:]) - plain.loss(TOKENS[:, :-1], TOKENS[:, 1:])).abs() < 1e-12
    before = Transformer(CONFIGS[config], dtype=torch.float64)(TOKENS)
    with adapters_off(model):
        assert torch.equal(model(TOKENS), before)
    assert not torch.equal(model(TOKENS), before)
    merge_adapters(model)
    assert model.state_dict().keys() == expected.keys()
    assert all((tensor - expected[name]).abs().max() < 1e-12 for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("with_magnitude", [False, True])
def test_gradients_are_those_of_the_formula(with_magnitude: bool) -> None:
    """By autograd through the merged matrix, whose norm is a constant."""
    config, modules = CONFIGS["llama"], ("attention", "mlp.down", "head")
    model = adapted(config, modules, with_magnitude=with_magnitude, dtype=torch.float64)
    places, targets = torch.arange(20), TOKENS.flatten()[1:21]
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all(".adapter." in name for name in trained)

    def objective(scores: Any) -> torch.Tensor:
        return scores.log_probabilities.sum() + 0.3 * scores.entropies.sum()

    objective(model.token_scores(TOKENS, places, targets)).backward()
    plain = Transformer(config, dtype=torch.float64)
    leaves = {name: each.detach().clone().requires_grad_() for name, each in trained.items()}
    weights = {}
    for name, weight in plain.named_parameters():
        weights[name] = weight
        layer = name.removesuffix(".weight")
        if f"{layer}.adapter.a" not in leaves:
            continue
        a, b = leaves[f"{layer}.adapter.a"], leaves[f"{layer}.adapter.b"]
        heights = list(numpy_heights(config, layer).values())
        added = torch.cat([7.0 / 3 * rows @ each for rows, each in zip(b.split(heights), a.split(3), strict=True)])
        whole = weight.detach() + added
        if with_magnitude:
            whole = whole / whole.detach().norm(dim=1, keepdim=True) * leaves[f"{layer}.adapter.magnitude"][:, None]
        weights[name] = whole
    logits = functional_call(plain, weights, (TOKENS,)).flatten(0, 1)[places]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None]).sum()
    (chosen - 0.3 * (logprobs.exp() * logprobs).sum()).backward()
    for name, leaf in leaves.items():
        found = trained[name].grad
        assert found is not None
        assert leaf.grad is not None
        assert (found - leaf.grad).norm() <= 1e-10 * leaf.grad.norm(), name
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in trained)


def test_a_model_starts_as_it_was() -> None:
    plain = Transformer(CONFIGS["llama"])(TOKENS)
    for with_magnitude in (False, True):
        model = Transformer(CONFIGS["llama"])
        add_adapters(model, rank=2, with_magnitude=with_magnitude, modules=("attention", "mlp"))
        assert torch.allclose(model(TOKENS), plain, rtol=0, atol=1e-5 if with_magnitude else 0)
        spreads = [float(adapter.a.detach().std()) for _, _, adapter in adapted_layers(model)]
        assert all(0.8 < spread * (3 * 24) ** 0.5 < 1.2 for spread in spreads[:2])


def test_frozen_matrices_held_in_bf16_make_the_same_products() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for modules in (("attention", "mlp"), ("attention", "mlp", "head")):
            model = adapted(CONFIGS["mup"], modules, with_magnitude=False, dtype=torch.float32)
            before = model(TOKENS)
            hold_frozen_narrow(model, torch.bfloat16)
            assert model.blocks[0].attention.output.weight.dtype == torch.bfloat16  # pyright: ignore
            assert model.embedding.weight.dtype == torch.float32
            # The head's matrix with its adapter is made of the held one.
            assert torch.allclose(model(TOKENS), before, atol=0 if "head" not in modules else 0.05)
    # Without autocast, products are in the input's format.
    assert model(TOKENS).dtype == torch.float32


@pytest.mark.parametrize(
    ("modules", "changes", "message"),
    [
        (("atention",), {}, "did you mean 'attention'"),
        (("mlp.gate",), {"feed_forward": "gelu"}, "does not have as a matrix of its own"),
        (("head",), {"tie_embeddings": True}, "does not have as a matrix of its own"),
        (("attention", "mlp"), {"n_experts": 4}, "experts get no adapters: use attention"),
    ],
)
def test_what_has_no_adapter_is_named(modules: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    model = Transformer(ModelConfig(**SIZES | changes))
    with pytest.raises(NapkinError, match=message):
        add_adapters(model, modules=modules)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_frozen_matrix_in_8_bits_has_no_product_of_its_gradient(precision: Any) -> None:
    multiply, generator = narrow_linear(precision, "emulated"), torch.Generator().manual_seed(0)
    x, weight = torch.randn(48, 32, generator=generator), torch.randn(16, 32, generator=generator)
    flops, gradients = [], []
    for trained in (True, False):
        read = x.clone().requires_grad_()
        out = multiply(read, weight.clone().requires_grad_(trained), None)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        flops.append(counter.get_total_flops())
        gradients.append(read.grad)
    assert flops == [2 * flops[1], 2 * 48 * 32 * 16]
    assert torch.equal(*gradients)
