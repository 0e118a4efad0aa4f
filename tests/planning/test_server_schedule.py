"""The simulated schedule of a server beside one that looks at each step, and beside closed forms."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.hardware.service_efficiency import Schedule, service_efficiencies
from napkin.planning.services.server_schedule import Load, Timeline, simulate_schedule
from oracles.serving_simulation import Server, simulate

MIXED = Schedule(prompts_first=False, cuts_prompts=True, max_batched_tokens=300, max_running=64, reserved_output=0.0)
WHOLE = dataclasses.replace(MIXED, cuts_prompts=False, reserved_output=1.0)
FIRST = dataclasses.replace(MIXED, prompts_first=True, reserved_output=0.1)


def pairs(tokens: float) -> float:
    return tokens * (tokens + 1) / 2


def seconds(sequences: Any, context: Any, prompt_tokens: Any, pairs: Any) -> Any:
    """Of a step, linear in what it computes, as the seconds of one replica are in the context."""
    return 0.01 + 2e-6 * sequences * context + 3e-5 * prompt_tokens + 1e-7 * pairs + 1e-4 * sequences


def found_step_by_step(load: Load, schedule: Schedule, cache_tokens: float, timeline: Timeline) -> Any:
    server = Server(schedule, seconds, cache_tokens, load.batch_wait_steps, load.batch_wait_share)
    lengths = list(zip(timeline.inputs.tolist(), timeline.outputs.tolist(), strict=True))
    if load.concurrency is not None:
        requests = simulate(server, lengths, clients=round(load.concurrency))
    else:
        assert timeline.arrival_seconds is not None
        requests = simulate(server, lengths, arrivals=timeline.arrival_seconds.tolist())
    return server, requests


LOADS = {
    "few clients": (Load(3, 120, 20, 4), 10**6),
    "many clients of many lengths": (Load(12, 150, 40, 5, shortest=0.3), 10**6),
    "prompts longer than a step": (Load(5, 700, 8, 3, shortest=0.8), 10**6),
    "answers that end at random": (Load(12, 100, 80, 4, mean_output_tokens=25), 10**6),
    "one token each": (Load(4, 100, 1, 3), 10**6),
    "little cache": (Load(12, 100, 60, 4, shortest=0.5), 700),
    "random moments": (Load(None, 150, 30, shortest=0.5, rate=8.0, requests=60), 10**6),
    "random moments, little cache": (Load(None, 100, 60, shortest=0.5, rate=8.0, requests=60), 500),
    "prompts that wait for others": (
        Load(9, 100, 40, 4, shortest=0.6, batch_wait_steps=7, batch_wait_share=0.9),
        10**6,
    ),
}


@pytest.mark.parametrize("schedule", [MIXED, WHOLE, FIRST], ids=["mixed", "whole prompts", "prompts first"])
@pytest.mark.parametrize("name", LOADS)
def test_each_request_has_the_times_of_a_simulation_that_looks_at_every_step(name: str, schedule: Schedule) -> None:
    load, cache_tokens = LOADS[name]
    timeline = simulate_schedule(load, schedule, cache_tokens, pairs, seconds)
    served = timeline.priced(seconds)
    server, requests = found_step_by_step(load, schedule, cache_tokens, timeline)
    first = [each.first_token - each.sent for each in requests]
    assert served.first_token == pytest.approx(first)
    token = [(each.end - each.first_token) / max(1, each.outputs - 1) for each in requests]
    assert served.per_token == pytest.approx(token)
    assert timeline.preempted == server.preempted
    assert served.seconds == pytest.approx(max(each.end for each in requests))


@pytest.mark.parametrize("schedule", [MIXED, WHOLE, FIRST])
@pytest.mark.parametrize("name", LOADS)
def test_every_token_is_computed_once_and_the_cache_never_holds_more_than_it_has_room_for(
    name: str, schedule: Schedule
) -> None:
    load, cache_tokens = LOADS[name]
    timeline = simulate_schedule(load, schedule, cache_tokens, pairs, seconds)
    decoded = (timeline.sequences * timeline.count).sum()
    # The first token of a request is the last of its prompt's.
    if not timeline.preempted:
        assert decoded == timeline.outputs.sum() - len(timeline.outputs)
        assert timeline.prompt_tokens.sum() == timeline.inputs.sum()
    longest = timeline.context + (timeline.count - 1) / 2
    assert np.all(timeline.sequences * longest <= cache_tokens + timeline.sequences)
    assert np.all(timeline.first <= timeline.end)
    assert np.all(timeline.arrival <= timeline.admission)


def test_a_queue_of_random_arrivals_and_constant_service_waits_as_pollaczek_and_khinchine_say() -> None:
    # One prompt fills a step, and is all of a request.
    one = dataclasses.replace(MIXED, max_batched_tokens=100)
    load = Load(None, 100, 1, rate=60.0, requests=6000, seed=1)
    found = simulate_schedule(load, one, 10**9, pairs, lambda *_: 0.01).priced(lambda n, *_: 0.01 + 0 * n)
    assert np.mean(found.first_token) == pytest.approx(0.01 + 0.6 * 0.01 / (2 * (1 - 0.6)), rel=0.05)


def test_requests_of_one_length_stay_together_where_prompts_come_first() -> None:
    """Twelve clients, three prompts per step: four steps of prompts, for which all wait, then all tokens at once."""
    load = Load(12, 100, 21)
    timeline = simulate_schedule(load, FIRST, 10**6, pairs)

    def taken(sequences: Any, context: Any, prompt_tokens: Any, pairs: Any) -> Any:
        return np.where(prompt_tokens > 0, 2.0, 0.1)

    served, weights = timeline.priced(taken), load.weights(timeline.wave)
    assert np.average(served.first_token, weights=weights) == pytest.approx(2.0 * (1 + 2 + 3 + 4) / 4)
    assert np.average(served.per_token, weights=weights) == pytest.approx(0.1 + 2.0 * (3 + 2 + 1 + 0) / 4 / 20)


def test_where_half_of_the_clients_have_room_the_others_wait_for_a_whole_request() -> None:
    load = Load(8, 100, 101, 40)
    found = simulate_schedule(load, WHOLE, 4 * 201, pairs).priced(seconds)
    assert found.running == pytest.approx(4, rel=0.02)
    whole = np.mean(found.first_token) + 100 * np.mean(found.per_token)
    # Half of the time of each is the wait for a place.
    assert np.mean(found.waiting) == pytest.approx(whole / 2, rel=0.05)


def test_where_few_rounds_are_simulated_the_mean_is_that_of_all() -> None:
    load = Load(400, 100, 50, 12, shortest=0.7)
    assert load.simulated_rounds == 4

    def means(load: Load) -> tuple[float, float]:
        timeline = simulate_schedule(load, MIXED, 10**6, pairs)
        served, weights = timeline.priced(seconds), load.weights(timeline.wave)
        first, each = (float(np.average(each, weights=weights)) for each in (served.first_token, served.per_token))
        return first, each

    few = means(load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("napkin.planning.services.server_schedule.MOST_SIMULATED", 10**6)
        assert load.simulated_rounds == 12
        assert few == pytest.approx(means(load), rel=0.05)


def test_a_load_is_the_same_with_the_same_seed_and_another_with_another() -> None:
    load = Load(5, 100, 50, 4, shortest=0.5)
    one, two = (simulate_schedule(load, MIXED, 10**6, pairs) for _ in range(2))
    assert np.array_equal(one.outputs, two.outputs)
    assert np.array_equal(one.count, two.count)
    other = simulate_schedule(dataclasses.replace(load, seed=1), MIXED, 10**6, pairs)
    assert not np.array_equal(one.outputs, other.outputs)


def test_the_servers_have_the_schedules_that_their_documentation_says() -> None:
    known = {name: each.schedule for name, each in service_efficiencies().items()}
    assert [name for name, each in known.items() if each.prompts_first] == ["sglang"]
    assert [name for name, each in known.items() if not each.cuts_prompts] == ["trtllm"]
    assert [name for name, each in known.items() if each.reserved_output == 1] == ["trtllm"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rate": 1.0}, "give one of them"),
        ({"concurrency": None}, "give one of them"),
        ({"concurrency": None, "rate": float("inf")}, "rate is inf"),
        ({"shortest": 1.5}, "shortest is 1.5"),
    ],
)
def test_an_impossible_load_of_devices_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NapkinError, match=says):
        Load(**{"concurrency": 2, "input_tokens": 10, "output_tokens": 10, **changes})


def test_a_request_that_no_cache_holds_and_a_rate_without_seconds_are_refused() -> None:
    with pytest.raises(NapkinError, match="does not fit into a cache of 50"):
        simulate_schedule(Load(1, 100, 10), MIXED, 50, pairs)
    with pytest.raises(NapkinError, match="give seconds"):
        simulate_schedule(Load(None, 10, 10, rate=1.0), MIXED, 50, pairs)


def test_loads_that_would_take_minutes_are_refused() -> None:
    for load in (Load(10**9, 10, 10), Load(None, 10, 10, rate=1.0, requests=10**9)):
        with pytest.raises(NapkinError, match="requests are to be simulated, at most 50,000"):
            simulate_schedule(load, MIXED, 10**12, pairs, seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("napkin.planning.services.server_schedule.MOST_ROWS", 1000)
        with pytest.raises(NapkinError, match="more than 1,000 different steps"):
            simulate_schedule(Load(1, 10**6, 10), MIXED, 10**12, pairs)


@pytest.mark.parametrize(("mean", "longest"), [(1, 50), (12, 50), (40, 50), (50, 50), (1060, 4096)])
def test_answers_that_end_at_random_have_the_stated_mean_and_are_cut_at_the_longest(mean: int, longest: int) -> None:
    load = Load(4000, 10, longest, 1, mean_output_tokens=mean)
    outputs = simulate_schedule(load, dataclasses.replace(MIXED, max_running=4000), 10**9, pairs).outputs
    assert outputs.max() <= longest
    assert outputs.mean() == pytest.approx(mean, rel=0.05)
    if 1 < mean < longest:
        # After each token as likely: the part that is cut, and the median, are those of a geometric distribution.
        going_on = 1 - load.ending
        assert (outputs == longest).mean() == pytest.approx(going_on ** (longest - 1), abs=0.03)
        assert np.mean(outputs <= mean) == pytest.approx(1 - going_on**mean if mean < longest else 1, abs=0.03)


def test_a_mean_above_the_longest_answer_is_refused() -> None:
    with pytest.raises(NapkinError, match="mean of the output is 60 tokens: use from 1 to the longest, 50"):
        Load(1, 10, 50, mean_output_tokens=60)
