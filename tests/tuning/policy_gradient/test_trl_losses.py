"""Losses, gradients and figures of policies are those of TRL, where both compute the same: run with TRL installed."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig
from napkin.tuning.packing import SequenceMicroBatch, micro_batches_of
from napkin.tuning.policy_gradient import policy_objective
from napkin.tuning.sequence_step import totals_of
from peers import peer
from tuning.policy_gradient.test_policy_losses import scores_of, some_examples

pytestmark = pytest.mark.peers
MAX_ANSWER = 20
SETTINGS: dict[PolicyAlgorithm, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "dr-grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    # TRL's is the largest ratio itself.
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("algorithm", SETTINGS)
@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_a_loss_is_that_of_trl(algorithm: PolicyAlgorithm, kl_weight: float) -> None:
    config = ReinforcementConfig(algorithm=algorithm, kl_weight=kl_weight, max_answer=MAX_ANSWER)
    (part,) = micro_batches_of(some_examples(), max_tokens=1000, row_length=32)
    scores = scores_of(part)
    loss, figures = policy_objective(config).loss(part, scores, totals_of([part]))
    loss.backward()
    theirs, gradient, metrics = trl_loss(part, beta=kl_weight, **SETTINGS[algorithm])
    assert loss.item() == pytest.approx(theirs, rel=1e-6)
    assert scores.log_probabilities.grad is not None
    np.testing.assert_allclose(scores.log_probabilities.grad, gradient, rtol=1e-5, atol=1e-9)
    if kl_weight:
        assert figures["kl"].item() == pytest.approx(metrics["kl"][0], rel=1e-6)
    if algorithm in ("grpo", "dr-grpo", "dapo"):
        # Of a sequence's ratio theirs is a mean over sequences, and cispo's counts only advantages above 0.
        assert figures["clip_share"].item() == pytest.approx(metrics["clip_ratio/region_mean"][0], rel=1e-6)


def trl_loss(part: SequenceMicroBatch, **settings: Any) -> tuple[float, np.ndarray, dict[str, list[float]]]:
    """The loss that TRL's trainer computes of these log-probabilities, its gradient, and its metrics."""
    trainer = peer("trl.trainer.grpo_trainer").GRPOTrainer
    new = padded(part, "new").requires_grad_()
    rows = {
        "prompt_ids": torch.zeros(part.n_sequences, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(part.n_sequences, 1),
        "completion_ids": torch.zeros(new.shape, dtype=torch.int64),
        "completion_mask": mask_of(part),
        "advantages": padded(part, "advantages")[:, 0],
        "old_per_token_logps": padded(part, "old_log_probabilities"),
        "ref_per_token_logps": padded(part, "reference_log_probabilities"),
        "num_items_in_batch": mask_of(part).sum(),
    }
    entropies = padded(part, "entropies")
    own = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropies, None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_ANSWER,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        **{"importance_sampling_level": "token", **settings},
    )
    loss = trainer._compute_loss(own, None, rows)
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad[mask_of(part).bool()].numpy(), own._metrics["train"]


def mask_of(part: SequenceMicroBatch) -> torch.Tensor:
    """Which places of rows of one length hold a token."""
    lengths = torch.bincount(part.sequence)
    return (torch.arange(int(lengths.max())) < lengths[:, None]).double()


def padded(part: SequenceMicroBatch, name: str) -> torch.Tensor:
    """Values in rows of one length."""
    mask = mask_of(part)
    rows = torch.zeros_like(mask)
    rows[mask.bool()] = part.values[name].double()
    return rows
