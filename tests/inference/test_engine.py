"""Requests that run together, beside the same requests alone; pools that are far too small; blocks that are shared."""

import dataclasses
import functools
import math
import random
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.generation import continue_prompt
from napkin.inference.requests import Completion, Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer

CONFIG = ModelConfig(97, context_length=96, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
GREEDY = Sampling(temperature=0)


@functools.cache
def model_of(**changes: object) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **changes), seed=1)
    # Sharper distributions: random weights give nearly equal logits, whose order rounding would decide.
    with torch.no_grad():
        model.head_weight.mul_(20)
    return model.eval()


def requests(number: int, *, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 50 tokens, 0 to 40 more, greedy or drawn."""
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(97) for _ in range(draw.randint(1, 50))],
            draw.randint(0, 40),
            dataclasses.replace(GREEDY, temperature=draw.choice([0.0, 0.7]), top_k=draw.choice([None, 5]), seed=each),
        )
        for each in range(number)
    ]


def alone(model: Transformer, request: Request, stop: int | None = None) -> list[int]:
    """The ids by the generation of one sequence."""
    return [
        drawn.token
        for drawn in continue_prompt(model, request.prompt, request.max_new_tokens, request.sampling, stop=stop)
    ]


def finished(engine: Engine, asked: list[Request]) -> list[Completion]:
    completions = [engine.submit(request) for request in asked]
    engine.run()
    assert engine.pool.n_free == engine.pool.n_blocks
    return completions


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes", [{}, {"attention_window": 7}, {"positions": "learned"}, {"positions": "alibi"}], ids=str
)
def test_each_of_many_requests_gets_the_ids_that_it_gets_alone(changes: dict[str, object]) -> None:
    model, asked = model_of(**changes), requests(24)
    engine = Engine(model, prefill_chunk=16, max_running=8, block_size=4, stop_ids=[5])
    for completion in finished(engine, asked):
        expected = alone(model, completion.request, stop=5)
        assert completion.tokens == expected
        assert completion.finish == ("length" if len(expected) == completion.request.max_new_tokens else "stop")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [30, pytest.param(1000, marks=pytest.mark.torture)])
def test_a_pool_far_too_small_loses_no_request_and_no_block(number: int) -> None:
    model, asked = model_of(), requests(number, seed=1)
    each = 2 * 2 * 2 * 8 * 4 * 8
    engine = Engine(model, cache_bytes=12 * each, max_running=8, prefill_chunk=8, block_size=8)
    assert engine.pool.n_blocks == 12
    held = engine.cache.nbytes
    draw = random.Random(2)
    completions: list[Completion] = []
    unwanted: set[Completion] = set()
    for request in asked:
        completions.append(engine.submit(request))
        if draw.random() < 0.5:
            engine.step()
        if draw.random() < 0.2:
            unwanted.add(draw.choice(completions))
            engine.cancel(next(iter(unwanted)))
    engine.run()
    assert engine.stats().preempted > 0
    assert engine.pool.n_free == engine.pool.n_blocks
    assert engine.cache.nbytes == held
    for completion in completions:
        expected = alone(model, completion.request)
        if completion.finish == "cancelled":
            assert completion in unwanted
            assert completion.tokens == expected[: len(completion.tokens)]
        else:
            assert completion.tokens == expected


def test_a_prefix_is_computed_once_and_the_least_recently_used_makes_room() -> None:
    model = model_of()
    prefix = list(range(1, 41))
    engine = Engine(model, max_running=4, block_size=8, cache_bytes=12 * 2 * 2 * 2 * 8 * 4 * 8)
    (first,) = finished(engine, [Request(prefix, 4, GREEDY)])
    (second,) = finished(engine, [Request([*prefix, 50, 51], 4, GREEDY)])
    assert (first.cached_tokens, second.cached_tokens) == (0, 40)
    assert second.tokens == alone(model, second.request)
    # The whole prompt is known, but the logits of its last token have to be computed.
    (again,) = finished(engine, [Request(prefix, 4, GREEDY)])
    assert again.cached_tokens == 32
    assert again.tokens == first.tokens
    (other,) = finished(engine, [Request(list(range(90, 10, -1)), 8, GREEDY)])
    assert other.tokens == alone(model, other.request)
    (forgotten,) = finished(engine, [Request(prefix, 4, GREEDY)])
    assert forgotten.cached_tokens < 32
    assert forgotten.tokens == first.tokens


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 8, "block_size": 4}, {"kv": "int8"}], ids=str)
def test_equal_prompts_are_computed_once(settings: dict[str, Any]) -> None:
    """Each answer is still its own; prompts end within blocks and within chunks."""
    model = model_of()
    prompts = [[*range(first, first + length)] for first, length in ((3, 17), (3, 16), (40, 17), (60, 30))]
    asked = [
        Request(prompt, 6, Sampling(temperature=0.7, seed=10 * number + answer))
        for number, prompt in enumerate(prompts)
        for answer in range(4)
    ]
    engine = Engine(model, max_running=16, prompts_together=True, **settings)
    for completion in finished(engine, asked):
        if "kv" not in settings:
            assert completion.tokens == alone(model, completion.request)
    stats = engine.stats()
    assert stats.prompt_tokens - stats.cached_tokens == sum(map(len, prompts))
    if "kv" in settings:
        # Rounded keys and values are copied as they are.
        engines = [Engine(model, max_running=16, prompts_together=together, **settings) for together in (True, False)]
        found = [[completion.tokens for completion in finished(each, asked)] for each in engines]
        assert found[0] == found[1]


def test_log_probabilities_of_a_prompt_are_those_of_a_forward_pass() -> None:
    model = model_of()
    prompt = [3, 9, 27, 81, 49, 50, 53, 62, 89, 73]
    sampling = dataclasses.replace(GREEDY, logprobs=2)
    engine = Engine(model, prefill_chunk=4, block_size=4)
    for _ in range(2):
        (scored,) = finished(engine, [Request(prompt, 0, sampling, prompt_logprobs=True)])
        logprobs = model(torch.tensor([prompt]))[0].log_softmax(dim=-1)
        assert scored.prompt_draws[0] is None
        assert len(scored.prompt_draws) == len(prompt)
        assert scored.draws == []
        for place, told in enumerate(scored.prompt_draws[1:]):
            assert told is not None
            assert told.token == prompt[place + 1]
            assert told.logprob == pytest.approx(logprobs[place, told.token].item(), abs=1e-4)
            assert [token for token, _ in told.top] == logprobs[place].topk(2).indices.tolist()


def test_batch_invariant_completions_are_equal_bit_for_bit_whatever_else_runs() -> None:
    model = Transformer(CONFIG, seed=3, dtype=torch.bfloat16).eval()
    sampling = Sampling(temperature=1.0, logprobs=1)
    asked = [dataclasses.replace(each, sampling=dataclasses.replace(sampling, seed=9)) for each in requests(10, seed=4)]
    # Two of them begin alike.
    asked[5] = dataclasses.replace(asked[5], prompt=[*range(40)], max_new_tokens=20)
    asked[9] = dataclasses.replace(asked[9], prompt=[*range(40), 7], max_new_tokens=20)
    each = 2 * 2 * 2 * 8 * 2 * 8
    together = Engine(model, batch_invariant=True, prefill_chunk=16, block_size=8, max_running=6, cache_bytes=14 * each)
    for completion in finished(together, asked):
        single = Engine(model, batch_invariant=True, prefill_chunk=16, block_size=8)
        (expected,) = finished(single, [completion.request])
        assert completion.draws == expected.draws
    assert together.stats().preempted > 0
    assert together.stats().cached_tokens > 0


def test_an_answer_that_another_prompt_contains_is_still_computed_token_by_token() -> None:
    """A preempted sequence finds its own answer in the blocks of another prompt, which was computed in chunks."""
    # Wide enough that products and attention of one token are other kernels than those of several.
    config = ModelConfig(97, context_length=96, d_model=512, n_layers=2, n_heads=8)
    model = Transformer(config, seed=3, dtype=torch.bfloat16).eval()
    sampling = Sampling(temperature=1.0, logprobs=1, seed=9)
    each = 2 * 2 * 8 * 64 * 2 * 8

    def engine(n_blocks: int) -> Engine:
        return Engine(model, batch_invariant=True, prefill_chunk=16, block_size=8, cache_bytes=n_blocks * each)

    (expected,) = finished(engine(12), [Request([*range(40)], 40, sampling)])
    contains = Request([*range(40), *expected.tokens[:20]], 30, sampling)
    together = engine(15)
    first, second = finished(together, [contains, expected.request])
    assert together.stats().preempted > 0
    (alone_first,) = finished(engine(12), [contains])
    assert first.draws == alone_first.draws
    assert second.draws == expected.draws


@pytest.mark.thorough
@pytest.mark.parametrize("block_size", [4, 8])
def test_what_others_find_is_exactly_the_full_blocks_of_prompt_and_answer(block_size: int) -> None:
    """A block that was begun by a prompt and filled by its answer is found, too; the last token is computed."""
    model = model_of()
    for n_prompt, n_answer in ((3, 2), (5, 9), (8, 8), (11, 1), (13, 20), (16, 16)):
        engine = Engine(model, block_size=block_size, prefill_chunk=8)
        prompt = [*range(n_prompt)]
        (first,) = finished(engine, [Request(prompt, n_answer, GREEDY)])
        # The last token that was drawn was never computed.
        held = n_prompt + n_answer - 1
        whole = [*prompt, *first.tokens]
        for length in range(len(whole), 0, -1):
            (later,) = finished(engine, [Request([*whole[:length], 96], 1, GREEDY)])
            assert later.cached_tokens == min(length, held) // block_size * block_size
            assert later.tokens == alone(model, later.request)


def with_poison() -> Transformer:
    """A model whose token 7 is no number; other tokens do not lead to it."""
    model = Transformer(dataclasses.replace(CONFIG, tie_embeddings=False), seed=1).eval()
    with torch.no_grad():
        model.embedding.weight[7] = math.nan
        model.head_weight.mul_(20)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"prompts_together": True}, {"batch_invariant": True}], ids=str)
def test_a_sequence_that_cannot_be_computed_fails_alone(settings: dict[str, Any]) -> None:
    """It leaves nothing in blocks that others use after it, and no block is lost."""
    model, draw = with_poison(), random.Random(5)
    bias = ((7, -100.0),)
    honest = [
        dataclasses.replace(
            each,
            prompt=[token if token != 7 else 8 for token in each.prompt],
            sampling=dataclasses.replace(each.sampling, logit_bias=bias),
        )
        for each in requests(16, seed=6)
    ]
    poisoned = [
        Request(
            [*draw.choice(honest).prompt[:20], 7, *range(20, 20 + number)], 5, GREEDY, prompt_logprobs=number % 2 == 0
        )
        for number in range(8)
    ]
    # Drawn on the way, not given.
    drawn = Request([1, 2, 3], 10, dataclasses.replace(GREEDY, logit_bias=((7, 100.0),)))
    each = 2 * 2 * 2 * 8 * 4 * 8
    engine = Engine(model, max_running=6, prefill_chunk=16, block_size=8, cache_bytes=16 * each, **settings)
    asked = [*honest, *poisoned, drawn]
    draw.shuffle(asked)
    completions = [engine.submit(request) for request in asked]
    while engine.has_work:
        engine.step(isolate=True)
    assert engine.pool.n_free == engine.pool.n_blocks
    for completion in completions:
        if 7 in completion.request.prompt or completion.request is drawn:
            assert completion.finish == "failed"
            assert completion.failure is not None
            assert "NaN" in completion.failure
            assert completion.tokens == ([7] if completion.request is drawn else [])
        else:
            assert completion.tokens == alone(model, completion.request)
            assert completion.failure is None


def test_what_a_failed_sequence_has_written_does_not_reach_those_after_it() -> None:
    """What is hidden is multiplied by 0, which leaves NaN as it is."""
    model = with_poison()
    engine = Engine(model, max_running=2, block_size=8, cache_bytes=8 * 2 * 2 * 2 * 8 * 4 * 8)
    poisoned = engine.submit(Request([7] * 40, 5, GREEDY))
    engine.step(isolate=True)
    assert poisoned.finish == "failed"
    asked = [
        Request([*range(10, 10 + length)], 8, dataclasses.replace(GREEDY, logit_bias=((7, -100.0),)))
        for length in (3, 17)
    ]
    for completion in finished(engine, asked):
        assert completion.tokens == alone(model, completion.request)


def test_a_step_that_raises_leaves_sequences_as_they_were() -> None:
    model = with_poison()
    prompts = ([1, 2, 3, 4, 5], [7, 2, 3, 4, 5])
    engine = Engine(model, block_size=4, prompts_together=True)
    again, poisoned = [engine.submit(Request(prompt, 6, GREEDY, prompt_logprobs=True)) for prompt in prompts]
    for _ in range(3):
        with pytest.raises(NapkinError, match="NaN"):
            engine.step()
    assert engine.stats().running == 2
    while engine.has_work:
        engine.step(isolate=True)
    assert (again.finish, poisoned.finish) == ("length", "failed")
    (expected,) = finished(Engine(model, block_size=4), [again.request])
    assert again.tokens == expected.tokens
    assert [told and told.token for told in again.prompt_draws] == [None, 2, 3, 4, 5]
    # What no sequence is to blame for ends all of them, and the engine begins again.
    lost = engine.submit(Request([1, 2, 3], 6, GREEDY))
    engine.step()
    waiting = engine.submit(Request([4], 6, GREEDY))
    assert [completion for completion, _ in engine.fail_all(RuntimeError("the device is gone"))] == [lost]
    assert (lost.finish, lost.failure, waiting.finish) == ("failed", "the device is gone", None)
    engine.run()
    assert waiting.tokens == alone(model, waiting.request)
    assert engine.pool.n_free == engine.pool.n_blocks


def test_who_came_first_is_served_first() -> None:
    engine = Engine(model_of(), max_running=1)
    completions = [engine.submit(Request([1, 2, number], 3, GREEDY)) for number in range(5)]
    order: list[Completion] = []
    while engine.has_work:
        order += [completion for completion, _ in engine.step() if completion.finish]
    assert order == completions
    times = [completion.first_token_at or 0.0 for completion in completions]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        (lambda: Request([], 1), "the prompt holds no token"),
        (lambda: Request([1], -1), "max_new_tokens is -1: use 0 or more"),
        (lambda: Request([1] * 90, 7), "a prompt of 90 tokens and 7 more exceed the model's context of 96"),
        (lambda: Request([1] * 60, 30), "exceed the 64 of the KV cache: ask for fewer tokens"),
        (lambda: Request([97], 1), "token 97 is not one of the model's: use 0 to 96"),
        (lambda: Request([-1], 1), "token -1 is not one"),
        (lambda: Request([1], 1, Sampling(logit_bias=((200, 1.0),))), "token 200 is not one"),
    ],
)
def test_what_can_never_run_is_refused_in_a_line(request_of: object, says: str) -> None:
    engine = Engine(model_of(), cache_bytes=8 * 2 * 2 * 2 * 8 * 4 * 8, block_size=8)
    with pytest.raises(NapkinError, match=says):
        engine.submit(request_of())  # pyright: ignore[reportCallIssue]
    assert not engine.has_work


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(NapkinError, match=r"cache_bytes.*100.*16 tokens"):
        Engine(model_of(), cache_bytes=100)


def test_blocks_that_are_read_where_they_are_give_the_ids_of_one_sequence_alone() -> None:
    config = ModelConfig(300, context_length=96, d_model=256, n_layers=2, n_heads=4)
    model = Transformer(config, seed=2, dtype=torch.bfloat16).eval()
    asked = [dataclasses.replace(each, max_new_tokens=12, sampling=GREEDY) for each in requests(6, seed=3)]
    engine = Engine(model, batch_invariant=True, block_size=8)
    for completion in finished(engine, asked):
        assert completion.tokens == alone(model, completion.request)
