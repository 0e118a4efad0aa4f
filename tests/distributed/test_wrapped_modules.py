"""Modules of a user's own, wrapped for two ranks, are trained to the numbers of a single process."""

import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file

from distributed.module_cases import OPTIMIZERS, Toy, batches, loss_of
from napkin.checkpoint import load
from reliability.ranks import run_script_of_ranks


def trained_alone(name: str, *, size: int, steps: int = 3, **toy: bool) -> tuple[Toy, torch.optim.Optimizer]:
    """The same steps in one process, `size` rows at a time: each part may take its own branch."""
    model = Toy(seed=0, **toy)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step, (tokens, targets) in enumerate(batches()[:steps]):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.zero_grad()
        parts = zip(tokens.split(size), targets.split(size), strict=True)
        (torch.stack([loss_of(model, *part) for part in parts]).mean()).backward()
        optimizer.step()
    return model, optimizer


def test_wrapped_modules_and_optimizers_have_the_numbers_of_one_process(
    tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    run_script_of_ranks(Path(__file__).with_name("module_cases.py"), server, tmp_path, 2)
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]

    def compare(case: str, expected: Toy) -> None:
        for rank in ranks:
            for name, value in expected.named_parameters():
                torch.testing.assert_close(rank[f"{case}.{name}"], value.detach(), rtol=1e-5, atol=1e-6)
                assert torch.equal(rank[f"{case}.{name}"], ranks[0][f"{case}.{name}"])

    alone, _ = trained_alone("adamw", size=2)
    for case in ("ddp 1", "ddp 300", "ddp 2.5e+07"):
        compare(case, alone)
    for name in OPTIMIZERS:
        alone, optimizer = trained_alone(name, size=4)
        compare(name, alone)
        compare(f"{name} again", alone)
        # No state is kept twice, and a rank has at most the larger part of it.
        kept = [int(rank[f"{name} state"]) for rank in ranks]
        assert sum(kept) == numbers_of_state(optimizer)
        assert max(kept) < 0.6 * sum(kept)
    alone, _ = trained_alone("adamw", size=4, branches=False)
    compare("fsdp", alone)
    compare("fsdp again", alone)

    # A single process reads what ranks have written together.
    for case, branches in (("adamw", True), ("fsdp", False)):
        model = Toy(seed=9)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        assert load(tmp_path / f"{case}-checkpoint", model, optimizer).step == 1
        alone, once = trained_alone("adamw", size=4, steps=1, branches=branches)
        for own, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
            for key, value in once.state[other].items():
                torch.testing.assert_close(optimizer.state[own][key], value, rtol=1e-4, atol=1e-7)
        assert numbers_of_state(optimizer) == numbers_of_state(once)


def numbers_of_state(optimizer: torch.optim.Optimizer) -> int:
    return sum(each.numel() for state in optimizer.state.values() for each in state.values())
