"""Plans say on which side of the thresholds of laws they are."""

import json

import pytest
import torch
from torch import nn

import napkin
from napkin.accounting.rules import norm_bytes_rule
from napkin.cli import main
from napkin.kernels import fused_rms_norm
from napkin.planning.training_compute import nearest_line, published_trainings, thresholds


@pytest.mark.parametrize(
    ("params", "tokens", "exceeded"),
    [("1B", "16T", 0), ("1B", "17T", 1), ("70B", "15T", 1), ("405B", "15.6T", 2), ("1T", "15T", 2), ("1T", "17T", 4)],
)
def test_the_side_of_each_threshold_is_that_of_six_flops_per_parameter_and_token(
    capsys: pytest.CaptureFixture[str], params: str, tokens: str, exceeded: int
) -> None:
    assert main(["plan", "--params", params, "--tokens", tokens, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["compute"]
    assert [each["exceeded"] for each in found["thresholds"]] == [True] * exceeded + [False] * (4 - exceeded)
    assert all(each["source"] and each["in_force"] for each in found["thresholds"])


def test_a_small_plan_says_nothing_of_laws(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1B"]) == 0
    assert "EU" not in capsys.readouterr().out
    assert main(["plan", "--on", "1024xH100", "--within", "1week"]) == 0
    assert "above 1e+23" in capsys.readouterr().out


def test_what_sources_state_is_near_the_rule_and_the_nearest_is_named() -> None:
    for each in published_trainings():
        # Attention and what is not counted as a parameter.
        assert each.compute == pytest.approx(6 * each.parameters * each.tokens, rel=0.05)
        assert each.name in nearest_line(1.001 * each.compute)
    assert [each.flops for each in thresholds()] == [1e23, 1e25, 1e26, 1e26]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(256) for _ in range(5))
        self.table = nn.Embedding(7, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for gain in self.gains:
            x, _ = fused_rms_norm(x, gain, 1e-5)
        return x.sum()


def test_the_bytes_of_norms_are_those_of_their_kernels() -> None:
    ledger = napkin.count(Norms(), torch.zeros(4, 64, dtype=torch.int64))
    moved = sum(row.bytes_read + row.bytes_written for row in ledger.rows if "norm" in row.operator)
    assert moved == pytest.approx(norm_bytes_rule(n_layers=2, d_model=256, tokens=256, bytes_per_number=4), rel=0.02)
