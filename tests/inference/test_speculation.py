import dataclasses
import itertools
import math
from collections import Counter
from random import Random

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.generation import continue_prompt
from napkin.inference.sampling import Draw, distributions, inverted, uniform
from napkin.inference.settings import Sampling
from napkin.inference.speculation import (
    DraftModel,
    PromptLookup,
    SpeculationMeter,
    best_proposed,
    expected_tokens,
    improvement,
    modified_rejection,
    speculate,
)
from napkin.model.transformer import Transformer
from oracles.model_switches import config_of, disturbed, random_tokens

SWITCHES = [
    "default",
    "window",
    "window_every_other_alibi",
    "alibi_plain",
    "positions_learned",
    "positions_none",
    "softcap",
    "experts_shared",
    "block_parallel",
    "mup_untied_biases",
]


def model_of(switch: str, **changes: int) -> Transformer:
    return disturbed(config_of(switch, **{"context_length": 40, **changes})).eval()


def near(model: Transformer, *, context_length: int = 40) -> Transformer:
    """A model that often, not always, takes the same token."""
    draft = Transformer(dataclasses.replace(model.config, context_length=context_length)).eval()
    draft.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return draft


def prompt_of(model: Transformer, length: int = 11) -> list[int]:
    return random_tokens(model.config, 1, length)[0].tolist()


def ids(draws: list[Draw]) -> list[int]:
    return [drawn.token for drawn in draws]


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("switch", SWITCHES)
def test_greedy_ids_are_those_of_plain_decoding(switch: str) -> None:
    model = model_of(switch)
    # Past the context length, so that the oldest tokens fall out of sight on the way.
    prompt, n_tokens, greedy = prompt_of(model), 38, Sampling(temperature=0)
    plain = list(continue_prompt(model, prompt, n_tokens, greedy))
    for proposer in (PromptLookup(2), DraftModel(near(model))):
        meter = SpeculationMeter()
        assert list(speculate(model, prompt, n_tokens, greedy, proposer, proposed=3, meter=meter)) == plain
        assert meter.tokens == n_tokens - 1
        if isinstance(proposer, DraftModel):
            assert 0 < meter.accepted < meter.tested <= meter.proposed


