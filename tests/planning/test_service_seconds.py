import dataclasses
import math

import pytest

from napkin.errors import NapkinError
from napkin.hardware.cluster import LINK_HOP_SECONDS
from napkin.hardware.device_file import find_device
from napkin.hardware.service_efficiency import FITTED, ServiceEfficiency, generation_spread, service_efficiencies
from napkin.model.config import preset
from napkin.planning.services.replica import Load, Replica, count_work, service_times
from napkin.planning.services.service_plan import interval_of
from oracles.serving_simulation import simulate

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
    burst=1.0,
    max_batched_tokens=8192,
    memory_share=1.0,
    memory_share_is_of_rest=True,
    reserves_output=True,
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


@pytest.mark.parametrize("server", ["vllm", "trtllm"])
@pytest.mark.parametrize(("clients", "inputs", "outputs"), [(2, 1024, 128), (16, 1024, 128), (16, 4096, 256)])
def test_times_in_closed_form_are_those_of_a_simulation_of_each_step(
    server: str, clients: int, inputs: int, outputs: int
) -> None:
    replica = llama(dataclasses.replace(service_efficiencies()[server], burst=1.0))
    rounds = 6
    ttft, tpot = simulate(
        replica.step_seconds,
        clients=clients,
        rounds=rounds,
        inputs=(int(0.8 * inputs), inputs),
        outputs=(int(0.8 * outputs), outputs),
        max_batched_tokens=8192,
    )
    times = service_times(replica, Load(clients, 0.9 * inputs, 0.9 * outputs, rounds))
    assert times.time_per_output_token == pytest.approx(tpot, rel=0.03)
    # What is around a request is not simulated.
    around = replica.server.request_seconds
    assert times.time_to_first_token - around == pytest.approx(ttft, rel=0.25)


def test_where_the_cache_holds_fewer_than_are_in_flight_requests_wait_as_long_as_in_a_simulation() -> None:
    replica = dataclasses.replace(llama(service_efficiencies()["trtllm"]), kv="fp8")
    tokens = (7000, 400)
    slots = replica.sequences(sum(tokens))
    clients = slots * 2
    ttft, tpot = simulate(
        replica.step_seconds,
        clients=clients,
        rounds=4,
        inputs=(7000, 7000),
        outputs=(400, 400),
        max_batched_tokens=8192,
        slots=slots,
    )
    times = service_times(replica, Load(clients, *tokens, 4))
    assert times.running == slots
    assert times.waiting > 0.8 * times.time_to_first_token
    assert times.time_to_first_token == pytest.approx(ttft, rel=0.15)
    assert times.time_per_output_token == pytest.approx(tpot, rel=0.1)


def test_the_steady_state_is_the_limit_of_many_requests_per_client() -> None:
    replica = llama(service_efficiencies()["vllm"])
    steady, long = (service_times(replica, Load(64, 1024, 256, rounds)) for rounds in (math.inf, 1e6))
    assert long.time_to_first_token == pytest.approx(steady.time_to_first_token, rel=1e-3)
    assert long.time_per_output_token == pytest.approx(steady.time_per_output_token, rel=1e-3)
    few = service_times(replica, Load(64, 1024, 256, 2))
    assert few.time_to_first_token > steady.time_to_first_token


def test_intervals_are_wider_where_nothing_was_measured() -> None:
    vllm = service_efficiencies()["vllm"]
    load = Load(64, 1024, 256)
    measured = interval_of(dataclasses.replace(llama(vllm), weights="fp8"), load)
    assert (measured.tpot, measured.ttft, measured.measured) == (vllm.tpot_factor, vllm.ttft_factor, True)
    for other in (llama(vllm), dataclasses.replace(llama(vllm), device=find_device("A100"))):
        unknown = interval_of(other, load)
        assert not unknown.measured
        assert unknown.tpot > measured.tpot
        assert unknown.ttft > measured.ttft


def test_an_interval_of_one_uncertain_constant_is_that_constants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # All seconds are in the weights' bytes: by as much as their bandwidth is off, the time is.
    spread = dict.fromkeys(FITTED, 0.0) | {"weight_share": 0.2}
    monkeypatch.setattr("napkin.planning.services.service_plan.generation_spread", lambda: spread)
    found = interval_of(llama(), Load(1, 1, 1))
    assert found.tpot == pytest.approx(math.exp(1.645 * 0.2), rel=0.01)


def test_every_constant_has_a_spread_between_generations() -> None:
    assert set(generation_spread()) == set(FITTED)
    assert all(0 <= spread < 1 for spread in generation_spread().values())
