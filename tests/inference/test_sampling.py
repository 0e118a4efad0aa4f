import dataclasses
import itertools
import math
from collections import Counter
from random import Random

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.generation import generate
from napkin.inference.sampling import distributions, draw, plain_draw, uniform
from napkin.inference.settings import Sampling
from napkin.model.transformer import Transformer
from oracles.tiny_run import MODEL

LOGITS = torch.tensor([1.0, 3.0, -2.0, 3.0, 0.5, 2.5, -9.0, 0.0])


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(dataclasses.replace(MODEL, vocab_size=50, context_length=12), seed=5)
    # A model as it begins would answer anything to everything.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(params=["compiled", "sorted"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of a draw: the loops of a CPU, and the operators that other devices have."""
    if request.param == "sorted":
        monkeypatch.setattr("napkin.inference.sampling.are_compiled", lambda logits: False)
    return request.param


def draws(sampling: Sampling, n: int, logits: torch.Tensor = LOGITS, history: list[int] | None = None) -> Counter[int]:
    rows = draw(logits.expand(n, -1), [sampling] * n, range(n), [history or []] * n)
    return Counter(drawn.token for drawn in rows)


def assert_distributed(counts: Counter[int], probabilities: torch.Tensor) -> None:
    """Pearson's chi-square; its mean is the degrees of freedom, its variance twice that."""
    n, possible = counts.total(), [i for i, p in enumerate(probabilities.tolist()) if p > 0]
    assert set(counts) <= set(possible)
    expected = {i: n * probabilities[i].item() for i in possible}
    assert min(expected.values()) > 5
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in possible)
    freedom = len(possible) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = LOGITS.clamp(min=-1)
    expected = torch.softmax(logits.double() / temperature, dim=0)
    assert_distributed(draws(Sampling(temperature, None, 1.0, seed=1), 5000, logits), expected)


@pytest.mark.usefixtures("each_form")
def test_top_k_draws_among_the_k_likeliest_in_their_proportions() -> None:
    expected = torch.softmax(LOGITS.double(), dim=0)
    expected[[0, 2, 4, 6, 7]] = 0
    assert_distributed(draws(Sampling(1.0, 3, 1.0, seed=2), 3000), expected / expected.sum())


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8, 0.9, 0.99, 0.999999, 1.0])
def test_top_p_draws_among_the_fewest_tokens_that_reach_the_mass(top_p: float) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(4))
    probabilities = torch.softmax(logits.double(), dim=0).tolist()
    kept: list[int] = []
    for token in sorted(range(30), key=lambda token: -probabilities[token]):
        if kept and sum(probabilities[other] for other in kept) >= top_p:
            break
        kept.append(token)
    counts = draws(Sampling(1.0, None, top_p, seed=3), 4000, logits)
    assert set(counts) <= set(kept)
    # Draws so many that all the likelier ones come.
    assert {token for token in kept if probabilities[token] > 0.01} <= set(counts)


@pytest.mark.usefixtures("each_form")
def test_min_p_leaves_out_tokens_far_less_likely_than_the_likeliest() -> None:
    expected = torch.softmax(LOGITS.double(), dim=0)
    # Id 0 has e^-2 of the likeliest, id 4 e^-2.5.
    expected = expected.where(expected >= 0.1 * expected.max(), 0)
    assert expected.count_nonzero() == 4
    assert_distributed(draws(Sampling(1.0, None, 1.0, min_p=0.1, seed=4), 3000), expected / expected.sum())


@pytest.mark.usefixtures("each_form")
def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    # Of the three likeliest, the two equal ones have 0.77: of all tokens together it would be 0.68.
    assert set(draws(Sampling(1.0, 3, 0.75, seed=5), 500)) == {1, 3}


def test_penalties_and_biases_change_the_distribution_as_their_formulas_say() -> None:
    settings = Sampling(1.0, None, 1.0, repetition_penalty=1.5, logit_bias=((6, 9.0), (1, -1.0)), seed=6)
    changed = LOGITS.double().clone()
    changed[[1, 5]] /= 1.5
    changed[2] *= 1.5
    changed[6] += 9
    changed[1] -= 1
    assert_distributed(draws(settings, 6000, history=[5, 1, 2, 5]), changed.softmax(dim=0))


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("extreme", [3e38, 1e30, 1e-38])
def test_no_setting_makes_a_draw_of_finite_logits_impossible(extreme: float) -> None:
    """Each number at both ends of its range, beside a plain row, which stays as it is alone."""
    logits = torch.stack([LOGITS / LOGITS.abs().max() * extreme, LOGITS])
    biased = tuple((token, sign * 100.0) for token, sign in enumerate([1, -1, 1, -1, 1, -1, 1, -1]))
    plain = Sampling(1.0, seed=5)
    (expected,) = draw(LOGITS[None], [plain], [0], [[]])
    for penalty, temperature, top_p, min_p, top_k in itertools.product(
        (0.01, 100.0), (0.0, 1e-320, 1e308), (1e-320, 1.0), (0.0, 1.0), (None, 1, 2**31 - 1)
    ):
        settings = Sampling(temperature, top_k, top_p, min_p, penalty, logit_bias=biased, logprobs=2, seed=2**62)
        drawn, other = draw(logits, [settings, plain], [0, 0], [[0, 1, 2, 3, 3], []])
        assert 0 <= drawn.token < len(LOGITS)
        assert other == expected


