import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.model import config as names
from napkin.model.attention import CausalSelfAttention, PlainAttention
from napkin.model.block import BLOCKS
from napkin.model.config import ModelConfig
from napkin.model.feed_forward import FEED_FORWARDS
from napkin.model.layers import INITIAL_STDS
from napkin.model.norm import NORMS, QK_NORMS
from napkin.model.positions import PAIRINGS, ROPE_SCALINGS
from napkin.model.transformer import Transformer
from oracles import numpy_switches as oracle
from oracles.model_switches import BASE, SWITCHES, config_of, disturbed, random_tokens

EVERY_SWITCH = pytest.mark.parametrize("switch", SWITCHES)


def doubles(model: Transformer) -> dict[str, oracle.Array]:
    return {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.sampled(every=3)
@EVERY_SWITCH
def test_logits_equal_those_of_float64_numpy(switch: str) -> None:
    config = config_of(switch)
    model, tokens = disturbed(config).eval(), random_tokens(config)
    expected = oracle.logits(doubles(model), tokens.numpy(), config)
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sampled(every=6)
@EVERY_SWITCH
def test_gradients_equal_finite_differences_of_the_float64_numpy_loss(switch: str) -> None:
    config = config_of(switch, dropout=0.0, n_layers=1, n_dense_layers=0)
    model, tokens, targets = disturbed(config), random_tokens(config, 1, 5), random_tokens(config, 1, 5, seed=1)
    loss = model.loss(tokens, targets)
    loss.backward()
    weights = doubles(model)
    assert loss.item() == pytest.approx(oracle.loss(weights, tokens.numpy(), targets.numpy(), config), rel=1e-5)

    # Along a random way through each parameter, so that each gradient is seen by itself.
    generator = np.random.default_rng(0)
    slopes, scales = [], []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        way = generator.standard_normal(weights[name].shape)
        ahead, behind = (
            oracle.loss({**weights, name: weights[name] + step * way}, tokens.numpy(), targets.numpy(), config)
            for step in (1e-5, -1e-5)
        )
        gradient = parameter.grad.double().numpy()
        slopes.append((float((gradient * way).sum()), (ahead - behind) / 2e-5))
        scales.append(float(np.linalg.norm(gradient)))
    for (actual, expected), scale in zip(slopes, scales, strict=True):
        assert actual == pytest.approx(expected, abs=1e-4 * scale + 1e-6)


@pytest.mark.sampled(every=3)
@EVERY_SWITCH
def test_bf16_autocast_stays_within_its_resolution_of_fp32(switch: str) -> None:
    config = config_of(switch, dropout=0.0)
    model = Transformer(config)
    tokens, targets = random_tokens(config), random_tokens(config, seed=1)
    exact = model.loss(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, exact, rtol=2e-3, atol=0)
    gradients = (torch.autograd.grad(each, list(model.parameters())) for each in (loss, exact))
    # Two dozen roundings of 2^-9 each, in quadrature, and room for gradients that almost cancel. Which experts a token
    # visits is a step function: where two are almost equal, rounding may choose the other, and in another group both.
    tolerance = (0.6 if config.n_expert_groups > 1 else 0.3) if config.n_experts else 0.06
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.sampled(every=3)
@EVERY_SWITCH
def test_the_first_loss_is_within_2_percent_of_guessing(switch: str) -> None:
    # As wide as a model is; at 24 numbers chance alone is 2%.
    config = config_of(switch, vocab_size=4096, d_model=120, d_ff=96, mup_base_d_model=None, head_dim=None)
    if "mup" in switch:
        config = dataclasses.replace(config, mup_base_d_model=40)
    tokens = random_tokens(config, batch_size=16, length=17)
    with torch.no_grad():
        loss = Transformer(config).eval().loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(4096), rel=0.02)


IN_EVERY_RUN = ("block_post", "positions_alibi", "experts_capacity", "feed_forward_relu_squared", "dropout", "mup")


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    "switch",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.torture)
        for name in SWITCHES
        # Capped logits leave no word likely; without norms this rate of learning is too large.
        if name not in ("logit_softcap", "norm_none")
    ],
)
def test_one_batch_can_be_learnt_by_heart(switch: str) -> None:
    config = config_of(switch)
    torch.manual_seed(0)
    model, tokens = Transformer(config), random_tokens(config, length=17)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(80):
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    assert model.eval().loss(tokens[:, :-1], tokens[:, 1:]).item() < 0.05


