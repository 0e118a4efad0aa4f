"""A job of ranks that look up tokens and compute losses with a vocabulary that they divide.

Its arguments are a folder, how many ranks there are, and a free port. Each rank leaves what it has of every case's
result in CASE-RANK.safetensors.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from napkin.distributed.tensor_parallel import VocabularyShard
from reliability.ranks import fork_ranks

BATCH, LENGTH, D_MODEL = 3, 8, 16
CASES: dict[str, dict[str, Any]] = {
    "even": {"vocab_size": 40},
    "uneven": {"vocab_size": 37, "chunk_size": 5},
    "z-loss": {"vocab_size": 37, "chunk_size": 7, "z_weight": 0.1},
    "float64": {"vocab_size": 38, "dtype": torch.float64, "z_weight": 0.1},
    "autocast": {"vocab_size": 37, "autocast": True},
    "nothing counts": {"vocab_size": 37, "ignored": 1},
    "large logits": {"vocab_size": 37, "scale": 300.0},
    "softcap": {"vocab_size": 37, "chunk_size": 7, "z_weight": 0.1, "logit_softcap": 2.0},
}


def problem(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, hidden states, the matrix and targets, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    dtype, vocab_size = case.get("dtype", torch.float32), case["vocab_size"]
    hidden = torch.randn(BATCH, LENGTH, D_MODEL, generator=generator, dtype=dtype) * case.get("scale", 1.0)
    weight = torch.randn(vocab_size, D_MODEL, generator=generator, dtype=dtype)
    tokens, targets = torch.randint(vocab_size, (2, BATCH, LENGTH), generator=generator)
    targets[:, :: case.get("ignored", 3)] = -1
    return tokens, hidden, weight, targets


def results(rank: int, size: int, case: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's parts of the loss, the vectors and their gradients."""
    mesh = init_device_mesh("cpu", (size,))
    tokens, hidden, weight, targets = problem(case)
    shard = VocabularyShard(len(weight), mesh)
    part = hidden.chunk(size, dim=1)[rank].clone().requires_grad_()
    rows = weight.chunk(size)[rank].clone().requires_grad_()
    settings = {"chunk_size": case.get("chunk_size", 100), "z_weight": case.get("z_weight", 0.0)}
    settings["logit_softcap"] = case.get("logit_softcap")
    with torch.autocast("cpu", torch.bfloat16, enabled=case.get("autocast", False)):
        with torch.no_grad():
            evaluated = shard.next_token_loss(part, rows, targets, **settings)
        loss = shard.next_token_loss(part, rows, targets, **settings)
        vectors = shard.look_up(tokens, rows)
    (3 * loss).backward()
    made = {"loss": loss, "evaluated": evaluated, "hidden_gradient": part.grad, "rows_gradient": rows.grad}
    rows.grad = None
    (vectors * part.detach()).sum().backward()
    made |= {"vectors": vectors, "embedding_gradient": rows.grad}
    return {name: tensor.detach().clone() for name, tensor in made.items() if tensor is not None}


def run_rank(folder: Path, rank: int, size: int) -> None:
    """Run all cases on this rank."""
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        save_file(results(rank, size, case), folder / f"{name}-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(fork_ranks(lambda rank: run_rank(folder, rank, ranks), ranks, int(sys.argv[3])))
