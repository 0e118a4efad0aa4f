"""Random models of a few dozen parameters, for oracles that do one multiplication at a time. Each returns a loss."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from oracles.torch_models import GPT2, DeepLinear, Llama


class Computes(nn.Module):
    """A module made of a function of its parts and its inputs; its loss is the mean square of the result."""

    def __init__(self, compute: Callable[..., Tensor], *parts: Any) -> None:
        super().__init__()
        self.compute = compute
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.weights = nn.ParameterList(part for part in parts if isinstance(part, Tensor))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(*self.parts, *self.weights, *inputs).square().mean()


Case = tuple[nn.Module, tuple[Tensor, ...]]


def linear_stack(random: Random) -> Case:
    """Linear layers; some frozen, some used twice, the input with or without a gradient."""
    widths = [random.randint(1, 6) for _ in range(random.randint(2, 4))]
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers.append(nn.Linear(wide, narrow, bias=random.random() < 0.5))
        if random.random() < 0.3:
            layers[-1].requires_grad_(False)
        if random.random() < 0.5:
            layers.append(random.choice([nn.ReLU(), nn.GELU(), nn.LayerNorm(narrow)]))
        if random.random() < 0.3:
            layers += [nn.Linear(narrow, narrow)] * 2
    layers.append(nn.Linear(widths[-1], 2))
    leading = [random.randint(1, 3) for _ in range(random.randint(1, 3))]
    x = torch.randn(*leading, widths[0]).requires_grad_(random.random() < 0.3)
    return Computes(lambda stack, x: stack(x), nn.Sequential(*layers)), (x,)


def deep_linear(random: Random) -> Case:
    """The deep linear model."""
    d_model = random.randint(1, 8)
    model = Computes(lambda model, x: model(x), DeepLinear(d_model, random.randint(1, 4)))
    return model, (torch.randn(random.randint(1, 6), d_model),)


def products(random: Random) -> Case:
    """matmul of broadcast shapes, bmm, baddbmm, addmm, mv, dot, einsum."""
    # Over one term, k = 1, torch's einsum multiplies and sums nothing.
    n, i, j, k = *(random.randint(1, 4) for _ in range(3)), random.randint(2, 4)
    left, right = nn.Parameter(torch.randn(n, i, k)), nn.Parameter(torch.randn(n, k, j))
    x, vector = torch.randn(n, k, j), torch.randn(k)
    trained = random.random() < 0.5
    compute = random.choice(
        [
            lambda a, b, x, v: torch.bmm(a, b),
            lambda a, b, x, v: torch.baddbmm(torch.ones(n, i, j), a, b + x),
            lambda a, b, x, v: torch.addmm(torch.ones(i, j), a[0], x[0] @ torch.ones(j, j)) + b[0].sum(),
            lambda a, b, x, v: a @ x + (b * b).sum(),
            lambda a, b, x, v: a.unsqueeze(1) @ b,
            lambda a, b, x, v: a @ b[0] + (a @ v).unsqueeze(-1),
            lambda a, b, x, v: torch.mv(a[0], v) * torch.dot(b[0, :, 0], v),
            lambda a, b, x, v: torch.einsum("nik,nkj->nij", a, b),
            lambda a, b, x, v: torch.einsum("nik,mkj->nmij", a, b),
            lambda a, b, x, v: torch.einsum("nik,nkj->ij", a, x) + b.sum(),
        ]
    )
    return Computes(compute, left, right.requires_grad_(trained)), (x, vector)


def convolutions(random: Random) -> Case:
    """Convolutions in one and two dimensions, strided, dilated, grouped, transposed; after a layer or first."""
    groups = random.randint(1, 2)
    wide, narrow = groups * random.randint(1, 2), groups * random.randint(1, 2)
    taps, stride, dilation = random.randint(1, 3), random.randint(1, 2), random.randint(1, 2)
    padding = random.randint(0, 1)
    settings: dict[str, Any] = {"stride": stride, "groups": groups, "padding": padding, "dilation": dilation}
    kind = random.choice([nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d])
    convolution = kind(wide, narrow, taps, bias=random.random() < 0.5, **settings)
    first = nn.Linear(7, 7) if random.random() < 0.5 else nn.Identity()
    shape = (wide, 5, 7) if kind is nn.Conv2d else (wide, 7)
    return Computes(lambda f, c, x: c(f(x)), first, convolution), (torch.randn(random.randint(1, 2), *shape),)


def attention(random: Random) -> Case:
    """Scaled dot-product attention: causal, full or masked; grouped; of unequal lengths; or spelled out."""
    n_kv_heads, group, head_dim = random.randint(1, 2), random.randint(1, 3), random.choice([2, 4])
    queries, keys = random.randint(1, 6), random.randint(1, 6)
    form = random.choice(["causal", "full", "mask", "bias", "spelled out"])
    width = n_kv_heads * group * head_dim
    masks = {"mask": torch.ones(queries, keys, dtype=torch.bool).tril(), "bias": torch.randn(queries, keys)}

    def compute(wq: nn.Module, wk: nn.Module, wv: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        q = wq(x).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        k, v = (w(y).unflatten(-1, (-1, head_dim)).transpose(1, 2) for w in (wk, wv))
        if form == "spelled out":
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v
        mask, causal = masks.get(form), form == "causal"
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=group > 1)

    heads = [nn.Linear(width, width), *(nn.Linear(width, n_kv_heads * head_dim) for _ in range(2))]
    batch = random.randint(1, 2)
    return Computes(compute, *heads), (torch.randn(batch, queries, width), torch.randn(batch, keys, width))


def encoder(random: Random) -> Case:
    """torch's own encoder layers."""
    n_heads, batch = random.randint(1, 2), random.randint(1, 2)
    d_model = n_heads * random.randint(1, 3)
    layer = nn.TransformerEncoderLayer(
        d_model,
        n_heads,
        random.randint(1, 6),
        dropout=0.0,
        activation=random.choice([F.relu, F.gelu]),
        batch_first=random.random() < 0.5,
        norm_first=random.random() < 0.5,
        bias=random.random() < 0.5,
    )
    x = torch.randn(batch, random.randint(1, 5), d_model)
    return Computes(lambda encoder, x: encoder(x), layer), (x,)