def reached(model: Transformer, tokens: Tensor, documents: Tensor | None = None) -> list[list[list[bool]]]:
    """Whether the logits of each position have a gradient with respect to each position's embedding."""
    inputs: list[Tensor] = []

    def remember(_module: object, _arguments: object, output: Tensor) -> None:
        inputs.append(output)

    hook = model.embedding.register_forward_hook(remember)
    logits = model(tokens, documents)
    hook.remove()
    rows = []
    for position in range(tokens.shape[1]):
        (gradient,) = torch.autograd.grad(logits[:, position].sum(), inputs[0], retain_graph=True)
        rows.append((gradient.abs().sum(dim=-1) > 0).tolist())
    return [[row[sequence] for row in rows] for sequence in range(len(tokens))]


@pytest.mark.sampled(every=2)
@EVERY_SWITCH
def test_no_output_depends_on_a_later_token(switch: str) -> None:
    config = config_of(switch, expert_capacity=None)
    model = disturbed(config).eval()
    narrow = None if config.full_attention_every else config.attention_window
    # Layers that share keys see those of the first of them.
    window = config.n_kv_layers * ((narrow or 99) - 1)
    for sight in reached(model, random_tokens(config)):
        # Two layers see twice as far as one: what a window's tokens saw reaches beyond it.
        assert sight == [[t - window <= s <= t for s in range(9)] for t in range(9)]


def test_one_layer_sees_its_window_and_no_further() -> None:
    for form in ("sdpa", "plain", "flex", "flash", "compiled"):
        config = dataclasses.replace(BASE, n_layers=1, attention_window=3, attention=form)
        for sight in reached(disturbed(config), random_tokens(config)):
            assert sight == [[t - 2 <= s <= t for s in range(9)] for t in range(9)]


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [7, 8, 8, 8, 8, 8, 5, 5, 5]])


@pytest.mark.sampled(every=3)
@EVERY_SWITCH
def test_packed_documents_do_not_see_each_other(switch: str) -> None:
    config = config_of(switch, expert_capacity=None, attention_window=None, full_attention_every=None)
    model = disturbed(config).eval()
    for sight, documents in zip(reached(model, random_tokens(config), DOCUMENTS), DOCUMENTS.tolist(), strict=True):
        assert sight == [[s <= t and documents[s] == documents[t] for s in range(9)] for t in range(9)]


@pytest.mark.sampled(every=5)
@EVERY_SWITCH
def test_a_packed_document_gives_the_logits_that_it_gives_alone(switch: str) -> None:
    config = config_of(switch, expert_capacity=None)
    model, tokens = disturbed(config).eval(), random_tokens(config)
    with torch.no_grad():
        packed = model(tokens, DOCUMENTS)
        for row, documents in enumerate(DOCUMENTS):
            for document in documents.unique():
                own = documents == document
                alone = model(tokens[row, own][None])[0]
                torch.testing.assert_close(packed[row, own], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(every=2)
@EVERY_SWITCH
def test_parameters_are_a_pure_function_of_the_seed(switch: str) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again, other = (Transformer(config_of(switch), seed=seed).state_dict() for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[n], other[n]) for n in first if not n.endswith(("gain", "bias")))


@pytest.mark.parametrize(
    ("names_in_config", "table"),
    [
        (names.RopePairing, PAIRINGS),
        (names.RopeScaling, ROPE_SCALINGS),
        (names.QKNorm, QK_NORMS),
        (names.FeedForwardKind, {**FEED_FORWARDS, "none": None}),
        (names.NormKind, NORMS),
        (names.BlockKind, BLOCKS),
        (names.InitialStd, {**INITIAL_STDS, "fixed": None}),
    ],
)
def test_every_name_of_the_config_has_its_line_in_a_table(names_in_config: Any, table: dict[str, Any]) -> None:
    assert set(names_in_config.__args__) == set(table)


def test_every_field_of_the_config_is_a_switch_that_is_tested() -> None:
    sizes = "vocab_size context_length d_model n_layers n_heads d_ff norm_eps balance_weight router_z_weight init_std"
    # Layers with a state: tests/model/test_state_space.py.
    states = "mixers state_size state_heads state_head_dim state_groups conv_width"
    switched = {name for changes in SWITCHES.values() for name in changes}
    assert {field.name for field in dataclasses.fields(ModelConfig)} == switched | {*sizes.split(), *states.split()}


def test_the_plain_form_is_what_its_name_says() -> None:
    attention = Transformer(dataclasses.replace(BASE, attention="plain")).get_submodule("blocks.0.attention")
    assert isinstance(attention, CausalSelfAttention)
    assert type(attention.attend) is PlainAttention
