"""A rank of `test_wrapped_modules.py`: modules of a user's own, wrapped and trained."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import napkin
from napkin.checkpoint import load, save
from napkin.distributed import DDP, FSDP, ShardedOptimizer
from napkin.errors import NapkinError
from reliability.ranks import fork_ranks

ROWS, STEPS = 8, 3


class Toy(nn.Module):
    """Shared matrices, a frozen one, and with `branches` one that only tokens with an odd sum use."""

    def __init__(self, seed: int, *, branches: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.branches = branches
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)) for _ in range(2))
        self.norm = napkin.model.RMSNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        if self.branches and int(tokens.sum()) % 2:
            x = x + self.sometimes(x)
        return self.head(self.frozen(x))


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randint(11, (ROWS, 4), generator=draw), torch.randint(11, (ROWS, 4), generator=draw))
        for _ in range(STEPS)
    ]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "ours": partial(napkin.optim.AdamW, lr=1e-2, weight_decay=0.1),
}


def run_rank(folder: Path, rank: int, size: int) -> None:
    dist.init_process_group("gloo")
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    results: dict[str, Tensor] = {}

    def keep(name: str, tensors: dict[str, Tensor]) -> None:
        results.update({f"{name}.{each}": tensor.detach().clone() for each, tensor in tensors.items()})

    # Ranks start from different numbers: those of the first one count.
    for bucket_bytes in (1, 300, 25e6):
        model = DDP(Toy(seed=rank), bucket_bytes=bucket_bytes)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        for step, (tokens, targets) in enumerate(batches()):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.zero_grad()
            half = ROWS // size // 2
            with model.no_sync():
                (loss_of(model, tokens[own][:half], targets[own][:half]) / 2).backward()
            (loss_of(model, tokens[own][half:], targets[own][half:]) / 2).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        keep(f"ddp {bucket_bytes:g}", dict(model.module.named_parameters()))
        assert dict(model.module.named_parameters())["unused.weight"].grad is None
    loss_of(model, *batches()[0]).backward()
    with pytest.raises(NapkinError, match="finish_gradient_synchronization"):
        loss_of(model, *batches()[0]).backward()
    model.finish_gradient_synchronization()

    def train(model: DDP | FSDP, optimizer: torch.optim.Optimizer, *steps: int) -> None:
        for step in steps:
            tokens, targets = batches()[step]
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.zero_grad()
            loss_of(model, tokens[own], targets[own]).backward()
            model.finish_gradient_synchronization()
            optimizer.step()

    for name, make in OPTIMIZERS.items():
        model = DDP(Toy(seed=rank))
        optimizer = ShardedOptimizer(model.parameters(), make.func, **make.keywords)
        train(model, optimizer, 0)
        path = save(model.module, optimizer, folder / f"{name}-checkpoint", step=1)
        train(model, optimizer, 1, 2)
        keep(name, dict(model.module.named_parameters()))
        n_own = sum(tensor.numel() for state in optimizer.state.values() for tensor in state.values())
        results[f"{name} state"] = torch.tensor(n_own)
        model = DDP(Toy(seed=3))
        optimizer = ShardedOptimizer(model.parameters(), make.func, **make.keywords)
        assert load(path, model.module, optimizer).step == 1
        train(model, optimizer, 1, 2)
        keep(f"{name} again", dict(model.module.named_parameters()))

    # FSDP2 expects that all ranks use the same parameters.
    for case, seed in (("fsdp", rank), ("fsdp again", 4)):
        toy = Toy(seed, branches=False)
        model = FSDP(toy, replicated=list(toy.norm.parameters()))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if case == "fsdp":
            train(model, optimizer, 0)
            save(model.module, optimizer, folder / "fsdp-checkpoint", step=1)
        else:
            assert load(folder / "fsdp-checkpoint", model.module, optimizer).step == 1
        train(model, optimizer, 1, 2)
        keep(case, model.full_parameters())
    save_file({name: tensor.clone() for name, tensor in results.items()}, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(fork_ranks(lambda rank: run_rank(folder, rank, ranks), ranks, int(sys.argv[3])))