def test_a_draft_with_a_shorter_context_and_a_prompt_beyond_the_context_change_nothing() -> None:
    model, greedy = model_of("default"), Sampling(temperature=0)
    prompt = prompt_of(model, 60)
    plain = ids(list(continue_prompt(model, prompt, 30, greedy)))
    draft = DraftModel(near(model, context_length=16))
    assert ids(list(speculate(model, prompt, 30, greedy, draft, proposed=4))) == plain


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.3, top_k=7, top_p=0.9, seed=3),
        Sampling(0.7, top_p=1.0, min_p=0.1, repetition_penalty=1.2, seed=4),
        Sampling(2.0, logit_bias=((5, 4.0), (9, -3.0)), logprobs=2, seed=5),
    ],
)
def test_looking_up_the_prompt_leaves_each_sampled_text_as_it_is(sampling: Sampling) -> None:
    model = model_of("default", vocab_size=12)
    prompt = prompt_of(model) * 2
    plain = list(continue_prompt(model, prompt, 40, sampling))
    meter = SpeculationMeter()
    drawn = list(speculate(model, prompt, 40, sampling, PromptLookup(3), proposed=5, meter=meter))
    assert ids(drawn) == ids(plain)
    assert 0 < meter.accepted < meter.proposed
    for one, other in zip(drawn, plain, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert other.logprob is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.thorough
def test_a_text_does_not_depend_on_how_many_tokens_are_proposed() -> None:
    model = model_of("grouped")
    draft, prompt = near(model), prompt_of(model)
    sampling = Sampling(1.0, top_p=0.95, repetition_penalty=1.1, seed=8)
    texts = [
        ids(list(speculate(model, prompt, 35, sampling, DraftModel(draft), proposed=proposed)))
        for proposed in (0, 1, 4, None)
    ]
    assert all(text == texts[0] for text in texts)
    assert texts[0] != ids(list(speculate(model, prompt, 35, dataclasses.replace(sampling, seed=9), DraftModel(draft))))


def chi_square_excess(counts: Counter, expected: dict) -> float:
    """Pearson's chi-square less its mean, in standard deviations."""
    assert set(counts) <= {outcome for outcome, p in expected.items() if p > 0}
    n = counts.total()
    likely = {outcome: p for outcome, p in expected.items() if n * p > 5}
    statistic = sum((counts[outcome] - n * p) ** 2 / (n * p) for outcome, p in likely.items())
    return (statistic - len(likely) + 1) / math.sqrt(2 * max(len(likely) - 1, 1))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_p=1.0, seed=1),
        Sampling(0.6, top_k=4, top_p=0.9, seed=2),
        Sampling(1.5, top_p=1.0, min_p=0.2, repetition_penalty=1.4, logit_bias=((3, 1.0),), seed=3),
    ],
)
def test_tokens_of_a_draft_are_distributed_as_the_targets(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = 1.5 * torch.randn(2, 7, generator=generator)
    target, draft = distributions(logits, [sampling] * 2, [[1, 3]] * 2)
    counts, n_accepted, n = Counter[int](), 0, 3000
    for number in range(n):
        proposed = int(inverted(draft[None], [uniform(sampling.seed, number, 1)]))
        (token,) = modified_rejection(target[None], draft[None], [proposed], [sampling], [number])
        counts[token] += 1
        n_accepted += token == proposed
    assert chi_square_excess(counts, dict(enumerate(target.tolist()))) < 4
    # Of all rules with that result none accepts more: the overlap of the two, definition 3.2 and theorem 3.5.
    overlap = float(torch.minimum(target, draft).sum())
    assert abs(n_accepted / n - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / n)


@pytest.mark.thorough
def test_what_replaces_a_proposal_depends_on_it_only_as_the_closed_form_says() -> None:
    """The joint distribution of the proposal and the token: of x proposed, x with min(1, p(x) / q(x)), else y with
    max(0, p(y) - q(y)) over its sum. So all uniform numbers of tokens are unrelated."""
    draft = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    targets = [
        torch.tensor([0.35, 0.25, 0.3, 0.1], dtype=torch.float64),
        torch.tensor([0.2, 0.4, 0.0, 0.4], dtype=torch.float64),
    ]
    n, sampling = 6000, Sampling(1.0, top_p=1.0, seed=11)
    joint = [Counter[tuple[int, int]](), Counter[tuple[int, int]]()]
    pairs = Counter[tuple[int, int]]()
    for text in range(n):
        tokens = []
        for place, target in enumerate(targets):
            number = 2 * text + place
            proposed = int(inverted(draft[None], [uniform(sampling.seed, number, 1)]))
            tokens += modified_rejection(target[None], draft[None], [proposed], [sampling], [number])
            joint[place][proposed, tokens[-1]] += 1
        pairs[tokens[0], tokens[1]] += 1
    ids = range(4)
    for target, counts in zip(targets, joint, strict=True):
        accepted = (target / draft).clamp(max=1)
        residual = (target - draft).clamp(min=0)
        residual /= residual.sum()
        expected = {
            (x, y): float(draft[x] * (accepted[x] * (x == y) + (1 - accepted[x]) * residual[y]))
            for x in ids
            for y in ids
        }
        assert sum(expected.values()) == pytest.approx(1)
        assert chi_square_excess(counts, expected) < 4
    assert chi_square_excess(pairs, {(x, y): float(targets[0][x] * targets[1][y]) for x in ids for y in ids}) < 4


@pytest.mark.thorough
def test_a_text_with_a_draft_is_distributed_as_the_model_says() -> None:
    model = model_of("default", vocab_size=6, n_layers=1, context_length=250)
    sampling, prompt, n_tokens = Sampling(1.2, top_k=4, top_p=1.0, repetition_penalty=1.1, seed=3), [1, 2], 240
    meter = SpeculationMeter()
    draws = speculate(model, prompt, n_tokens, sampling, DraftModel(near(model)), proposed=3, meter=meter)
    tokens = prompt + ids(list(draws))
    assert 0.2 < meter.acceptance < 0.95
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0, len(prompt) - 1 : -1]
    histories = [tokens[: len(prompt) + number] for number in range(n_tokens)]
    expected = distributions(logits, [sampling] * n_tokens, histories)
    drawn = torch.nn.functional.one_hot(torch.tensor(tokens[len(prompt) :]), 6).double()
    # Given what comes before, each draw less its probabilities has mean 0: sums of any function of it are normal.
    surprise = expected.clamp(min=1e-300).log()
    functions = [*torch.eye(6, dtype=torch.float64).unsqueeze(1).expand(-1, n_tokens, -1), surprise]
    for function in functions:
        mean = (expected * function).sum(dim=1)
        variance = (expected * function.square()).sum(dim=1) - mean.square()
        excess = ((drawn * function).sum(dim=1) - mean).sum() / variance.sum().sqrt()
        assert abs(excess) < 4


