"""Mixtures of experts as other libraries write them: loops over masks, over the experts that are hit, grouped products.

Each maps [tokens, width] to the mean square of what its experts make of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StackedExperts(nn.Module):
    """Experts in stacked parameters, looped over where they are hit, as in Mixtral, Qwen3-MoE and GPT-OSS."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.n = n
        self.up = nn.Parameter(torch.randn(n, 4 * width, width))
        self.down = nn.Parameter(torch.randn(n, width, 2 * width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, self.n).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for place in hit:
            expert = place[0]
            if expert == self.n:
                continue
            rank, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], self.up[expert]).chunk(2, dim=-1)
            mixed = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, rank, None]
            result.index_add_(0, token, mixed.to(result.dtype))
        return result


class GroupedExperts(StackedExperts):
    """The same as grouped products of sorted tokens."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat)
        token = torch.arange(len(x)).unsqueeze(1).expand(-1, chosen.shape[1]).reshape(-1)[order]
        counts = torch.histc(flat[order].float(), bins=self.n, min=0, max=self.n - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[token], self.up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        mixed = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        mixed = mixed * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add_(0, token, mixed.to(x.dtype))


class ListedExperts(nn.Module):
    """Experts in a list, each looked up by its mask, as in DeepSeek-V3."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.n = n
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(n)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        mask = F.one_hot(chosen, self.n).permute(2, 0, 1)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(mask[number])
            if token.numel() > 0:
                mixed = expert(x[token]) * weights[token, rank].unsqueeze(-1)
                result.index_add_(0, token, mixed.to(result.dtype))
        return result


class HitExperts(ListedExperts):
    """The same list, looped over where it is hit, the number of an expert read from a tensor."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        mask = F.one_hot(chosen, self.n).permute(2, 1, 0)
        for place in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            rank, token = torch.where(mask[place].squeeze(0))
            mixed = self.experts[int(place)](x[token]) * weights[token, rank, None]
            result.index_add_(0, token, mixed.to(result.dtype))
        return result


class MaskedExperts(ListedExperts):
    """The same list, its tokens picked by a boolean mask and written back by another."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(dim=-1)
            part = expert(x[mask])
            result = result.index_put((mask,), part.to(result.dtype), accumulate=True)
        return result * weights.sum(-1, keepdim=True)


class MixtureOfExperts(nn.Module):
    """A router over `n` experts, the `k` best of which get a token; `even` makes it send each expert as many."""

    even: Tensor

    def __init__(self, experts: type[nn.Module], *, n: int = 4, k: int = 2, width: int = 16, tokens: int = 24) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(width, n)
        self.experts = experts(n, width)
        places = (torch.arange(tokens)[:, None] + torch.arange(k)) % n
        self.register_buffer("even", 100.0 * F.one_hot(places, n).sum(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.router(x) + self.even).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self.k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, chosen, weights.to(x.dtype)).float().square().mean()