def test_biases_and_penalties_of_many_rows_are_those_of_loops() -> None:
    random = Random(3)
    n_rows, vocab_size = 9, 50
    logits = torch.randn(n_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    settings = [
        Sampling(
            1.0,
            top_p=1.0,
            repetition_penalty=random.choice([1.0, 0.5, 1.7]),
            # A token may be named several times.
            logit_bias=tuple((random.randrange(vocab_size), random.uniform(-9, 9)) for _ in range(30 * (row % 3))),
        )
        for row in range(n_rows)
    ]
    histories = [[random.randrange(vocab_size) for _ in range(random.randrange(40))] for _ in range(n_rows)]
    found = distributions(logits, settings, histories)
    for row, each in enumerate(settings):
        changed = logits[row].tolist()
        for token in set(histories[row]):
            factor = each.repetition_penalty
            changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
        for token, bias in each.logit_bias:
            changed[token] += bias
        torch.testing.assert_close(found[row], torch.tensor(changed).double().softmax(dim=0), rtol=1e-4, atol=1e-9)


@pytest.mark.usefixtures("each_form")
def test_a_batch_draws_the_tokens_of_the_plain_formula() -> None:
    """Settings of every kind together, ties among the likeliest, and more kept tokens than the fast form looks at."""
    random = Random(8)
    for vocab_size in (2, 30, 700):
        settings = [
            Sampling(
                random.choice([0.0, 0.3, 1.0, 4.0]),
                random.choice([None, None, 1, 3, 20, 1000]),
                random.choice([1.0, 0.99, 0.7, 0.2]),
                random.choice([0.0, 0.0, 0.01, 0.3]),
                random.choice([1.0, 1.3, 0.8]),
                tuple((random.randrange(vocab_size), random.choice([-2.0, 0.5, 3.0])) for _ in range(row % 3)),
                seed=random.randrange(2**62),
            )
            for row in range(60)
        ]
        histories = [[random.randrange(vocab_size) for _ in range(random.randrange(9))] for _ in settings]
        numbers = [random.randrange(100) for _ in settings]
        # Steps of an eighth: many tokens are equally likely.
        logits = torch.tensor([[random.randrange(-24, 25) / 8 for _ in range(vocab_size)] for _ in settings])
        found = [drawn.token for drawn in draw(logits, settings, numbers, histories)]
        rows = zip(logits.tolist(), settings, numbers, histories, strict=True)
        assert found == [plain_draw(*row) for row in rows]
        assert len(set(found)) > 1


def test_both_forms_draw_the_same_tokens_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed's text does not depend on the form."""
    generator = torch.Generator().manual_seed(4)
    scales = torch.tensor([0.01, 0.3, 1.0, 2.5, 6.0, 9.0])[:, None]
    logits = torch.randn(6, 20_000, generator=generator) * scales
    cases = [Sampling(0.8, seed=1), Sampling(1.0, 50, 0.9, seed=2), Sampling(1.2, None, 1.0, 0.02, seed=3)]
    for each in cases:
        found = []
        for is_compiled in (True, False):
            monkeypatch.setattr(
                "napkin.inference.sampling.are_compiled", lambda logits, is_compiled=is_compiled: is_compiled
            )
            rows = [draw(logits, [each] * 6, [number] * 6, [[]] * 6, tell_sampled=True) for number in range(5)]
            found.append([drawn for row in rows for drawn in row])
        tokens, logprobs = (
            [[getattr(drawn, name) for drawn in form] for form in found] for name in ("token", "sampled_logprob")
        )
        assert tokens[0] == tokens[1]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-12)


def test_a_bias_on_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(NapkinError, match=r"logit_bias names token 8.*0.*7"):
        draws(Sampling(logit_bias=((8, 1.0),)), 1)


@pytest.mark.usefixtures("each_form")
def test_each_row_draws_the_token_that_it_draws_alone() -> None:
    rows = [
        Sampling(1.0, 3, 0.9, seed=1),
        Sampling(0.0, seed=2),
        Sampling(2.0, None, 1.0, seed=3),
        Sampling(1.3, min_p=0.2, repetition_penalty=2.0, seed=4),
        Sampling(0.8, logit_bias=((3, 2.0),), logprobs=2, seed=5),
    ]
    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(0)) * 2
    histories = [[i, i + 1] for i in range(len(rows))]
    for number in range(20):
        together = draw(logits, rows, [number] * len(rows), histories)
        alone = [draw(logits[i : i + 1], [rows[i]], [number], [histories[i]])[0] for i in range(len(rows))]
        assert together == alone