def test_lookup_proposes_what_followed_the_longest_suffix_most_recently() -> None:
    random = Random(6)
    for _ in range(200):
        tokens = [random.randrange(4) for _ in range(random.randint(1, 30))]
        n, longest = random.randint(1, 5), random.randint(1, 4)
        expected: list[int] = []
        for size, end in itertools.product(range(longest, 0, -1), range(len(tokens) - 1, 0, -1)):
            if size <= end and tokens[end - size : end] == tokens[len(tokens) - size :]:
                # Read on into what is written, as a copy of its own past.
                copied = list(tokens)
                for _ in range(n):
                    copied.append(copied[end + len(copied) - len(tokens)])
                expected = copied[len(tokens) :]
                break
        lookup = PromptLookup(longest)
        lookup.propose(tokens[: len(tokens) // 2] or tokens, n, Sampling(), 0)
        assert lookup.propose(tokens, n, Sampling(), 0) == expected


@pytest.mark.parametrize(("acceptance", "proposed"), [(0.0, 3), (0.3, 1), (0.8, 4), (0.95, 12), (1.0, 5)])
def test_planned_tokens_and_improvement_are_those_of_a_simulation(acceptance: float, proposed: int) -> None:
    random, n, draft_cost, pass_cost = Random(7), 20_000, 0.1, 1.2
    tokens = []
    for _ in range(n):
        accepted = list(itertools.takewhile(lambda _: random.random() < acceptance, range(proposed)))
        tokens.append(len(accepted) + 1)
    mean = sum(tokens) / n
    error = math.sqrt(sum((each - mean) ** 2 for each in tokens) / n / n)
    assert abs(mean - expected_tokens(acceptance, proposed)) <= 4 * error
    # Seconds in units of the target's token: without speculation a token takes 1.
    seconds = n * (proposed * draft_cost + pass_cost)
    planned = improvement(acceptance, proposed, draft_cost, pass_cost)
    assert abs(sum(tokens) / seconds - planned) <= 4 * error * planned / mean


def test_the_planned_number_of_proposals_is_the_best_and_none_where_none_helps() -> None:
    assert best_proposed(0.9, 0.01) > best_proposed(0.6, 0.01) > best_proposed(0.6, 0.3) > 0
    # An improvement exists exactly if α > c, corollary 3.9.
    assert best_proposed(0.3, 0.31) == 0 < best_proposed(0.3, 0.29)
    assert best_proposed(1.0, 0.0) == 16


def test_the_meter_counts_what_it_is_told_and_plans_with_it() -> None:
    meter = SpeculationMeter()
    assert meter.next_proposed() == 0
    for _ in range(2):
        assert meter.next_proposed() == 0
        meter.add(0, 0, 1, 0.0, 2.0)
    assert meter.next_proposed() > 0
    for _ in range(50):
        meter.add(4, 4, 5, 0.4, 2.0)
    assert (meter.acceptance, meter.passes, meter.tokens) == (1.0, 52, 252)
    assert meter.costs.draft_cost == pytest.approx(0.05)
    assert meter.planned_improvement() == pytest.approx(5 / 1.2)
    assert meter.metered_improvement() == pytest.approx(2.0 * 252 / (2 * 2.0 + 50 * 2.4))
    assert meter.next_proposed() > 4
    for _ in range(50):
        meter.add(4, 0, 1, 0.4, 2.0)
    assert meter.next_proposed() <= 1


def test_a_pass_that_was_slow_once_is_tried_again() -> None:
    meter = SpeculationMeter()
    # The first pass of a kind compiles its kernels, and others are disturbed.
    for seconds in (9.0, 1.0):
        meter.add(0, 0, 1, 0.0, seconds)
    for seconds in (20.0, 1.1):
        assert meter.next_proposed() == 4
        meter.add(4, 4, 5, 0.0, seconds)
    meter.add(16, 16, 17, 0.0, 30.0)
    tried = []
    for _ in range(400):
        tried.append(meter.next_proposed())
        meter.add(tried[-1], tried[-1], tried[-1] + 1, 0.0, 1.0 + tried[-1] / 40)
    assert tried[0] == 4
    assert tried[-60:].count(16) > 50


def test_proposals_that_are_all_accepted_give_as_many_tokens_per_pass() -> None:
    model = model_of("default")
    meter = SpeculationMeter()
    list(speculate(model, [1, 2, 3], 26, Sampling(temperature=0), DraftModel(model), proposed=4, meter=meter))
    assert (meter.passes, meter.accepted, meter.acceptance, meter.tokens_per_pass) == (5, 20, 1.0, 5.0)


def test_generation_ends_before_a_stop_token_that_was_proposed() -> None:
    model = model_of("default")
    prompt, greedy = prompt_of(model), Sampling(temperature=0)
    plain = ids(list(continue_prompt(model, prompt, 20, greedy)))
    stop = plain[7]
    stopping = dataclasses.replace(greedy, stop_ids=(stop,))
    draws = speculate(model, prompt, 20, stopping, DraftModel(model), proposed=5)
    assert ids(list(draws)) == plain[: plain.index(stop)]


def test_what_cannot_be_is_refused() -> None:
    model = model_of("default")
    with pytest.raises(NapkinError, match="use 1 or more"):
        PromptLookup(0)
    with pytest.raises(NapkinError, match="use 0 to 16"):
        next(speculate(model, [1], 5, Sampling(), PromptLookup(), proposed=17))
    with pytest.raises(NapkinError, match="same tokenizer"):
        list(speculate(model, [1], 5, Sampling(), DraftModel(model_of("default", vocab_size=60))))
