import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from oracles.numpy_transformer import transformer_logits

SMALL = ModelConfig(vocab_size=61, context_length=16, d_model=32, n_layers=2, n_heads=4)
GROUPED = ModelConfig(
    vocab_size=61, context_length=16, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=40, rope_theta=50.0
)
UNTIED = ModelConfig(
    vocab_size=61, context_length=16, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, tie_embeddings=False
)
CONFIGS = pytest.mark.parametrize("config", [SMALL, GROUPED, UNTIED], ids=["small", "grouped", "untied"])


def random_tokens(config: ModelConfig, batch_size: int = 3, length: int = 13, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def perturbed(config: ModelConfig) -> Transformer:
    """A model whose gains are not all 1 and whose logits are large: a wrong factor anywhere shows."""
    model = Transformer(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@CONFIGS
def test_logits_equal_a_float64_numpy_forward_pass(config: ModelConfig) -> None:
    model, tokens = perturbed(config), random_tokens(config)
    expected = transformer_logits(
        {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()},
        tokens.numpy(),
        n_heads=config.n_heads,
        n_kv_heads=config.resolved_n_kv_heads,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
    )
    logits = model(tokens).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@CONFIGS
def test_loss_and_all_gradients_equal_those_of_full_logits(config: ModelConfig) -> None:
    model, tokens, targets = perturbed(config), random_tokens(config), random_tokens(config, seed=1)
    targets[0, :5] = -1
    parameters = list(model.parameters())
    loss = model.loss(tokens, targets)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for actual, wanted in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_without_gradients_the_head_multiplies_only_what_has_a_target() -> None:
    model, tokens, targets = perturbed(UNTIED), random_tokens(UNTIED), random_tokens(UNTIED, seed=1)
    targets[1:, :6] = -1
    expected = model.loss(tokens, targets).detach()

    def flops_of(targets: Tensor) -> tuple[Tensor, int]:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            return model.loss(tokens, targets), counter.get_total_flops()

    (found, some), (_, all_of_them) = flops_of(targets), flops_of(random_tokens(UNTIED, seed=1))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert all_of_them - some == 2 * int((targets == -1).sum()) * UNTIED.d_model * UNTIED.vocab_size
    assert flops_of(torch.full_like(targets, -1))[0] == 0


@CONFIGS
def test_no_output_depends_on_a_later_token(config: ModelConfig) -> None:
    model, length = perturbed(config), 9
    inputs = []

    def remember(_module: object, _arguments: object, output: Tensor) -> None:
        inputs.append(output)

    hook = model.embedding.register_forward_hook(remember)
    logits = model(random_tokens(config, batch_size=1, length=length))
    hook.remove()
    for position in range(length):
        (gradient,) = torch.autograd.grad(logits[0, position].sum(), inputs[0], retain_graph=True)
        reached = gradient[0].abs().sum(dim=-1)
        assert (reached[: position + 1] > 0).all()
        assert (reached[position + 1 :] == 0).all()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize(
    ("vocab_size", "d_model", "n_layers"), [(64, 64, 2), (4096, 256, 4), (512, 128, 8), (50000, 768, 2)]
)
def test_the_first_loss_is_within_2_percent_of_guessing(
    vocab_size: int, d_model: int, n_layers: int, tie_embeddings: bool
) -> None:
    config = ModelConfig(vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, tie_embeddings=tie_embeddings)
    tokens = random_tokens(config, batch_size=2, length=129)
    with torch.no_grad():
        loss = Transformer(config).loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(vocab_size), rel=0.02)


def test_one_batch_can_be_learnt_by_heart() -> None:
    model, tokens = Transformer(SMALL), random_tokens(SMALL, length=17)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    assert model.loss(tokens[:, :-1], tokens[:, 1:]).item() < 0.05


@CONFIGS
def test_the_parameter_count_has_a_closed_form(config: ModelConfig) -> None:
    kv_dim = config.resolved_n_kv_heads * config.resolved_head_dim
    attention = 2 * config.d_model**2 + 2 * config.d_model * kv_dim
    block = attention + 3 * config.d_model * config.resolved_d_ff + 2 * config.d_model
    vocabulary = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    expected = config.n_layers * block + vocabulary + config.d_model
    assert sum(p.numel() for p in Transformer(config).parameters()) == expected


def test_parameters_are_a_pure_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    first = Transformer(SMALL, seed=7).state_dict()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again, other = Transformer(SMALL, seed=7).state_dict(), Transformer(SMALL, seed=8).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if not name.endswith("gain"))


def test_what_writes_into_the_residual_stream_starts_smaller_with_depth() -> None:
    config = ModelConfig(vocab_size=512, d_model=128, n_layers=8)
    for name, parameter in Transformer(config).named_parameters():
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            # 0.9866 is the std of a normal distribution cut off at ±3.
            expected = 0.9866 / math.sqrt(parameter.shape[1] * 2 * config.n_layers)
            assert parameter.std().item() == pytest.approx(expected, rel=0.03)


def test_a_checkpoint_holds_parameters_and_nothing_that_follows_from_the_config() -> None:
    model = Transformer(SMALL)
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(NapkinError, match="17 tokens exceeds context_length 16"):
        Transformer(SMALL)(random_tokens(SMALL, length=17))


def train_step(model: Transformer, config: ModelConfig) -> Tensor:
    tokens = torch.zeros(3, 13, dtype=torch.int64)
    loss = model.loss(tokens, tokens)
    loss.backward()
    return loss


@pytest.mark.sampled(every=3)
@CONFIGS
@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_traces_on_fake_tensors(config: ModelConfig, autocast: bool) -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model = Transformer(config)
        loss = train_step(model, config)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_a_model_of_70_billion_parameters_can_be_built_without_memory() -> None:
    config = ModelConfig(
        vocab_size=128256, context_length=8192, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28672,
        tie_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        on_meta = Transformer(config)
    with FakeTensorMode():
        fake = Transformer(config)
    for model in (on_meta, fake):
        # Llama 3 70B's own count.
        assert sum(p.numel() for p in model.parameters()) == 70_553_706_496


@CONFIGS
def test_bf16_autocast_stays_within_its_resolution_of_fp32(config: ModelConfig) -> None:
    model, tokens, targets = Transformer(config), random_tokens(config), random_tokens(config, seed=1)
    parameters = list(model.parameters())
    exact_loss = model.loss(tokens, targets)
    exact = torch.autograd.grad(exact_loss, parameters)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, exact_loss, rtol=2e-3, atol=0)
    for actual, expected in zip(torch.autograd.grad(loss, parameters), exact, strict=True):
        # A dozen roundings of 2^-9 each, in quadrature, and some room.
        assert (actual - expected).norm() < 0.03 * expected.norm()


def test_a_model_without_its_tokenizers_vocabulary_is_refused() -> None:
    with pytest.raises(NapkinError, match="vocab_size is 0"):
        Transformer(ModelConfig())
