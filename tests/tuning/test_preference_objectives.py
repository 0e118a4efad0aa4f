"""Objectives of preferences: values and gradients equal float64 NumPy's, for any arrangement of a batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from napkin.chats.token_sequence import Example, TokenSequence, sequence_of
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import Passes
from napkin.distributed.ranks import ALONE
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.transformer import TokenScores, Transformer, add_scalar_head
from napkin.recipe.layout import Layout
from napkin.recipe.tuning_recipe import PreferenceConfig
from napkin.tuning.packing import Packing, micro_batches_of
from napkin.tuning.preferences import (
    DESIRABLE,
    RewardObjective,
    log_odds,
    mismatched_number,
    preference_objective,
    rewarded,
    with_kl_estimate,
)
from napkin.tuning.sequence_step import REFERENCE, Objective, totals_of

Array = NDArray[np.float64]
CONFIG = ModelConfig(vocab_size=29, context_length=32, d_model=16, n_layers=2, n_heads=2)
CASES = {
    "dpo": PreferenceConfig("dpo", beta=0.3),
    "dpo, smoothed and supervised": PreferenceConfig("dpo", beta=0.3, label_smoothing=0.2, supervised_weight=0.7),
    "dpo of means": PreferenceConfig("dpo", beta=3.0, per_token=True),
    "ipo": PreferenceConfig("ipo", beta=0.2),
    "kto": PreferenceConfig("kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.8),
    "orpo": PreferenceConfig("orpo", beta=0.4),
    "simpo": PreferenceConfig("simpo", beta=2.0, margin=0.5),
}


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def expected_terms(
    config: PreferenceConfig, examples: list[Example], scores: list[list[Array]]
) -> tuple[float, list[Array]]:
    """The loss of a batch, and its derivative by each counted token's log-probability, by hand."""
    loss, slopes = 0.0, []
    takes_means = config.objective in ("ipo", "orpo", "simpo") or config.per_token
    references = [
        [np.float64(s.values[REFERENCE]) if REFERENCE in s.values else 0.0 for s in example] for example in examples
    ]
    for example, logprobs, reference in zip(examples, scores, references, strict=True):
        lengths = [len(each) if takes_means else 1 for each in logprobs]
        beside = [0.0, 0.0] if config.objective in ("orpo", "simpo") else reference
        values = [(each - ref).sum() / n for each, ref, n in zip(logprobs, beside, lengths, strict=False)]
        beta, of_values, of_supervised = config.beta, [0.0, 0.0], 0.0
        if config.objective == "kto":
            kl, good = float(example[0].values["kl"][0]), example[0].values[DESIRABLE][0] == 1
            sign, weight = (1, config.desirable_weight) if good else (-1, config.undesirable_weight)
            share = sigmoid(-sign * beta * (values[0] - kl))
            loss += weight * share
            of_values = [-sign * beta * weight * share * (1 - share)]
        elif config.objective == "ipo":
            error = values[0] - values[1] - 1 / (2 * beta)
            loss += error**2
            of_values = [2 * error, -2 * error]
        elif config.objective == "orpo":
            odds = [np.exp(value) / (1 - np.exp(value)) for value in values]
            ratio = np.log(odds[0] / odds[1])
            loss += -values[0] - beta * np.log(sigmoid(ratio))
            slope = -beta * sigmoid(-ratio)
            of_values = [slope / (1 - np.exp(values[0])) - 1, -slope / (1 - np.exp(values[1]))]
        else:
            h = beta * (values[0] - values[1]) - config.margin
            e = config.label_smoothing
            loss += -(1 - e) * np.log(sigmoid(h)) - e * np.log(sigmoid(-h))
            slope = beta * (-(1 - e) * sigmoid(-h) + e * sigmoid(h))
            of_values = [slope, -slope]
            loss -= config.supervised_weight * logprobs[0].mean()
            of_supervised = -config.supervised_weight / len(logprobs[0])
        for place, (each, n, slope) in enumerate(zip(logprobs, lengths, of_values, strict=False)):
            slopes.append(np.full(len(each), slope / n + (of_supervised if place == 0 else 0)) / len(examples))
    return loss / len(examples), slopes


