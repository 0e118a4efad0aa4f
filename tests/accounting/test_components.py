"""What a step's FLOPs are spent on, told by module and meaning: attention is found however it is written."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin import Ledger, count
from napkin.accounting.operators import work_of
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.planner import plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from oracles.torch_models import GPT2, Llama

BATCH, LENGTH, WIDTH, LAYERS = 2, 64, 64, 2
TOKENS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
# Both products over all pairs, once forward and twice backward.
ATTENTION = 12 * LAYERS * WIDTH * LENGTH * BATCH * LENGTH


def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    model.loss(*batch).backward()  # pyright: ignore[reportCallIssue]


def transformer(**fields: object) -> Transformer:
    config = ModelConfig(512, LENGTH, d_model=WIDTH, n_layers=LAYERS, n_heads=4, **fields)  # pyright: ignore[reportArgumentType]
    return Transformer(config)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("attention", ["plain", "sdpa", "flex", "flash", "compiled"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_is_found_however_the_model_computes_it(attention: str, kv_heads: int):
    ledger = count(transformer(attention=attention, n_kv_heads=kv_heads), (TOKENS, TOKENS), train)
    assert ledger.attention_flops == ledger.flops_by("component")["attention scores"] == ATTENTION


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8"])
def test_weights_that_are_cast_or_quantised_are_still_parameters(precision: str):
    recipe = Recipe(
        model=ModelConfig(512, LENGTH, d_model=WIDTH, n_layers=LAYERS, n_heads=4, attention="plain"),
        training=TrainingConfig(batch_size=BATCH, precision=precision, device="cpu", recompute="full"),  # pyright: ignore[reportArgumentType]
    )
    planned = plan(recipe, on="H100-SXM-80GB")
    assert planned.ledger.attention_flops == ATTENTION
    share = f"{ATTENTION / planned.ledger.flops:.1%}"
    assert f"attention over all pairs, {share} of count" in planned.table()[1].note


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("build", [GPT2, Llama])
def test_attention_of_other_peoples_models_is_found(build: Callable[..., nn.Module], checkpointing: bool):
    model = build(512, LENGTH, LAYERS, WIDTH, 4, checkpointing=checkpointing)
    ledger = count(model, (TOKENS, TOKENS), optimizer=torch.optim.AdamW)
    assert ledger.attention_flops == ATTENTION
    assert ledger.flops_by("component")["head"] == 6 * BATCH * LENGTH * WIDTH * 512


class SelfAttention(nn.Module):
    """As Hugging Face's models write it: matmul, and tables of angles that are products of buffers."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("frequencies", torch.ones(1, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (4, 16)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        angles = (self.frequencies @ torch.arange(x.shape[1]).float()[None, None]).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        weights = ((q * angles.cos()) @ (k * angles.sin()).transpose(-1, -2)).float().softmax(-1).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class TorchsOwn(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [SelfAttention, lambda: TorchsOwn(WIDTH, 4, batch_first=True)])
def test_attention_by_matrix_products_is_found_by_what_it_multiplies(
    build: Callable[[], nn.Module], dtype: torch.dtype
):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = build()

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)

    def step(model: nn.Module, x: Tensor) -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(x).float().sum().backward()

    ledger = count(Block(), torch.zeros(BATCH, LENGTH, WIDTH), step)
    assert ledger.attention_flops == ATTENTION // LAYERS
    components = ledger.flops_by("component")
    assert components["attention scores"] == ATTENTION // LAYERS
    # The first layer's input needs no gradient; a table of angles is one more product with what is learned or fixed.
    table = components["attention projections"] - (4 * 3 - 3) * 2 * BATCH * LENGTH * WIDTH**2
    assert table in (0, 2 * 8 * LENGTH)


def test_products_with_batched_parameters_are_not_attention():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.ones(4, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.weights * torch.tensor(2.0)) + torch.bmm(x, self.weights.bfloat16().float())

    assert count(Experts(), torch.zeros(4, 8, WIDTH)).attention_flops == 0


def components_of(ledger: Ledger) -> dict[str, int]:
    return {name: flops for name, flops in ledger.flops_by("component").items() if flops}


def test_a_step_is_divided_among_its_components():
    products = 6 * BATCH * LENGTH * WIDTH
    ledger = count(transformer(attention="plain", d_ff=128), (TOKENS, TOKENS), train)
    assert components_of(ledger) == {
        "head": products * 512,
        "feed-forward": products * LAYERS * 3 * 128,
        "attention projections": products * LAYERS * 4 * WIDTH,
        "attention scores": ATTENTION,
    }
    calls = {row.component for row in ledger.rows}
    assert calls == {*components_of(ledger), "embedding", "norms", "loss", "other"}


@pytest.mark.parametrize("chunk_size", [16, 1024])
def test_the_heads_gradient_belongs_to_the_backward_pass(chunk_size: int):
    model = transformer()
    model.loss_chunk_size = chunk_size
    ledger = count(model, (TOKENS, TOKENS), train)
    assert ledger.backward_flops == 2 * ledger.forward_flops
    early = [row for row in ledger.rows if row.early]
    assert sum(row.flops for row in early) == 4 * BATCH * LENGTH * WIDTH * 512
    assert {row.phase for row in early} == {"backward"}


def test_a_product_of_complex_numbers_is_four_of_real_ones():
    x, y = torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(4, 5, dtype=torch.complex64)
    work = work_of(torch.ops.aten.mm.default, (x, y), {}, x @ y)
    assert work is not None
    assert (work.flops, work.contraction) == (8 * 3 * 4 * 5, (1, 3, 5, 4))

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.view_as_complex(x), self.weight.T).abs()

    assert count(Complex(), torch.zeros(3, 4, 2)).forward_flops == 8 * 3 * 4 * 5
