import dataclasses
import math
import statistics

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.hardware.cluster import LINK_HOP_SECONDS
from napkin.hardware.device_file import find_device
from napkin.hardware.service_efficiency import (
    FITTED,
    Schedule,
    ServiceEfficiency,
    generation_spread,
    service_efficiencies,
)
from napkin.model.config import preset
from napkin.planning.services.device_service import interval_of
from napkin.planning.services.replica import Replica, ServiceTimes, count_work, timeline_of, times_of
from napkin.planning.services.server_schedule import Load
from napkin.planning.services.service_plan import ServiceDegree
from napkin.planning.services.service_planner import plan_service
from oracles.serving_simulation import Server, simulate

H100 = find_device("H100")
IDEAL = ServiceEfficiency(
    weight_share=1.0,
    kv_share=1.0,
    product_share=1.0,
    attention_share=1.0,
    activation_share=0.0,
    layer_seconds=0.0,
    step_seconds=0.0,
    sequence_seconds=0.0,
    request_seconds=0.0,
    collective_seconds=0.0,
    direct_share=1.0,
    ring_share=1.0,
    schedule=Schedule(
        prompts_first=False, cuts_prompts=False, max_batched_tokens=8192, max_running=2048, reserved_output=1.0
    ),
    memory_share=1.0,
    memory_share_is_of_rest=True,
    tpot_factor=1.0,
    ttft_factor=1.0,
)


def llama(server: ServiceEfficiency = IDEAL, tensor: int = 1) -> Replica:
    return Replica(count_work(preset("llama-3-8b")), H100, server, tensor)


def test_on_an_ideal_device_a_decode_step_takes_its_bytes_and_a_long_prompt_its_flops() -> None:
    replica = llama()
    work = replica.work
    bytes_read = 2 * (work.block_weights + work.head_weights) + 8 * 1000 * 2 * 2 * 32 * 8 * 128
    assert replica.step_bytes(8, 1000) == bytes_read
    assert replica.step_seconds(8, 1000) == pytest.approx(bytes_read / H100.memory_bandwidth, rel=1e-3)
    flops = 2 * work.block_weights * 8192 + 4 * 32 * 4096 * 8192 * 8193 / 2
    head = 2 * work.head_weights / H100.memory_bandwidth
    assert replica.step_seconds(0, 0, 8192, work.pairs(8192)) == pytest.approx(
        flops / H100.peak("bf16") + head, rel=1e-3
    )


def test_ranks_of_tensor_divide_bytes_and_flops_and_add_all_reduces() -> None:
    alone, divided = llama(), llama(tensor=8)
    assert divided.step_bytes(64, 2000) == pytest.approx(alone.step_bytes(64, 2000) / 8)
    free = dataclasses.replace(IDEAL, direct_share=2.0, ring_share=0.1)
    slow = dataclasses.replace(free, collective_seconds=LINK_HOP_SECONDS)
    added = llama(slow, 8).step_seconds(1, 100) - llama(free, 8).step_seconds(1, 100)
    assert added == pytest.approx(2 * 32 * LINK_HOP_SECONDS)
    # One token's residual stream to each of seven others, over a link that is as fast as in training, twice.
    sent = 7 * 2 * 4096 / (2.0 * 0.8761 * 450e9)
    assert llama(free, 8).step_seconds(1, 100) == pytest.approx(alone.step_seconds(1, 100) / 8 + 64 * sent, rel=1e-3)


def service_times(replica: Replica, load: Load) -> ServiceTimes:
    return times_of(replica, load, timeline_of(replica, load))