def some_examples(config: PreferenceConfig, n: int = 7) -> list[Example]:
    """Pairs with a common prompt, or with KTO single answers; references are near what the model says."""
    generator = np.random.default_rng(5)
    examples: list[Example] = []
    for _ in range(n):
        prompt = generator.integers(0, 29, generator.integers(1, 8)).tolist()
        answers = []
        for _ in range(2):
            answer = generator.integers(0, 29, generator.integers(1, 12)).tolist()
            reference = generator.normal(-3.4, 0.4, len(answer)).astype(np.float32)
            answers.append(sequence_of(prompt, answer).with_values(**{REFERENCE: reference}))
        examples.append(tuple(answers))
    if config.objective != "kto":
        return examples
    marked = [
        (a.with_values(**{DESIRABLE: np.full(a.n_trained, number % 3 > 0, np.float32)}), b)
        for number, (a, b) in enumerate(examples)
    ]
    return [*with_kl_estimate(marked, generator.normal(0.5, 0.2, n).tolist())]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_by_hand(name: str) -> None:
    config = CASES[name]
    examples = some_examples(config)
    generator = np.random.default_rng(8)
    scores = [
        [generator.normal(-3, 1, sequence.n_trained).clip(max=-0.1) for sequence in example] for example in examples
    ]
    loss, slopes = expected_terms(config, examples, scores)
    found, found_slopes, metrics = objective_of(preference_objective(config), examples, scores)
    assert found == pytest.approx(loss, rel=1e-7)
    np.testing.assert_allclose(np.concatenate(found_slopes), np.concatenate(slopes), rtol=1e-6, atol=1e-9)
    assert metrics["margin"] == pytest.approx(metrics["chosen_reward"] - metrics["rejected_reward"])


def objective_of(
    objective: Objective, examples: list[Example], scores: list[list[Array]]
) -> tuple[float, list[Array], dict[str, float]]:
    """Loss, slopes and figures of a batch in micro-batches, from given log-probabilities in float64."""
    parts = micro_batches_of(examples, max_tokens=30, row_length=32)
    totals, loss, metrics = totals_of(parts), 0.0, dict[str, float]()
    slopes: dict[int, Array] = {}
    for part in parts:
        given = [torch.from_numpy(np.concatenate(scores[number])) for number in part.example_numbers]
        logprobs = torch.cat(given).requires_grad_()
        value, more = objective.loss(part, TokenScores(logprobs, torch.zeros_like(logprobs), None), totals)
        value.backward()
        loss += float(value.detach())
        assert logprobs.grad is not None
        of_examples = logprobs.grad.split([len(each) for each in given])
        slopes |= {number: each.numpy() for number, each in zip(part.example_numbers, of_examples, strict=True)}
        for key, figure in more.items():
            metrics[key] = metrics.get(key, 0.0) + float(figure)
    return loss, [slopes[number] for number in range(len(examples))], metrics


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_model_does_not_depend_on_the_arrangement(name: str) -> None:
    config = CASES[name]
    model, examples = Transformer(CONFIG), some_examples(config)
    expected = plain_gradient(model, config, examples)
    packings: list[tuple[Packing, int]] = [("packed", 1), ("packed", 90), ("padded", 60), ("padded left", 999)]
    for packing, max_tokens in packings:
        found = gradient(model, preference_objective(config), examples, packing, max_tokens)
        assert relative_error(found, expected) < 1e-6
    other = gradient(model, preference_objective(config), examples[::-1], "packed", 40)
    assert relative_error(other, expected) < 1e-6


def test_the_gradient_of_a_reward_model_does_not_depend_on_the_arrangement() -> None:
    model = Transformer(CONFIG)
    add_scalar_head(model)
    head = model.scalar_head
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
    pairs = some_examples(CASES["dpo"])
    # Plainly: the head on the state after the last token of each answer.
    model.zero_grad()
    rewards = [[head(model.hidden(torch.from_numpy(s.tokens)[None])[0, -1])[0] for s in pair] for pair in pairs]
    sum(-torch.log(torch.sigmoid(chosen - rejected)) / len(pairs) for chosen, rejected in rewards).backward()  # pyright: ignore[reportAttributeAccessIssue]
    expected = flat_gradient(model)
    examples: list[Example] = [tuple(rewarded(sequence) for sequence in pair) for pair in pairs]
    packings: list[tuple[Packing, int]] = [("packed", 1), ("packed", 90), ("padded", 60), ("padded left", 999)]
    for packing, max_tokens in packings:
        found = gradient(model, RewardObjective(), examples, packing, max_tokens)
        assert relative_error(found, expected) < 1e-6


def gradient(
    model: Transformer,
    objective: Objective,
    examples: list[Example],
    packing: Packing,
    max_tokens: int,
) -> torch.Tensor:
    model.zero_grad()
    parts = micro_batches_of(examples, max_tokens=max_tokens, row_length=32, packing=packing)
    totals = totals_of(parts)
    ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
        [part.rows for part in parts],
        lambda number, scores: objective.loss(parts[number], scores, totals)[0],
        Passes(),
    )
    return flat_gradient(model)


def plain_gradient(model: Transformer, config: PreferenceConfig, examples: list[Example]) -> torch.Tensor:
    """All logits of one sequence at a time, with the slopes by hand."""
    logprobs = [[plain_logprobs(model, sequence) for sequence in example] for example in examples]
    numbers = [[each.detach().numpy().astype(np.float64) for each in example] for example in logprobs]
    _, slopes = expected_terms(config, examples, numbers)
    model.zero_grad()
    sequences = [each for example in logprobs for each in example]
    for each, slope in zip(sequences, slopes, strict=True):
        (each * torch.from_numpy(slope)).sum().backward()
    return flat_gradient(model)


