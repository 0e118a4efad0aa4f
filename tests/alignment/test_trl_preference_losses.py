"""Losses and gradients on pairs are those of TRL, where both compute the same: run with TRL installed."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from napkin.alignment.preferences.dpo import dpo_losses
from napkin.alignment.preferences.ipo import ipo_losses
from napkin.alignment.preferences.orpo import orpo_losses
from napkin.alignment.preferences.simpo import simpo_losses

pytestmark = pytest.mark.torture
PAIRS, LENGTH = 5, 9
CPU = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)


def log_probabilities(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (-3 * torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


def dpo_trainer_loss(tokens: Tensor, mask: Tensor, reference: Tensor, **settings: Any) -> Tensor:
    """What TRL's DPO trainer computes of these log-probabilities, the chosen answers above the rejected ones."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    nothing = torch.zeros_like(tokens)
    outputs = MagicMock(log_probs=tokens * mask, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)
    chosen, rejected = reference.chunk(2)
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LENGTH + 1, dtype=torch.int64),
        "completion_mask": torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.int64), mask], dim=1),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    own = MagicMock(
        accelerator=CPU,
        aux_loss_enabled=False,
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
        ld_alpha=None,
        model=SimpleNamespace(training=False),
        loss_weights=[1.0],
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **settings,
    )
    return trainer._compute_loss(own, lambda **_: outputs, inputs, return_outputs=False)


@pytest.mark.parametrize(
    ("settings", "losses", "per_token"),
    [
        ({"loss_types": ["sigmoid"], "beta": 0.3}, lambda c, r: dpo_losses(c, r, beta=0.3), False),
        ({"loss_types": ["ipo"], "beta": 0.2}, lambda c, r: ipo_losses(c, r, beta=0.2), True),
    ],
    ids=["dpo", "ipo"],
)
def test_a_loss_with_a_reference_is_that_of_trl(settings: dict[str, Any], losses: Any, per_token: bool) -> None:
    tokens, reference = log_probabilities(1, 2 * PAIRS, LENGTH), log_probabilities(2, 2 * PAIRS).detach() * LENGTH / 2
    lengths = torch.arange(2 * PAIRS) % LENGTH + 1
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    theirs = dpo_trainer_loss(tokens, mask, reference, **settings)
    ratios = (tokens * mask).sum(dim=1) - reference
    ours = losses(*(ratios / lengths if per_token else ratios).chunk(2)).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    assert torch.allclose(gradients(ours, tokens)[0], gradients(theirs, tokens)[0], rtol=1e-9, atol=1e-12)


def test_orpo_is_that_of_trl() -> None:
    trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    chosen, rejected = log_probabilities(3, PAIRS), log_probabilities(4, PAIRS)
    odds, *_ = trainer.odds_ratio_loss(SimpleNamespace(beta=0.4, accelerator=CPU), chosen, rejected)
    theirs, ours = (-chosen - odds).mean(), orpo_losses(chosen, rejected, beta=0.4).mean()
    # TRL computes in fp32.
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, other in zip(gradients(ours, chosen, rejected), gradients(theirs, chosen, rejected), strict=True):
        assert torch.allclose(mine, other.double(), rtol=1e-5)


def test_simpo_is_that_of_trl() -> None:
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    chosen, rejected = log_probabilities(5, PAIRS), log_probabilities(6, PAIRS)
    own = SimpleNamespace(alpha=0.0, beta=2.0, simpo_gamma=0.7, label_smoothing=0.0, loss_type="simpo", accelerator=CPU)
    theirs = trainer.cpo_loss(own, chosen, rejected)[0].mean()
    ours = simpo_losses(chosen, rejected, beta=2.0, margin=0.7).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    for mine, other in zip(gradients(ours, chosen, rejected), gradients(theirs, chosen, rejected), strict=True):
        assert torch.allclose(mine, other, rtol=1e-9)
