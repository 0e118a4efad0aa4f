"""Ranks that divide the vocabulary have the losses, vectors and gradients of one process that has all of it."""

import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from distributed.vocabulary_cases import CASES, problem
from napkin.model.transformer import next_token_loss
from reliability.ranks import run_script_of_ranks


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.torture)])
def test_a_divided_vocabulary_gives_the_loss_and_gradients_of_a_whole_one(
    tmp_path: Path, server: subprocess.Popen[str], size: int
) -> None:
    run_script_of_ranks(Path(__file__).with_name("vocabulary_cases.py"), server, tmp_path, size)
    for name, case in CASES.items():
        ranks = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(size)]
        expected = expected_results(name)
        rtol, atol = (2e-2, 5e-3) if case.get("autocast") else (1e-5, 1e-6)
        for what in ("loss", "evaluated"):
            for rank in ranks:
                torch.testing.assert_close(rank[what], expected[what], rtol=rtol, atol=atol)
                assert torch.equal(rank[what], ranks[0][what])
        for what, dim in {"hidden_gradient": 1, "vectors": 1, "rows_gradient": 0, "embedding_gradient": 0}.items():
            torch.testing.assert_close(
                torch.cat([rank[what] for rank in ranks], dim), expected[what], rtol=rtol, atol=atol
            )


def expected_results(name: str) -> dict[str, Tensor]:
    """Of one process with all of the vocabulary."""
    case = CASES[name]
    tokens, hidden, weight, targets = problem(case)
    hidden.requires_grad_()
    weight.requires_grad_()
    settings = {"chunk_size": case.get("chunk_size", 100), "z_weight": case.get("z_weight", 0.0)}
    settings["logit_softcap"] = case.get("logit_softcap")
    with torch.autocast("cpu", torch.bfloat16, enabled=case.get("autocast", False)):
        with torch.no_grad():
            evaluated = next_token_loss(hidden, weight, targets, **settings)
        loss = next_token_loss(hidden, weight, targets, **settings)
        vectors = F.embedding(tokens, weight)
    grad_hidden, grad_weight = torch.autograd.grad(3 * loss, (hidden, weight))
    (grad_embedding,) = torch.autograd.grad((vectors * hidden.detach()).sum(), weight)
    return {
        "loss": loss.detach(),
        "evaluated": evaluated,
        "hidden_gradient": grad_hidden,
        "rows_gradient": grad_weight,
        "vectors": vectors.detach(),
        "embedding_gradient": grad_embedding,
    }