def plain_logprobs(model: Transformer, sequence: TokenSequence) -> torch.Tensor:
    tokens = torch.from_numpy(sequence.tokens)[None]
    logprobs = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
    return logprobs[torch.from_numpy(sequence.loss_mask[1:])]


def flat_gradient(model: Transformer) -> torch.Tensor:
    # The parameters that an objective does not reach have none, or zeros.
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_dpo_reaches_the_optimum_of_a_toy() -> None:
    """Of pairs that a Bradley-Terry model of rewards log w labels, it is the reference times w^(1/beta)."""
    config = ModelConfig(vocab_size=4, context_length=4, d_model=8, n_layers=1, n_heads=1)
    model, wins, beta = Transformer(config, seed=4), {1: 1, 2: 2, 3: 3}, 0.5
    prompt = torch.tensor([[0]])
    reference = model(prompt)[0, 0].log_softmax(-1).detach()
    answers = {
        answer: sequence_of([0], [answer]).with_values(**{REFERENCE: reference[answer : answer + 1].numpy()})
        for answer in wins
    }
    # i wins against j w_i times in w_i + w_j.
    examples: list[Example] = [
        (answers[i], answers[j]) for i, won in wins.items() for j in wins if i != j for _ in range(won)
    ]
    objective = preference_objective(PreferenceConfig("dpo", beta=beta))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, tolerance_grad=1e-9, line_search_fn="strong_wolfe")
    parts = micro_batches_of(examples, max_tokens=999, row_length=4)

    def closure() -> float:
        optimizer.zero_grad()
        loss_of = lambda n, scores: objective.loss(parts[n], scores, totals_of(parts))[0]  # noqa: E731
        rows = [part.rows for part in parts]
        return float(ParallelModel(model, ALONE, Layout()).gradients_of_sequences(rows, loss_of, Passes()))

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    weights = reference.exp()[1:] * torch.tensor(list(wins.values())) ** (1 / beta)
    # DPO compares answers with each other, and leaves the probability of what no pair names free.
    found = model(prompt)[0, 0, 1:].softmax(-1)
    assert torch.allclose(found, weights / weights.sum(), atol=1e-3)


def test_odds_are_finite_and_exact_near_certainty() -> None:
    values = torch.tensor([-1e-9, 0.0, -1e-5, -0.5, -0.7, -30.0], dtype=torch.float64, requires_grad=True)
    found = log_odds(values)
    found.sum().backward()
    expected = [-(np.log(np.expm1(-x))) for x in (-1e-6, -1e-6, -1e-5, -0.5, -0.7, -30.0)]
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-9)
    assert values.grad is not None
    assert bool(values.grad.isfinite().all())


def test_the_kl_estimate_is_of_the_whole_batch_and_never_negative() -> None:
    plain = sequence_of([1], [2, 3]).with_values(**{DESIRABLE: np.ones(2, np.float32)})
    bad = sequence_of([1], [2]).with_values(**{DESIRABLE: np.zeros(1, np.float32)})
    examples: list[Example] = [(plain, plain), (bad, plain), (plain, bad)]
    (one,), (two,), (three,) = with_kl_estimate(examples, [1.0, 2.0, 3.0])
    assert [float(each.values["kl"][0]) for each in (one, two, three)] == [2.0] * 3
    assert [float(each.values["answers_alike"][-1]) for each in (one, two, three)] == [2.0, 1.0, 2.0]
    ((only,),) = with_kl_estimate(examples[:1], [-1.0])
    assert float(only.values["kl"][0]) == 0.0


def test_a_mismatched_answer_is_of_the_next_other_prompt() -> None:
    generator = np.random.default_rng(2)
    for _ in range(50):
        prompts = [str(each) for each in generator.integers(0, 3, generator.integers(1, 9))]
        n = len(prompts)
        runs = [sum(one != other for one, other in pairwise(prompts[: number + 1])) for number in range(n)]
        for number in range(n):
            found = mismatched_number(runs, number, is_closed=prompts[0] == prompts[-1])
            later = [(number + step) % n for step in range(1, n + 1)]
            others = [each for each in later if prompts[each] != prompts[number]]
            assert found == (others[0] if others else later[0])


def test_what_an_objective_cannot_use_is_named() -> None:
    single: list[Example] = [(sequence_of([1], [2]),)]
    with pytest.raises(NapkinError, match="example 0 has 1 sequences"):
        objective_of(preference_objective(CASES["orpo"]), single, [[np.zeros(1)]])
    pair: list[Example] = [(sequence_of([1], [2]), sequence_of([1], [3]))]
    with pytest.raises(NapkinError, match="no 'reference_log_probabilities'"):
        objective_of(preference_objective(CASES["dpo"]), pair, [[np.zeros(1), np.zeros(1)]])
    with pytest.raises(NapkinError, match="no scalar head"):
        objective_of(RewardObjective(), pair, [[np.zeros(1), np.zeros(1)]])
    with pytest.raises(NapkinError, match=r"ipo.*read"):
        PreferenceConfig("ipo", margin=0.5)
