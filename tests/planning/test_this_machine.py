"""The simulated schedule beside the real engine's, pass by pass; its times beside closed forms."""

from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine, EngineSequence
from napkin.inference.scheduler import Pass
from napkin.inference.service_load import ServiceLoad, measure_load
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.services.this_machine import StepSeconds, plan_engine_service, simulate_engine

CONFIG = ModelConfig(97, context_length=128, d_model=32, n_layers=2, n_heads=4)


class Recorded(StepSeconds):
    """Every decode pass takes a second, every token of a prompt a hundredth; passes are written down."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.__dict__["passes"] = []

    def decode_seconds(self, rows: int, context: float) -> float:
        self.__dict__["passes"].append(("decode", rows))
        return 1.0

    def prefill_seconds(self, tokens: int, before: float) -> float:
        self.__dict__["passes"].append(("prefill", tokens))
        return tokens / 100


class Watched(Engine):
    """Writes down the passes of an engine."""

    passes: list[tuple[str, int]]

    def _pass(self, work: Pass[EngineSequence]) -> Any:
        decodes = all(each.decodes for each in work.sequences)
        self.passes.append(("decode", len(work.sequences)) if decodes else ("prefill", work.n_new))
        return super()._pass(work)


@pytest.mark.parametrize(
    "load",
    [
        ServiceLoad(7, 40, 5, concurrency=3),
        ServiceLoad(5, 16, 9, concurrency=8),
        ServiceLoad(6, 1, 3, concurrency=2),
    ],
    ids=str,
)
def test_the_simulation_makes_the_passes_of_the_real_engine(load: ServiceLoad) -> None:
    engine = Watched(Transformer(CONFIG), max_running=4, prefill_chunk=32)
    engine.passes = []
    measured = measure_load(engine, load)
    steps = Recorded()
    simulated = simulate_engine(load, steps, 4, 32)
    assert steps.__dict__["passes"] == engine.passes
    assert len(measured.served) == len(simulated.served) == load.requests
    assert all(each.output_tokens == load.output_tokens for each in measured.served)


def test_where_the_cache_is_too_small_the_simulation_preempts_as_the_engine_does() -> None:
    load = ServiceLoad(9, 30, 20, concurrency=6)
    engine = Watched(Transformer(CONFIG), max_running=6, prefill_chunk=32, block_size=8, cache_bytes=20 * 8 * 512)
    engine.passes = []
    measure_load(engine, load)
    assert engine.stats().preempted > 0
    steps = Recorded()
    simulate_engine(load, steps, 6, 32, n_blocks=engine.pool.n_blocks, block_size=8)
    assert steps.__dict__["passes"] == engine.passes


def test_one_request_at_a_time_takes_its_prompt_and_then_its_tokens() -> None:
    steps = StepSeconds({(1, 0): 2.0, (1, 100): 4.0}, {(8, 0): 1.0, (16, 0): 2.0})
    found = simulate_engine(ServiceLoad(3, 16, 11, concurrency=1), steps, 4, 32)
    for served in found.served:
        assert served.time_to_first_token == pytest.approx(2.0)
        # The cache holds 16 to 25 tokens while ten more are decoded.
        assert served.time_per_output_token == pytest.approx(2.0 + 0.02 * (16 + 25) / 2)
    assert found.seconds == pytest.approx(3 * (2.0 + 10 * (2.0 + 0.02 * 20.5)))
    assert found.tokens_per_second == pytest.approx(33 / found.seconds)


def test_an_open_load_comes_at_its_rate_whatever_the_service_takes() -> None:
    load = ServiceLoad(4000, 1, 1, concurrency=None, rate=5.0, seed=3)
    arrivals = load.arrivals()
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 5.0, rel=0.05)
    quick = simulate_engine(load, StepSeconds({(1, 0): 1e-9}, {(1, 0): 1e-9}), 4, 32)
    assert quick.seconds == pytest.approx(arrivals[-1])
    # Four times as long as requests are apart: most of them wait.
    slow = simulate_engine(load, StepSeconds({(1, 0): 0.8}, {(1, 0): 0.8}), 1, 1)
    assert slow.seconds == pytest.approx(4000 * 0.8, rel=0.01)
    assert slow.first_token(90) > slow.first_token(50) > 100


def test_a_plan_of_this_machine_has_the_bytes_of_the_engine() -> None:
    model = Transformer(CONFIG, dtype=torch.bfloat16)
    engine = Engine(model, cache_bytes=2**20, max_running=4)
    load = ServiceLoad(4, 24, 4, concurrency=4)
    for given in (model, None):
        plan = plan_engine_service(CONFIG, load, cache_bytes=2**20, max_running=4, model=given)
        assert plan.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert plan.running == 4
        assert plan.cache_bytes == pytest.approx(engine.cache.nbytes, rel=0.01)
        assert plan.expected.per_token(50) > 0
        assert len(plan.expected.served) == 4
    small = plan_engine_service(CONFIG, load, cache_bytes=2 * plan.kv_bytes_per_sequence + 10_000, model=model)
    assert small.running == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"requests": 0}, "requests is 0: use 1 or more"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate": 1.0}, "give one of them"),
        ({"concurrency": None}, "give one of them"),
        ({"concurrency": None, "rate": float("nan")}, "rate is nan"),
    ],
)
def test_an_impossible_load_is_refused(changes: dict, says: str) -> None:
    with pytest.raises(NapkinError, match=says):
        ServiceLoad(**{"requests": 1, "input_tokens": 1, "output_tokens": 1, **changes})
