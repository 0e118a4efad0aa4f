"""Plans of services with a draft: bytes beside those that the engine allocates, seconds beside closed forms."""

import dataclasses
import random
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.speculation import improvement
from napkin.model.config import ModelConfig, preset
from napkin.model.transformer import Transformer
from napkin.planning.services.replica import count_parameters
from napkin.planning.services.service_planner import plan_service
from napkin.planning.services.this_machine import StepSeconds, speculating_steps

MODEL = ModelConfig(300, context_length=128, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2)
DRAFT = dataclasses.replace(MODEL, d_model=16, n_layers=2, n_heads=2, n_kv_heads=None)
LOAD: dict[str, Any] = {"concurrency": 3, "input_tokens": 40, "output_tokens": 24}


def bytes_of(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("given", [True, False])
def test_bytes_are_those_that_the_engine_allocates(given: bool) -> None:
    dtype = torch.float32 if given else torch.bfloat16
    model, draft = Transformer(MODEL, dtype=dtype).eval(), Transformer(DRAFT, dtype=dtype).eval()
    planned = plan_service(
        *((model,) if given else (MODEL,)),
        draft=draft if given else DRAFT,
        acceptance=0.5,
        proposed=2,
        requests_per_client=1,
        **LOAD,
    )
    (here,) = planned.degrees
    assert planned.draft is not None
    engine = Engine(model, draft=draft, cache_bytes=int(here.kv_pool_bytes), max_running=3)
    allocated = [bytes_of(cache.tensors) for cache in engine.caches]
    # One block more than the pool has takes what padding writes.
    tokens = (engine.pool.n_blocks + 1) * 16
    assert sum(allocated) * engine.pool.n_blocks / (engine.pool.n_blocks + 1) == here.kv_pool_bytes
    size = LOAD["input_tokens"] + LOAD["output_tokens"]
    assert here.kv_bytes_per_sequence == sum(allocated) * size / tokens
    assert planned.draft.kv_bytes_per_sequence == allocated[1] * size / tokens
    assert here.sequences == engine.pool.n_blocks // -(-size // 16) == 3
    assert planned.draft.weight_bytes == bytes_of(draft.parameters())
    assert planned.weight_bytes == bytes_of(model.parameters())
    assert here.weight_bytes == planned.weight_bytes + planned.draft.weight_bytes
    assert planned.draft.tokens_per_pass == 1.75
    assert planned.draft.improvement > 0


def test_tokens_per_pass_are_those_of_many_drawn_passes() -> None:
    planned = plan_service(MODEL, "H100", draft=DRAFT, acceptance=0.7, proposed=3, **LOAD).draft
    assert planned is not None
    draw, tokens, n = random.Random(0), 0, 20_000
    for _ in range(n):
        accepted = 0
        while accepted < 3 and draw.random() < 0.7:
            accepted += 1
        tokens += accepted + 1
    assert planned.tokens_per_pass == pytest.approx(tokens / n, rel=0.02)


def test_on_devices_a_draft_takes_its_memory_and_a_token_its_share_of_a_pass() -> None:
    model, draft = preset("llama-3-8b"), preset("llama-3.2-1b")
    how: dict[str, Any] = {"concurrency": 8, "input_tokens": 512, "output_tokens": 128}
    plain = plan_service(model, "8xH100", tensor=2, **how).degrees[0]
    planned = plan_service(model, "8xH100", tensor=2, draft=draft, acceptance=0.8, proposed=5, **how)
    with_draft, found = planned.degrees[0], planned.draft
    assert found is not None
    assert found.parameters == count_parameters(draft)
    assert found.weight_bytes == 2 * found.parameters
    assert with_draft.weight_bytes == plain.weight_bytes + found.parameters
    assert found.kv_bytes_per_sequence == 640 * 2 * draft.cached_numbers
    assert with_draft.kv_bytes_per_sequence == 640 * (model.cached_numbers + draft.cached_numbers)
    assert with_draft.kv_pool_bytes == plain.kv_pool_bytes - found.parameters
    assert with_draft.sequences < plain.sequences
    cost, pass_cost = (found.draft_seconds / 5 / found.plain_seconds, found.pass_seconds / found.plain_seconds)
    assert found.improvement == pytest.approx(improvement(0.8, 5, cost, pass_cost))
    assert found.pass_seconds > found.plain_seconds
    assert with_draft.times is not None
    share = (found.draft_seconds + found.pass_seconds) / found.tokens_per_pass
    assert with_draft.times.decode_step == pytest.approx(share)
    # Proposals that are never accepted cost what they take; the more are accepted the shorter is a token.
    seconds = []
    for acceptance in (0.0, 0.5, 0.9):
        times = (
            plan_service(model, "8xH100", tensor=2, draft=draft, acceptance=acceptance, proposed=5, **how)
            .degrees[0]
            .times
        )
        assert times is not None
        seconds.append(times.time_per_output_token)
    assert plain.times is not None
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > plain.times.time_per_output_token


def test_steps_of_the_engine_with_a_draft_are_shares_of_its_passes() -> None:
    tested = StepSeconds({(1, 10): 3.0, (1, 20): 4.0}, {(8, 0): 2.0})
    drafted = StepSeconds({(1, 10): 0.5, (1, 20): 1.0}, {(8, 0): 0.25})
    found = speculating_steps(tested, drafted, 3, 2.5)
    assert found.decode == {(1, 10): pytest.approx((3 + 4 * 0.5) / 2.5), (1, 20): pytest.approx((4 + 4 * 1.0) / 2.5)}
    assert found.prefill == {(8, 0): 2.25}


@pytest.mark.parametrize(
    ("changes", "settings", "complaint"),
    [
        ({}, {"acceptance": None}, "its acceptance"),
        ({}, {"acceptance": 1.5}, "acceptance is 1.5"),
        ({}, {"acceptance": float("nan")}, "acceptance is nan"),
        ({}, {"proposed": 0}, "proposed is 0: use 1 to 16"),
        ({"vocab_size": 301}, {}, "the draft has 301 tokens, the model 300"),
        ({"context_length": 64}, {}, "a context of 64 tokens, the model 128"),
        ({"mixers": "mamba2", "state_head_dim": 16}, {}, "mixers of the draft is 'mamba2'"),
    ],
)
def test_drafts_that_cannot_be_planned_are_refused(
    changes: dict[str, Any], settings: dict[str, Any], complaint: str
) -> None:
    draft = dataclasses.replace(DRAFT, **changes)
    with pytest.raises(NapkinError, match=complaint):
        plan_service(MODEL, "H100", draft=draft, **{"acceptance": 0.5, **settings}, **LOAD)


def test_an_acceptance_without_a_draft_is_refused() -> None:
    with pytest.raises(NapkinError, match="there is no draft"):
        plan_service(MODEL, "H100", acceptance=0.5, **LOAD)
