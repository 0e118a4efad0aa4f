"""A batch's policy gradient does not depend on how its answers are arranged."""

from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.token_sequence import TokenSequence, Unit
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import Passes
from napkin.distributed.ranks import ALONE
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer, add_scalar_head
from napkin.recipe.layout import Layout
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig
from napkin.tuning.objective import Figures, totals_of
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.policy_gradient import PRESETS
from napkin.tuning.policy_loss import FreshObjective, policy_objective
from napkin.tuning.sequence_step import loss_of_parts, with_known_coefficients

ARRANGEMENTS = [
    {"max_tokens": 10_000, "arrangement": "packed"},
    {"max_tokens": 40, "arrangement": "packed"},
    {"max_tokens": 40, "arrangement": "padded"},
    {"max_tokens": 40, "arrangement": "padded left"},
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(ModelConfig(vocab_size=29, context_length=32, d_model=16, n_layers=2, n_heads=2))
    add_scalar_head(model)
    assert model.scalar_head is not None
    torch.nn.init.normal_(model.scalar_head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def units(model: Transformer) -> list[Unit]:
    """Answers whose probabilities have moved since they were drawn, some tokens' beyond the clip."""
    generator = np.random.default_rng(5)
    units = []
    for _ in range(6):
        length = int(generator.integers(4, 16))
        counts = generator.random(length) < 0.7
        counts[0], counts[-1] = False, True
        tokens = generator.integers(0, 29, length)
        with torch.no_grad():
            logprobs = model(torch.from_numpy(tokens)[None, :-1]).log_softmax(-1)[0]
        now = logprobs[torch.arange(length - 1), torch.from_numpy(tokens[1:])].numpy()[counts[1:]]

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
        units.append((TokenSequence(tokens, counts, values),))
    return units


@pytest.mark.parametrize("algorithm", PRESETS)
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_a_policys_gradient_is_the_same_for_any_arrangement(
    model: Transformer, units: list[Unit], algorithm: PolicyAlgorithm, normalisation: Any
) -> None:
    config = ReinforcementConfig(
        algorithm=algorithm,
        normalisation=normalisation,
        kl_weight=0.1,
        entropy_weight=0.01,
        sampler_ratio_limit=2.0,
        max_answer=16,
    )
    alone = gradient(model, units, config, {"max_tokens": 1, "arrangement": "padded"})
    assert alone.norm() > 0
    for number, arrangement in enumerate(ARRANGEMENTS):
        ordered = units if number % 2 else units[::-1]
        other = gradient(model, ordered, config, arrangement)
        assert float((alone - other).norm() / alone.norm()) < 1e-6


@pytest.mark.parametrize("algorithm", [name for name in PRESETS if name != "ppo"])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_what_fresh_answers_weigh_is_known_before_the_model_runs(
    model: Transformer, units: list[Unit], algorithm: PolicyAlgorithm, normalisation: Any
) -> None:
    """The weights are autograd's gradient of the loss, and a step that knows them finds the same."""
    objective = FreshObjective(
        policy_objective(ReinforcementConfig(algorithm=algorithm, normalisation=normalisation, max_answer=16))
    )
    parts = micro_batches_of(units, max_tokens=40, row_length=32, temperature=0.7)
    totals = totals_of(parts)
    found: list[tuple[Figures, torch.Tensor, torch.Tensor]] = []
    for told in (parts, with_known_coefficients(parts, objective, totals)):
        assert all((each.rows.coefficients is None) == (told is parts) for each in told)
        model.zero_grad()
        figures: Figures = {}
        loss = ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
            [part.rows for part in told], loss_of_parts(told, objective, totals, figures), Passes()
        )
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((figures, loss, torch.cat(gradients)))
    (figures, loss, by_autograd), (same_figures, same_loss, known) = found
    assert float((by_autograd - known).norm() / by_autograd.norm()) < 1e-6
    assert float(loss) == pytest.approx(float(same_loss), rel=1e-6, abs=1e-9)
    assert {"entropy", "sampler_gap", "sampler_kl", "sampler_gap_max"} <= figures.keys() == same_figures.keys()
    for name, figure in figures.items():
        assert float(figure) == pytest.approx(float(same_figures[name]), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("penalty", ["kl_weight", "entropy_weight", "sampler_ratio_limit"])
def test_with_a_penalty_the_model_has_to_tell(units: list[Unit], penalty: str) -> None:
    objective = FreshObjective(policy_objective(ReinforcementConfig(**{penalty: 0.1})))  # pyright: ignore[reportArgumentType]
    (part,) = micro_batches_of(units, max_tokens=10_000, row_length=32)
    assert objective.coefficients(part, totals_of([part])) is None


def gradient(
    model: Transformer, units: list[Unit], config: ReinforcementConfig, arrangement: dict[str, Any]
) -> torch.Tensor:
    model.zero_grad()
    objective = policy_objective(config)
    parts = micro_batches_of(units, row_length=32, **arrangement)
    totals = totals_of(parts)
    ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
        [part.rows for part in parts],
        lambda number, scores: objective.loss(parts[number], scores, totals)[0],
        Passes(),
    )
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