def test_log_probabilities_are_those_of_the_model_alone() -> None:
    logprobs = LOGITS.log_softmax(dim=0)
    (drawn,) = draw(LOGITS[None], [Sampling(0.0, logprobs=3, logit_bias=((7, 99.0),))], [0], [[]])
    assert drawn.token == 7
    assert drawn.logprob == pytest.approx(logprobs[7].item())
    assert [token for token, _ in drawn.top[2:]] == [5]
    assert [value for _, value in drawn.top] == pytest.approx(logprobs.sort(descending=True).values[:3].tolist())


def test_numbers_of_a_seed_are_uniform_and_of_neighbours_unrelated() -> None:
    numbers = torch.tensor([[uniform(seed, number) for number in range(200)] for seed in range(100)]).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    n = numbers.numel()
    counts = torch.histc(numbers, 20, 0, 1)
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 19 + 4 * math.sqrt(38)
    for neighbours in (numbers[1:] - numbers[:-1], numbers[:, 1:] - numbers[:, :-1]):
        # Of independent ones the difference has a variance of 1/6.
        assert neighbours.var().item() == pytest.approx(1 / 6, rel=0.05)


@pytest.mark.usefixtures("each_form")
def test_equally_likely_tokens_are_cut_off_in_the_order_of_their_ids() -> None:
    counts = draws(Sampling(1.0, 3, 1.0), 300, torch.zeros(1000))
    assert set(counts) == {0, 1, 2}


def test_without_temperature_the_likeliest_token_always_comes(model: Transformer) -> None:
    tokens = [3, 1, 4]
    for token in generate(model, [3, 1, 4], 6, Sampling(temperature=0)):
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) == 9


@pytest.mark.parametrize(
    "sampling",
    [Sampling(5.0, top_k=1), Sampling(5.0, top_p=1e-9), Sampling(1e-6), Sampling(1e-300), Sampling(5e-324, top_p=1.0)],
)
def test_what_leaves_one_token_is_greedy(model: Transformer, sampling: Sampling) -> None:
    greedy = list(generate(model, [7], 20, Sampling(temperature=0)))
    assert list(generate(model, [7], 20, sampling)) == greedy


def test_the_same_seed_continues_in_the_same_way_and_another_one_in_another(model: Transformer) -> None:
    first = [list(generate(model, [7, 8], 30, Sampling(1.5, seed=seed))) for seed in (0, 1)]
    again = [list(generate(model, [7, 8], 30, Sampling(1.5, seed=seed))) for seed in (0, 1)]
    assert first == again
    assert first[0] != first[1]


def test_generation_ends_before_the_stop_token(model: Transformer) -> None:
    whole = list(generate(model, [7], 40, Sampling(1.5, seed=2)))
    stop = whole[10]
    assert list(generate(model, [7], 40, Sampling(1.5, seed=2), stop=stop)) == whole[: whole.index(stop)]


def test_past_the_context_the_oldest_tokens_fall_out_of_sight(model: Transformer) -> None:
    prompt = list(range(30))
    generated = list(generate(model, prompt, 20, Sampling(temperature=0)))
    assert generated == list(generate(model, prompt[-12:], 20, Sampling(temperature=0)))
    assert len(generated) == 20


def test_nothing_is_asked_of_the_random_state_of_torch(model: Transformer) -> None:
    state = torch.get_rng_state()
    list(generate(model, [7], 5, Sampling()))
    assert torch.equal(torch.get_rng_state(), state)


def test_no_tokens_wanted_are_no_tokens(model: Transformer) -> None:
    assert list(generate(model, [7], 0, Sampling())) == []


def test_an_empty_prompt_is_refused(model: Transformer) -> None:
    with pytest.raises(NapkinError, match="no token"):
        next(generate(model, [], 5, Sampling()))


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(value: float, temperature: float) -> None:
    with pytest.raises(NapkinError, match="infinity or NaN"):
        draws(Sampling(temperature), 1, torch.tensor([0.0, value]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": float("nan")},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 1e-39},
        {"repetition_penalty": 101.0},
        {"top_k": 10**400},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": ((1, 100.5),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logprobs": -1},
        {"stop": ("",)},
        {"stop_ids": (-5,)},
    ],
)
def test_settings_out_of_their_range_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(NapkinError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_generating_drops_nothing_and_leaves_the_model_in_training() -> None:
    config = dataclasses.replace(MODEL, vocab_size=50)
    dropping = Transformer(dataclasses.replace(config, dropout=0.5))
    whole = Transformer(config)
    whole.load_state_dict(dropping.state_dict())
    texts = [list(generate(model, [1, 2, 3], 20, Sampling(seed=1))) for model in (dropping, whole)]
    assert texts[0] == texts[1]
    assert dropping.training


@pytest.mark.usefixtures("each_form")
def test_tokens_that_reach_top_p_exactly_are_enough() -> None:
    """Of equal weights, whose sums are exact: half of four tokens are two, and a quarter is one."""
    settings = [Sampling(temperature=1, top_p=share) for share in (0.25, 0.5, 0.75, 1)]
    found = distributions(torch.zeros(4, 4), settings, [[]] * 4)
    assert found.tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0.25] * 4]