def test_as_many_sequences_fit_as_their_keys_and_values_have_room_beside_the_weights() -> None:
    replica = llama()
    room = H100.memory_bytes - 600e6 - 2 * 8_030_261_248 - 2e9
    assert replica.sequences(4096) == int(room // (2 * 2 * 32 * 8 * 128 * 4096))
    halved = dataclasses.replace(replica, kv="fp8")
    assert halved.sequences(4096) in (2 * replica.sequences(4096), 2 * replica.sequences(4096) + 1)
    large = Replica(count_work(preset("llama-3-70b")), H100, IDEAL)
    assert large.sequences(1) == 0
    with pytest.raises(NapkinError, match="more ranks of tensor"):
        service_times(large, Load(1, 10, 10))


@pytest.mark.parametrize("server", ["vllm", "trtllm", "sglang"])
def test_a_service_has_the_mean_times_of_a_simulation_that_looks_at_every_step(server: str) -> None:
    replica, load = llama(service_efficiencies()[server]), Load(7, 1024, 64, 4, shortest=0.8)
    timeline = timeline_of(replica, load)
    lengths = list(zip(timeline.inputs.tolist(), timeline.outputs.tolist(), strict=True))
    requests = simulate(Server(replica.server.schedule, replica.step_seconds, 10**9), lengths, clients=7)
    times = service_times(replica, load)
    first = statistics.mean((each.first_token or 0.0) - each.sent for each in requests)
    assert times.time_to_first_token - replica.server.request_seconds == pytest.approx(first)
    token = statistics.mean((each.end - (each.first_token or 0.0)) / (each.outputs - 1) for each in requests)
    assert times.time_per_output_token == pytest.approx(token)


def test_one_request_at_a_time_takes_its_prompt_and_then_its_tokens() -> None:
    replica = llama(dataclasses.replace(IDEAL, request_seconds=0.25))
    times = service_times(replica, Load(1, 1000, 101))
    assert times.time_to_first_token == pytest.approx(0.25 + replica.step_seconds(0, 0, 1000, 1000 * 1001 / 2))
    # The cache has 1,001 to 1,100 tokens meanwhile.
    assert times.time_per_output_token == pytest.approx(replica.step_seconds(1, 1050.5))
    assert times.running == pytest.approx(1)


def test_steps_are_priced_one_by_one_or_together() -> None:
    for work in (count_work(preset("llama-3-8b")), count_work(preset("qwen3-30b-a3b"))):
        replica = Replica(dataclasses.replace(work, window=512, windowed_share=0.5), H100, IDEAL, 2)
        steps = np.array([[1, 100, 0, 0], [64, 2000, 0, 0], [0, 0, 512, 512 * 513 / 2], [9, 700, 30, 465]], float)
        together = replica.step_seconds(*steps.T)
        assert together == pytest.approx([replica.step_seconds(*step) for step in steps])


def test_a_cache_for_half_of_the_clients_makes_the_others_wait() -> None:
    replica = dataclasses.replace(llama(service_efficiencies()["trtllm"]), kv="fp8")
    slots = replica.sequences(7400)
    times = service_times(replica, Load(slots * 2, 7000, 400, 4))
    assert times.running <= slots
    assert times.waiting > 0.7 * times.time_to_first_token


def test_intervals_are_wider_where_nothing_was_measured() -> None:
    vllm = service_efficiencies()["vllm"]
    load = Load(64, 1024, 256)
    known = dataclasses.replace(llama(vllm), weights="fp8", device=find_device("H200"))
    measured = interval_of(known, load, timeline_of(known, load))
    assert (measured.tpot, measured.ttft, measured.measured) == (vllm.tpot_factor, vllm.ttft_factor, True)
    experts = dataclasses.replace(known, work=count_work(preset("qwen3-30b-a3b")))
    for other in (llama(vllm), dataclasses.replace(known, device=find_device("H100")), experts):
        unknown = interval_of(other, load, timeline_of(other, load))
        assert not unknown.measured
        assert unknown.tpot > measured.tpot
        assert unknown.ttft > measured.ttft


def test_an_interval_of_one_uncertain_constant_is_that_constants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # All seconds are in the weights' bytes: by as much as their bandwidth is off, the time is.
    spread = dict.fromkeys(FITTED, 0.0) | {"weight_share": 0.2}
    monkeypatch.setattr("napkin.planning.services.device_service.generation_spread", lambda: spread)
    load = Load(1, 1, 2)
    found = interval_of(llama(), load, timeline_of(llama(), load))
    assert found.tpot == pytest.approx(math.exp(1.645 * 0.2), rel=0.01)


def test_every_constant_has_a_spread_between_generations() -> None:
    assert set(generation_spread()) == set(FITTED)
    assert all(0 <= spread < 1 for spread in generation_spread().values())


def test_a_generation_that_was_measured_has_constants_of_its_own() -> None:
    vllm = service_efficiencies()["vllm"]
    hopper, blackwell, ampere = (vllm.on(find_device(name)) for name in ("H100", "GB200", "A100"))
    assert set(vllm.generations) == {"9.0", "10.0"}
    assert hopper.weight_share == vllm.generations["9.0"]["weight_share"] != blackwell.weight_share
    assert ampere == vllm
    assert all(set(values) == set(FITTED) for values in vllm.generations.values())


def test_a_request_of_one_token_has_no_time_per_output_token() -> None:
    plan = plan_service(preset("llama-3-8b"), "H100", concurrency=3, input_tokens=9, output_tokens=1)
    assert plan.best is not None
    assert plan.best.times is not None
    assert plan.best.times.time_per_output_token == 0
    assert plan.best.tokens_per_second == pytest.approx(3 / plan.best.times.time_to_first_token)


def test_an_open_load_on_devices_is_served_at_its_rate_until_they_are_too_few() -> None:
    def planned(rate: float) -> ServiceDegree:
        found = plan_service(
            preset("llama-3-8b"), "2xH100", concurrency=None, rate=rate, input_tokens=500, output_tokens=50, tensor=1,
            requests=600,
        ).best  # fmt: skip
        assert found is not None
        return found

    slow, fast = planned(2.0), planned(500.0)
    assert slow.tokens_per_second == pytest.approx(2 * 50, rel=0.2)
    assert fast.tokens_per_second is not None
    assert fast.tokens_per_second < 500 * 50
    assert slow.times is not None
    assert fast.times is not None
    assert fast.times.time_to_first_token > 5 * slow.times.time_to_first_token