def language_model(random: Random) -> Case:
    """GPT-2 with tied or Llama with untied embedding, with and without checkpointing."""
    n_kv_heads, group = random.randint(1, 2), random.randint(1, 2)
    vocab_size, length, n_layers = random.randint(2, 9), random.randint(1, 5), random.choice([1, 1, 1, 1, 2])
    n_heads, again = n_kv_heads * group, random.random() < 0.5
    d_model = 2 * n_heads
    if random.random() < 0.5:
        model: nn.Module = GPT2(vocab_size, length, n_layers, d_model, n_heads, checkpointing=again)
    else:
        model = Llama(
            vocab_size, length, n_layers, d_model, n_heads, n_kv_heads, random.randint(1, 6), checkpointing=again
        )
    return model, _token_batch(random, vocab_size, length)


def napkin_transformer(random: Random) -> Case:
    """napkin's own model and its fused loss."""
    n_kv_heads, group = random.randint(1, 2), random.randint(1, 2)
    vocab_size, length = random.randint(2, 12), random.randint(1, 6)
    config = ModelConfig(
        vocab_size=vocab_size,
        context_length=length,
        d_model=2 * n_kv_heads * group * random.randint(1, 2),
        n_layers=random.choice([1, 1, 1, 1, 2]),
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        d_ff=random.randint(1, 6),
        tie_embeddings=random.random() < 0.5,
    )
    return LossOf(Transformer(config)), _token_batch(random, vocab_size, length)


def own_function(random: Random) -> Case:
    """An autograd.Function that multiplies, after an embedding, with and without checkpointing."""
    d_model, rows = random.randint(1, 6), random.randint(1, 6)
    tokens = torch.randint(0, 4, (rows,))
    again = random.random() < 0.5

    def compute(table: nn.Module, product: nn.Module, layer: nn.Module, tokens: Tensor) -> Tensor:
        x = table(tokens)
        return layer(checkpoint(product, x, use_reentrant=False) if again else product(x))

    return Computes(compute, nn.Embedding(4, d_model), OwnLinear(d_model, 3), nn.Linear(3, 2)), (tokens,)


class LossOf(nn.Module):
    """napkin's Transformer as a module that returns its loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


class OwnLinear(nn.Module):
    """x · W by a function with its own backward pass."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, narrow))

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return grad_outputs[0] @ weight.T, x.T @ grad_outputs[0]


def _token_batch(random: Random, vocab_size: int, length: int) -> tuple[Tensor, Tensor]:
    shape = (random.randint(1, 2), length)
    return torch.randint(0, vocab_size, shape), torch.randint(0, vocab_size, shape)
