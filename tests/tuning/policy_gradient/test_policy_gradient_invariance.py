"""A batch's policy gradient does not depend on how its answers are arranged."""

from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import Passes
from napkin.distributed.ranks import ALONE
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer, add_scalar_head
from napkin.recipe.layout import Layout
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.policy_gradient import PRESETS, FreshObjective, policy_objective
from napkin.tuning.sequence_step import Metrics, loss_of_parts, totals_of, with_known_coefficients

ARRANGEMENTS = [
    {"max_tokens": 10_000, "packing": "packed"},
    {"max_tokens": 40, "packing": "packed"},
    {"max_tokens": 40, "packing": "padded"},
    {"max_tokens": 40, "packing": "padded left"},
    {"max_tokens": 100, "packing": "bucketed"},
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(ModelConfig(vocab_size=29, context_length=32, d_model=16, n_layers=2, n_heads=2))
    add_scalar_head(model)
    assert model.scalar_head is not None
    torch.nn.init.normal_(model.scalar_head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def examples(model: Transformer) -> list[Example]:
    """Answers whose probabilities have moved since they were drawn, some tokens' beyond the clip."""
    generator = np.random.default_rng(5)
    examples = []
    for _ in range(6):
        length = int(generator.integers(4, 16))
        loss_mask = generator.random(length) < 0.7
        loss_mask[0], loss_mask[-1] = False, True
        tokens = generator.integers(0, 29, length)
        with torch.no_grad():
            logprobs = model(torch.from_numpy(tokens)[None, :-1]).log_softmax(-1)[0]
        now = logprobs[torch.arange(length - 1), torch.from_numpy(tokens[1:])].numpy()[loss_mask[1:]]

        def near(values: np.ndarray, spread: float) -> np.ndarray:
            return (values + generator.normal(0, spread, len(values))).astype(np.float32)

        values = {
            "advantages": np.full(len(now), generator.normal(), np.float32),
            "old_log_probabilities": near(now, 0.3),
            "reference_log_probabilities": near(now, 0.3),
            "sampler_log_probabilities": near(now, 0.3),
            "returns": near(0 * now, 1.0),
            "old_values": near(0 * now, 1.0),
        }
        examples.append((TokenSequence(tokens, loss_mask, values),))
    return examples


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("algorithm", PRESETS)
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_a_policys_gradient_is_the_same_for_any_arrangement(
    model: Transformer, examples: list[Example], algorithm: PolicyAlgorithm, normalisation: Any
) -> None:
    config = ReinforcementConfig(
        algorithm=algorithm,
        normalisation=normalisation,
        kl_weight=0.1,
        entropy_weight=0.01,
        sampler_ratio_limit=2.0,
        max_answer=16,
    )
    alone = gradient(model, examples, config, {"max_tokens": 1, "packing": "padded"})
    assert alone.norm() > 0
    for number, packing in enumerate(ARRANGEMENTS):
        ordered = examples if number % 2 else examples[::-1]
        other = gradient(model, ordered, config, packing)
        assert float((alone - other).norm() / alone.norm()) < 1e-6


@pytest.mark.parametrize("algorithm", [name for name in PRESETS if name != "ppo"])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_what_fresh_answers_weigh_is_known_before_the_model_runs(
    model: Transformer, examples: list[Example], algorithm: PolicyAlgorithm, normalisation: Any
) -> None:
    """The weights are autograd's gradient of the loss, and a step that knows them finds the same."""
    objective = FreshObjective(
        policy_objective(ReinforcementConfig(algorithm=algorithm, normalisation=normalisation, max_answer=16))
    )
    parts = micro_batches_of(examples, max_tokens=40, row_length=32, temperature=0.7)
    totals = totals_of(parts)
    found: list[tuple[Metrics, torch.Tensor, torch.Tensor]] = []
    for told in (parts, with_known_coefficients(parts, objective, totals)):
        assert all((each.rows.coefficients is None) == (told is parts) for each in told)
        model.zero_grad()
        metrics: Metrics = {}
        loss = ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
            [part.rows for part in told], loss_of_parts(told, objective, totals, metrics), Passes()
        )
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((metrics, loss, torch.cat(gradients)))
    (metrics, loss, by_autograd), (same_figures, same_loss, known) = found
    assert float((by_autograd - known).norm() / by_autograd.norm()) < 1e-6
    assert float(loss) == pytest.approx(float(same_loss), rel=1e-6, abs=1e-9)
    assert {"entropy", "sampler_gap", "sampler_kl", "sampler_gap_max"} <= metrics.keys() == same_figures.keys()
    for name, figure in metrics.items():
        assert float(figure) == pytest.approx(float(same_figures[name]), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("penalty", ["kl_weight", "entropy_weight", "sampler_ratio_limit"])
def test_with_a_penalty_the_model_has_to_tell(examples: list[Example], penalty: str) -> None:
    objective = FreshObjective(policy_objective(ReinforcementConfig(**{penalty: 0.1})))  # pyright: ignore[reportArgumentType]
    (part,) = micro_batches_of(examples, max_tokens=10_000, row_length=32)
    assert objective.coefficients(part, totals_of([part])) is None


def gradient(
    model: Transformer, examples: list[Example], config: ReinforcementConfig, packing: dict[str, Any]
) -> torch.Tensor:
    model.zero_grad()
    objective = policy_objective(config)
    parts = micro_batches_of(examples, row_length=32, **packing)
    totals = totals_of(parts)
    ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
        [part.rows for part in parts],
        lambda number, scores: objective.loss(parts[number], scores, totals)[0],
        Passes(),
    )
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
