"""Proposals for many sequences at a time: texts beside those without, and beside those of one sequence alone; sampled
texts beside exact probabilities; blocks of rejected tokens."""

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import bytes_per_token
from napkin.inference.requests import Completion, Request
from napkin.inference.sampling import distributions
from napkin.inference.settings import Sampling
from napkin.inference.speculation import DraftModel, PromptLookup, SpeculationMeter, speculate
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer

CONFIG = ModelConfig(31, context_length=64, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, tie_embeddings=False)
GREEDY = Sampling(temperature=0)


@functools.cache
def model_of(**changes: Any) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **changes), seed=1)
    # Sharper distributions: random weights give nearly equal logits, whose order rounding would decide.
    with torch.no_grad():
        model.head_weight.mul_(20)
    return model.eval()


def near(model: Transformer, noise: float = 0.1) -> Transformer:
    """A model that often, not always, takes the same token."""
    draft = Transformer(model.config).eval()
    draft.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
    return draft


def requests(n: int, **sampling: Any) -> list[Request]:
    """Prompts of 1 to 30 tokens that repeat themselves, up to 25 more."""
    found, draw = [], random.Random(3)
    for seed in range(n):
        part = [draw.randrange(31) for _ in range(draw.randint(1, 10))]
        found.append(Request(part * 3, draw.randint(1, 25), Sampling(**{"seed": seed, "temperature": 0.0, **sampling})))
    return found


