"""The simulated schedule beside the real engine's, pass by pass; its times beside closed forms."""

import statistics
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.requests import EngineSequence
from napkin.inference.scheduler import Pass
from napkin.inference.service_load import ServiceLoad, measure_load
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning import plan_service
from napkin.planning.services.this_machine import StepSeconds, simulate_engine

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


@pytest.mark.thorough
def test_a_plan_of_this_machine_has_the_bytes_of_the_engine() -> None:
    model = Transformer(CONFIG, dtype=torch.bfloat16)
    engine = Engine(model, cache_bytes=2**20, max_running=4)
    load: dict[str, Any] = {"concurrency": 4, "input_tokens": 24, "output_tokens": 4, "requests_per_client": 1}
    bytes_of_sequence = 0
    for given in (model, CONFIG):
        plan = plan_service(given, cache_bytes=2**20, max_running=4, **load)
        (here,) = plan.degrees
        bytes_of_sequence = round(here.kv_bytes_per_sequence)
        assert plan.weight_bytes == here.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert here.kv_pool_bytes == pytest.approx(engine.cache.nbytes, rel=0.01)
        assert here.times is not None
        assert here.simulation is not None
        assert here.times.running == 4
        assert here.simulation.per_token(50) > 0
        assert len(here.simulation.served) == 4
        assert plan.best is here
        assert "4 concurrent requests of 24 + 4 tokens" in repr(plan)
    (small,) = plan_service(model, cache_bytes=2 * bytes_of_sequence + 10_000, max_running=4, **load).degrees
    assert small.times is not None
    assert small.times.running == 2
    with pytest.raises(NapkinError, match=r"a sequence of 28 tokens takes 8.19 kB, cache_bytes is 5"):
        plan_service(model, cache_bytes=5000, **load)


def test_times_of_a_plan_are_those_of_its_simulation() -> None:
    """Means, the wait for a place and the time in prompts, beside Little's law for a closed load."""
    steps = StepSeconds({(1, 0): 2.0, (4, 0): 2.0}, {(1, 0): 1.0})
    found = simulate_engine(ServiceLoad(80, 16, 11, concurrency=8), steps, 4, 32)
    assert found.busy == pytest.approx(80 * 1.0 / found.seconds)
    first = statistics.mean(each.time_to_first_token for each in found.served)
    token = statistics.mean(each.time_per_output_token for each in found.served)
    # Eight are in flight and four at a time are computed: half of a request's time is the wait.
    assert found.waiting == pytest.approx((first + 10 * token) / 2, rel=0.1)
    assert simulate_engine(ServiceLoad(8, 16, 11, concurrency=4), steps, 4, 32).waiting < 1e-9


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"server": "vllm"}, "server is vllm, which napkin's own engine does not have"),
        ({"weights": "fp8"}, "weights is fp8, which napkin's own engine does not have: use bf16"),
        ({"kv": "fp8"}, "kv is fp8, which napkin's own engine does not have: use bf16 or int8"),
        ({"tensor": 2}, "tensor is 2, which napkin's own engine does not have: use 1"),
        ({"input_tokens": 120}, r"120 \+ 9 tokens are more than the model's context of 128"),
        ({"rate": 1.0}, "give one of them"),
        ({"concurrency": None, "on": "H100"}, "give one of them"),
        ({"rate": 2.0, "on": "H100"}, "give one of them"),
        ({"cache_bytes": 2, "on": "H100"}, "cache_bytes is 2, which is planned on this machine alone"),
        ({"shortest": 0.5}, "shortest is 0.5, which napkin's own engine does not have"),
    ],
)
def test_what_this_machine_or_devices_cannot_be_planned_for_is_refused(changes: dict, says: str) -> None:
    settings: dict[str, Any] = {"concurrency": 2, "input_tokens": 8, "output_tokens": 9, **changes}
    with pytest.raises(NapkinError, match=says):
        plan_service(CONFIG, **settings)


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
