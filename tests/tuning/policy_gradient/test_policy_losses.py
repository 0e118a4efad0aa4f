"""Losses of policies, their gradients and figures are those of a plain computation in float64 NumPy."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig, SamplerCorrection
from napkin.tuning.packing import SequenceMicroBatch, micro_batches_of
from napkin.tuning.policy_gradient import PRESETS, PolicyObjective, policy_objective
from napkin.tuning.sampler_correction import sampler_weights
from napkin.tuning.sequence_step import BatchTotals, add_metrics, totals_of

LENGTHS = (4, 1, 7, 3)
NORMALISATIONS = ("token", "sequence", "constant")


def some_examples() -> list[Example]:
    """Answers whose ratios lie on both sides of every clip, with all values that an objective may read."""
    generator = np.random.default_rng(11)

    def near(values: np.ndarray, spread: float) -> np.ndarray:
        return (values + generator.normal(0, spread, len(values))).astype(np.float32)

    examples = []
    for number, length in enumerate(LENGTHS):
        new = generator.normal(-1.5, 0.7, length).astype(np.float32)
        sequence = TokenSequence(
            generator.integers(0, 9, length + 2),
            np.arange(length + 2) >= 2,
            {
                "new": new,
                "scalars": generator.normal(0, 1, length).astype(np.float32),
                "entropies": generator.random(length).astype(np.float32),
                "advantages": np.full(length, (-1.0) ** number * generator.random(), np.float32),
                "old_log_probabilities": near(new, 0.5),
                "sampler_log_probabilities": near(new, 0.5),
                "reference_log_probabilities": near(new, 0.5),
                "returns": generator.normal(0, 1, length).astype(np.float32),
                "old_values": generator.normal(0, 1, length).astype(np.float32),
            },
        )
        examples.append((sequence,))
    return examples


def scores_of(part: SequenceMicroBatch) -> TokenScores:
    names = ("new", "entropies", "scalars")
    return TokenScores(*(part.values[name].double().clone().requires_grad_() for name in names))


def reference(objective: PolicyObjective, sequences: list[TokenSequence], now: dict[str, np.ndarray]) -> float:
    """The loss by the papers' equations. `now` replaces the scores of which the gradient is asked, all sequences' in a
    row; what has no gradient stays as it is in `sequences`."""
    parts, total, value_total, start = objective.parts, 0.0, 0.0, 0
    n_tokens = sum(each.n_trained for each in sequences)
    for each in sequences:
        v: dict[str, Any] = {name: values.astype(np.float64) for name, values in each.values.items()}
        n, rows = each.n_trained, slice(start, start + each.n_trained)
        start += n
        new, entropies, scalars = (now.get(name, np.empty(0))[rows] for name in ("new", "entropies", "scalars"))
        stopped, advantages, low, high = v["new"], v["advantages"], 1 - parts.clip_low, 1 + parts.clip_high
        if parts.ratio == "none":
            terms = -advantages * new
        else:
            difference = new - v["old_log_probabilities"]
            frozen = stopped - v["old_log_probabilities"]
            if parts.ratio == "sequence":
                difference, frozen = np.full(n, difference.mean()), np.full(n, frozen.mean())
            ratio = np.exp(difference)
            if parts.clip == "ppo":
                terms = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
            elif parts.clip == "cispo":
                terms = -np.clip(np.exp(frozen), low, high) * advantages * new
            else:
                terms = -ratio * advantages
        if objective.sampler_ratio_limit:
            limit = objective.sampler_ratio_limit
            rho = np.exp(v["old_log_probabilities"] - v["sampler_log_probabilities"])
            product = np.full(n, math.prod(rho.tolist()))
            terms = (
                terms
                * {
                    "token": np.where(rho > limit, limit, rho),
                    "token mask": np.where((1 / limit <= rho) & (rho <= limit), rho, 0),
                    "sequence": np.where(product > limit, limit, product),
                    "sequence mask": np.where(product <= limit, product, 0),
                }[objective.sampler_correction]
            )
        if objective.kl_weight:
            d = new - v["reference_log_probabilities"]
            at = stopped - v["reference_log_probabilities"]
            kl = {"k1": at * new + at - at * stopped, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
            terms = terms + objective.kl_weight * kl[objective.kl_estimator]
        terms = terms - objective.entropy_weight * entropies
        divisor = {
            "token": n_tokens,
            "sequence": n * len(sequences),
            "constant": objective.constant * len(sequences),
        }[parts.normalisation]
        total += float(terms.sum() / divisor)
        if parts.advantage == "gae":
            held = v["old_values"] + np.clip(scalars - v["old_values"], -objective.value_clip, objective.value_clip)
            errors = np.maximum((scalars - v["returns"]) ** 2, (held - v["returns"]) ** 2) / 2
            value_total += float(errors.sum() / n_tokens)
    return total + objective.value_weight * value_total


@pytest.mark.parametrize("correction", get_args(SamplerCorrection))
@pytest.mark.parametrize("algorithm", ["reinforce", "grpo", "gspo"])
def test_corrections_for_the_sampler_are_those_of_numpy(
    algorithm: PolicyAlgorithm, correction: SamplerCorrection
) -> None:
    config = ReinforcementConfig(algorithm=algorithm, sampler_ratio_limit=1.4, sampler_correction=correction)
    objective = policy_objective(config)
    (part,) = micro_batches_of(some_examples(), max_tokens=1000, row_length=32)
    part = replace(part, values={name: values.double() for name, values in part.values.items()})
    scores = scores_of(part)
    loss, figures = objective.loss(part, scores, totals_of([part]))
    now = {name: part.values[name].numpy() for name in ("new", "entropies", "scalars")}
    np.testing.assert_allclose(loss.item(), reference(objective, part.sequences, now), rtol=1e-6)
    loss.backward()
    found = scores.log_probabilities.grad
    assert found is not None
    np.testing.assert_allclose(found.numpy(), differences(objective, part.sequences, now, "new"), rtol=1e-6, atol=2e-9)
    assert 0 < figures["sampler_limited_share"] < 1
    assert figures["sampler_weight"] <= 1.4
    # A long answer that the sampler found e^2000 times less likely: its weight is the limit, or 0.
    far = torch.full((2000,), -1.0, dtype=torch.float64)
    weights, limited = sampler_weights(correction, far, far - 1, 1.4, torch.zeros(2000, dtype=torch.int64), 1)
    assert limited.all()
    assert torch.equal(weights, torch.full_like(far, 0.0 if "mask" in correction else math.exp(math.log(1.4))))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("algorithm", PRESETS)
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_loss_and_its_gradient_are_those_of_numpy(
    algorithm: PolicyAlgorithm, normalisation: Any, estimator: Any
) -> None:
    config = ReinforcementConfig(
        algorithm=algorithm,
        normalisation=normalisation,
        kl_weight=0.3,
        kl_estimator=estimator,
        entropy_weight=0.2,
        max_answer=20,
        sampler_ratio_limit=1.3 if estimator == "k2" else 0.0,
    )
    objective = policy_objective(config)
    (part,) = micro_batches_of(some_examples(), max_tokens=1000, row_length=32)
    part = replace(part, values={name: values.double() for name, values in part.values.items()})
    scores = scores_of(part)
    loss, _ = objective.loss(part, scores, totals_of([part]))
    now = {name: part.values[name].double().numpy() for name in ("new", "entropies", "scalars")}
    # The weights of tokens are in fp32.
    np.testing.assert_allclose(loss.item(), reference(objective, part.sequences, now), rtol=1e-6)
    loss.backward()
    assert scores.scalars is not None
    gradients = {"new": scores.log_probabilities, "entropies": scores.entropies, "scalars": scores.scalars}
    for name, scored in gradients.items():
        found = np.zeros(sum(LENGTHS)) if scored.grad is None else scored.grad.numpy()
        np.testing.assert_allclose(found, differences(objective, part.sequences, now, name), rtol=1e-6, atol=2e-9)


def differences(
    objective: PolicyObjective, sequences: list[TokenSequence], now: dict[str, np.ndarray], name: str
) -> np.ndarray:
    """The gradient with respect to one kind of score, by central differences."""
    step, result = 1e-6, []
    for token in range(len(now[name])):
        moved = [now[name].copy(), now[name].copy()]
        moved[0][token] += step
        moved[1][token] -= step
        up, down = (reference(objective, sequences, {**now, name: each}) for each in moved)
        result.append((up - down) / (2 * step))
    return np.array(result)


def test_figures_are_those_of_the_whole_batch_however_it_is_divided() -> None:
    objective = policy_objective(ReinforcementConfig(algorithm="ppo", kl_weight=0.1))
    found = []
    for max_tokens in (1000, 1):
        parts = micro_batches_of(some_examples(), max_tokens=max_tokens, row_length=32)
        totals, total = totals_of(parts), {}
        for part in parts:
            metrics = objective.loss(part, scores_of(part), totals)[1]
            add_metrics(total, {name: value.item() for name, value in metrics.items()})
        found.append(total)
    values = {
        name: np.concatenate([u.values[name] for (u,) in some_examples()]) for name in some_examples()[0][0].values
    }
    new, advantages = values["new"].astype(np.float64), values["advantages"]
    ratio = np.exp(new - values["old_log_probabilities"])
    d = new - values["reference_log_probabilities"]
    clipped = np.where(advantages > 0, ratio > 1.2, ratio < 0.8)
    expected = {
        "entropy": values["entropies"].mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_share": clipped.mean(),
        "kl": (np.exp(-d) - 1 + d).mean(),
        "policy_loss": -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).mean(),
    }
    assert 0.1 < expected["clip_share"] < 0.9
    for metrics in found:
        assert metrics.keys() == expected.keys() | {"value_loss"}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert metrics["value_loss"] == pytest.approx(found[0]["value_loss"])


def test_an_answer_without_tokens_adds_nothing() -> None:
    objective = policy_objective(ReinforcementConfig(algorithm="gspo"))
    empty = TokenSequence(np.array([1, 2]), np.array([False, False]))
    names = some_examples()[0][0].values
    empty = empty.with_values(**{name: np.empty(0, np.float32) for name in names})
    with_it = [*some_examples(), (empty,)]
    losses = []
    for examples in (some_examples(), with_it):
        (part,) = micro_batches_of(examples, max_tokens=1000, row_length=32)
        losses.append(objective.loss(part, scores_of(part), BatchTotals(15, 4, 4))[0])
    assert torch.equal(*losses)


def test_missing_values_and_a_missing_value_head_are_named() -> None:
    (part,) = micro_batches_of(some_examples(), max_tokens=1000, row_length=32)
    bare = replace(part, values={"advantages": part.values["advantages"]})
    with pytest.raises(NapkinError, match="no 'old_log_probabilities'"):
        policy_objective(ReinforcementConfig()).loss(bare, scores_of(part), totals_of([part]))
    headless = scores_of(part)._replace(scalars=None)
    with pytest.raises(NapkinError, match="no value head"):
        policy_objective(ReinforcementConfig(algorithm="ppo")).loss(part, headless, totals_of([part]))