def run(model: Transformer, asked: list[Request], **how: Any) -> tuple[Engine, list[Completion]]:
    """Complete requests that come two at a time; blocks are given back after each step and at the end."""
    engine = Engine(model, **{"block_size": 4, "max_running": 5, "prefill_chunk": 16, **how})
    completions: list[Completion] = []
    pool = engine.pool
    for request in asked:
        completions.append(engine.submit(request))
        if len(completions) % 2 == 0:
            engine.step()
            for each in engine.scheduler.running:
                assert len(each.table) == -(-each.n_computed // pool.block_size)
    engine.run()
    assert pool.n_free == pool.n_blocks
    return engine, completions


def texts(completions: list[Completion]) -> list[tuple[list[int], str | None]]:
    return [(each.tokens, each.finish) for each in completions]


BLOCK = 4 * 2 * 2 * 8 * 4
"""Bytes of a block of 4 tokens of CONFIG: keys and values, in two layers, of 8 numbers in fp32."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ({"attention_window": 3}, {"positions": "alibi"})),
    ],
    ids=str,
)
def test_greedy_texts_of_a_batch_are_those_without_proposals(changes: dict[str, Any]) -> None:
    model, asked = model_of(**changes), requests(10)
    without, plain = run(model, asked, stop_ids=[5])
    draft, small = near(model), 24 * BLOCK
    for how in (
        {"lookup": 3, "proposed": 6},
        {"lookup": 3, "cache_bytes": small},
        {"draft": draft, "cache_bytes": 2 * small, "proposed": 4},
    ):
        engine, completions = run(model, asked, stop_ids=[5], **how)
        assert texts(completions) == texts(plain)
        stats = engine.stats()
        assert stats.accepted_tokens <= stats.tested_tokens <= stats.proposed_tokens
        # How many are proposed otherwise depends on the seconds of passes.
        assert 0 < stats.accepted_tokens < stats.tested_tokens or "proposed" not in how
        assert (engine.scheduler.preempted > 0) == ("cache_bytes" in how)
        for count in ("proposed", "tested", "accepted"):
            assert getattr(stats, f"{count}_tokens") == sum(getattr(each.speculation, count) for each in completions)
        assert "cache_bytes" in how or stats.steps < without.stats().steps


@pytest.mark.parametrize("kind", ["draft", pytest.param("lookup", marks=pytest.mark.thorough)])
def test_drawn_texts_and_acceptance_of_each_request_are_those_of_its_sequence_alone(kind: str) -> None:
    model = model_of()
    draft, asked = near(model), requests(5, temperature=0.9, top_p=0.95, repetition_penalty=1.1, logprobs=2)
    asked += requests(2)
    how: dict[str, Any] = {"draft": draft} if kind == "draft" else {"lookup": 3}
    _, completions = run(model, asked, proposed=3, **how)
    for completion in completions:
        request, meter = completion.request, SpeculationMeter()
        proposer = DraftModel(draft) if kind == "draft" else PromptLookup(3)
        alone = [
            *speculate(
                model, request.prompt, request.max_new_tokens, request.sampling, proposer, proposed=3, meter=meter
            )
        ]
        assert completion.tokens == [each.token for each in alone]
        told = completion.speculation
        assert (told.proposed, told.tested, told.accepted) == (meter.proposed, meter.tested, meter.accepted)
        for one, other in zip(completion.draws, alone, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.logprob == (other.logprob and pytest.approx(other.logprob, abs=1e-4))
    # Neither how many are proposed nor what else runs changes a text.
    for proposed, n_running in ((0, 5), (None, 2)):
        _, others = run(model, asked, proposed=proposed, max_running=n_running, **how)
        assert texts(others) == texts(completions)


def test_drawn_texts_with_a_draft_have_exactly_the_probabilities_of_the_model() -> None:
    sampling, n, length = Sampling(1.1, top_k=3, top_p=1.0, repetition_penalty=1.2), 1500, 3
    model = Transformer(dataclasses.replace(CONFIG, vocab_size=4), seed=2).eval()
    with torch.no_grad():
        model.head_weight.mul_(20)
    prompt = [1, 2]
    expected: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(4), repeat=length):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]]))[0, 1:-1]
        histories = [[*prompt, *text[:place]] for place in range(length)]
        rows = distributions(logits, [sampling] * length, histories)
        expected[text] = math.prod(float(row[token]) for row, token in zip(rows, text, strict=True))
    assert sum(expected.values()) == pytest.approx(1)
    engine = Engine(model, draft=near(model, 0.5), proposed=2, max_running=250, prompts_together=True)
    asked = [
        Request(prompt, length, dataclasses.replace(sampling, seed=seed), sampled_logprobs=True) for seed in range(n)
    ]
    completions = [engine.submit(request) for request in asked]
    engine.run()
    assert 0.2 < engine.stats().accepted_tokens / engine.stats().tested_tokens < 0.95
    counts = Counter(tuple(each.tokens) for each in completions)
    assert set(counts) <= {text for text, p in expected.items() if p > 0}
    likely = {text: n * p for text, p in expected.items() if n * p > 5}
    statistic = sum((counts[text] - mean) ** 2 / mean for text, mean in likely.items())
    assert len(likely) > 8
    assert (statistic - len(likely)) / math.sqrt(2 * len(likely)) < 4
    for each in completions[:20]:
        told = sum(draw.sampled_logprob or 0.0 for draw in each.draws)
        assert math.exp(told) == pytest.approx(expected[tuple(each.tokens)], rel=1e-4)


def test_a_shared_prefix_is_shared_in_both_models_and_the_cache_counts_both() -> None:
    model = model_of()
    draft, sampling = near(model), Sampling(0.9, seed=4)
    engine = Engine(model, draft=draft, proposed=3, block_size=4, cache_bytes=2 * 30 * BLOCK)
    assert engine.pool.n_blocks == 30
    both = sum(bytes_per_token(each.config, torch.float32) for each in (model, draft))
    # A block more takes what padding writes.
    assert engine.stats().cache_bytes == 31 * 4 * both
    request = Request(list(range(20)), 12, sampling)
    first = engine.submit(request)
    engine.run()
    second = engine.submit(request)
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)
    assert first.tokens == second.tokens


def test_numbers_that_are_not_finite_in_a_draft_fail_its_request_and_leave_the_others() -> None:
    model = model_of()
    draft = near(model)
    with torch.no_grad():
        draft.embedding.weight[7] = torch.nan
    engine = Engine(model, draft=draft, proposed=2, block_size=4)
    asked = [Request([1, 2, 3], 6, GREEDY), Request([7, 2, 3], 6, GREEDY), Request([1, 2, 4], 6, GREEDY)]
    completions = [engine.submit(request) for request in asked]
    while engine.has_work:
        engine.step(isolate=True)
    _, plain = run(model, asked)
    assert completions[1].finish == "failed"
    assert "NaN" in (completions[1].failure or "")
    for each, other in zip(completions, plain, strict=True):
        if each.finish != "failed":
            assert each.tokens == other.tokens
    assert engine.pool.n_free == engine.pool.n_blocks


MAMBA = ModelConfig(31, context_length=64, d_model=16, n_layers=1, mixers="mamba2", state_head_dim=8, positions="none")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"lookup": 2, "batch_invariant": True}, "use one of them"),
        ({"lookup": 2, "proposed": 17}, "use 0 to 16"),
        ({"proposed": 2}, "nothing proposes"),
        ({"draft": {"vocab_size": 30}}, "same tokenizer"),
        ({"draft": {"context_length": 63}}, "at least as many"),
        ({"draft": MAMBA}, "takes no token back"),
    ],
)
def test_what_cannot_propose_is_refused(how: dict[str, Any], says: str) -> None:
    draft = how.get("draft")
    if draft is not None:
        how = {"draft": Transformer(draft) if isinstance(draft, ModelConfig) else model_of(**draft)}
    with pytest.raises(NapkinError, match=says):
        Engine(model_of(), **how)
