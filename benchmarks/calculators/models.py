"""The models that are counted: each with its batch, at its published size and as a small copy of the same layers."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.torch_models import GPT2, DeepLinear, Llama  # pyright: ignore[reportMissingImports]

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Decoder:
    """What formulas know of a decoder: its sizes and those of its batch."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    gated: bool
    batch_size: int
    length: int


@dataclass(frozen=True)
class Case:
    """A model that returns its loss, and a batch for it; `small` makes both a few thousand numbers large."""

    build: Callable[[bool], tuple[nn.Module, Batch]]
    decoder: Decoder | None = None
    needs: str | None = None
    """A package without which there is no such model."""


class LossOf(nn.Module):
    """The mean square of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs).square().mean()


class FromTransformers(nn.Module):
    """A model of `transformers`, which is handed names and returns an object, as a module that returns its loss."""

    def __init__(self, module: nn.Module, *names: str) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(**dict(zip(self.names, inputs, strict=True))).loss


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions (He et al. 2015), the second one by channel where `depthwise`."""

    def __init__(self, wide: int, narrow: int, stride: int, *, depthwise: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(wide, narrow, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(narrow, narrow, 3, 1, 1, bias=False, groups=narrow if depthwise else 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(narrow) for _ in range(2))
        self.short = nn.Conv2d(wide, narrow, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.short(x))


class ExpertChoice(nn.Module):
    """A mixture of experts in which each expert takes the tokens that suit it best (Zhou et al. 2022)."""

    def __init__(self, d_model: int, d_ff: int, n_experts: int, capacity: float = 2.0) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.up = nn.Parameter(torch.randn(n_experts, d_model, d_ff) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(n_experts, d_ff, d_model) * d_ff**-0.5)
        self.share = capacity / n_experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        taken = max(1, int(len(tokens) * self.share))
        weights, chosen = self.router(tokens).softmax(dim=-1).t().topk(taken)
        mine = tokens[chosen]  # [expert, token, width]
        mixed = torch.bmm(F.silu(torch.bmm(mine, self.up)), self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), mixed.flatten(0, 1)).view_as(x)


class MixtureModel(nn.Module):
    """Attention blocks of the Llama-like model, each followed by a mixture of experts; returns the loss."""

    def __init__(self, vocab_size: int, length: int, n_layers: int, d_model: int, n_heads: int, n_experts: int) -> None:
        super().__init__()
        self.llama = Llama(vocab_size, length, n_layers, d_model, n_heads, n_heads, d_model)
        self.experts = nn.ModuleList(ExpertChoice(d_model, 2 * d_model, n_experts) for _ in range(n_layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model, length = self.llama, tokens.shape[1]
        x = model.tokens(tokens)
        for block, experts in zip(model.blocks, self.experts, strict=True):
            x = block(x, model.cosines[:length], model.sines[:length])
            x = x + experts(x)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())


def _tokens(vocab_size: int, batch_size: int, length: int) -> Batch:
    shape = (batch_size, length)
    return torch.randint(vocab_size, shape), torch.randint(vocab_size, shape)


def _gpt2(small: bool) -> tuple[nn.Module, Batch]:
    if small:
        return GPT2(11, 5, 1, 8, 2), _tokens(11, 2, 5)
    return GPT2(), _tokens(50257, 1, 1024)


def _llama(small: bool) -> tuple[nn.Module, Batch]:
    if small:
        return Llama(11, 5, 1, 8, 2, 1, 6), _tokens(11, 2, 5)
    return Llama(), _tokens(32000, 1, 1024)


def _deep_linear(small: bool) -> tuple[nn.Module, Batch]:
    d_model, batch_size = (4, 3) if small else (64, 8)
    return LossOf(DeepLinear(d_model, 2)), (torch.randn(batch_size, d_model),)


def _encoder(small: bool) -> tuple[nn.Module, Batch]:
    d_model, n_heads, n_layers, length = (8, 2, 1, 4) if small else (512, 8, 6, 128)
    layer = nn.TransformerEncoderLayer(d_model, n_heads, 4 * d_model, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
    return LossOf(encoder), (torch.randn(2 if small else 8, length, d_model),)


def _residual_net(small: bool, *, depthwise: bool) -> tuple[nn.Module, Batch]:
    widths = [2, 4] if small else [64, 64, 128, 128, 256, 256, 512, 512]
    stem, size = (3, 6) if small else (7, 224)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], stem, 2, stem // 2, bias=False), nn.BatchNorm2d(widths[0])]
    layers += [nn.ReLU()] if small else [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for wide, narrow in zip([widths[0], *widths], widths, strict=False):
        layers.append(ResidualBlock(wide, narrow, 1 + (wide != narrow), depthwise=depthwise))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 3 if small else 1000)]
    return LossOf(nn.Sequential(*layers)), (torch.randn(2, 3, size, size),)


def _mixture(small: bool) -> tuple[nn.Module, Batch]:
    if small:
        return MixtureModel(11, 5, 1, 8, 2, 2), _tokens(11, 2, 5)
    return MixtureModel(32000, 512, 8, 512, 8, 8), _tokens(32000, 2, 512)


def _transformers_gpt2(small: bool) -> tuple[nn.Module, Batch]:
    library: Any = importlib.import_module("transformers")
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 5} if small else {}
    config = library.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    batch = _tokens(11, 2, 5) if small else _tokens(50257, 1, 1024)
    return FromTransformers(library.GPT2LMHeadModel(config), "input_ids", "labels"), batch


def _transformers_bert(small: bool) -> tuple[nn.Module, Batch]:
    library: Any = importlib.import_module("transformers")
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = dict(zip(names, (11, 8, 1, 2, 6), strict=True)) if small else {}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = library.BertConfig(**sizes, **plain, attn_implementation="eager")
    tokens, targets = _tokens(11, 2, 5) if small else _tokens(30522, 4, 128)
    model = FromTransformers(library.BertForMaskedLM(config), "input_ids", "labels", "attention_mask")
    return model, (tokens, targets, torch.ones_like(tokens))


CASES: dict[str, Case] = {
    "GPT-2 small": Case(_gpt2, Decoder(50257, 768, 12, 12, 12, 3072, False, 1, 1024)),
    "Llama-like 125M": Case(_llama, Decoder(32000, 768, 12, 12, 4, 2048, True, 1, 1024)),
    "deep linear": Case(_deep_linear),
    "transformers GPT-2": Case(
        _transformers_gpt2, Decoder(50257, 768, 12, 12, 12, 3072, False, 1, 1024), "transformers"
    ),
    "transformers BERT": Case(_transformers_bert, needs="transformers"),
    "nn.TransformerEncoder": Case(_encoder),
    "ResNet-18": Case(lambda small: _residual_net(small, depthwise=False)),
    "depthwise net": Case(lambda small: _residual_net(small, depthwise=True)),
    "mixture of experts": Case(_mixture),
}
