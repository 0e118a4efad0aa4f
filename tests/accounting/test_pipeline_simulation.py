import dataclasses
import doctest
import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from napkin.accounting import pipeline_simulation
from napkin.accounting.pipeline_schedules import SCHEDULES, PipelineAction, PipelineSchedule, pipeline_schedule
from napkin.accounting.pipeline_simulation import (
    InFlight,
    PipelineTimeline,
    StageSeconds,
    TimedAction,
    simulate_pipeline,
    stage_seconds,
)
from napkin.errors import NapkinError
from oracles.naive_pipeline import NaivePipeline
from oracles.torch_pipelines import SINGLE, executed_by_torch, table_of_torch

SIZES = [(ranks, micro_batches) for ranks in range(1, 7) for micro_batches in range(1, 19)]
EQUAL = StageSeconds(1.0, 1.0, 1.0)


def simulated(
    name: str, ranks: int, micro_batches: int, seconds: StageSeconds = EQUAL, *, stages_per_rank: int = 1
) -> PipelineTimeline:
    """Equal stages, no communication."""
    schedule = pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
    return simulate_pipeline(schedule, [seconds] * schedule.stages)


# Closed forms.


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_one_micro_batch_more_for_each_further_rank(name: str) -> None:
    seconds = StageSeconds(3.0, 4.0, 3.0, recompute=2.0)
    for ranks, micro_batches in SIZES:
        if name == "gpipe" or micro_batches >= ranks:
            timeline = simulated(name, ranks, micro_batches, seconds)
            assert timeline.seconds == (micro_batches + ranks - 1) * (3 + 9)
            assert timeline.busy_seconds == (12.0 * micro_batches,) * ranks
            assert timeline.idle_seconds == (12.0 * (ranks - 1),) * ranks
            assert timeline.bubble_fraction == pytest.approx((ranks - 1) / micro_batches)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("seconds", [StageSeconds(1.0, 1.0, 1.0), StageSeconds(3.0, 2.0, 5.0)])
def test_stages_that_are_interleaved_divide_the_bubble(stages_per_rank: int, seconds: StageSeconds) -> None:
    for ranks, rounds in itertools.product(range(1, 7), range(1, 5)):
        timeline = simulated("interleaved-1f1b", ranks, ranks * rounds, seconds, stages_per_rank=stages_per_rank)
        assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (stages_per_rank * ranks * rounds))


def test_zb_h1_hides_gradients_of_weights_in_the_bubble() -> None:
    # Qi et al. 2024, table 2: (p - 1)(T_F + T_B - T_W) of each rank's step, against (p - 1)(T_F + T_B + T_W) of 1f1b.
    for seconds in [StageSeconds(1.0, 1.0, 1.0), StageSeconds(3.0, 4.0, 2.0)]:
        gain = 2 * seconds.backward_weight
        for ranks, micro_batches in SIZES:
            if micro_batches >= 2 * ranks and micro_batches % (micro_batches // ranks) == 0:
                before = simulated("1f1b", ranks, micro_batches, seconds).seconds
                after = simulated("zb-h1", ranks, micro_batches, seconds).seconds
                assert before - after == (ranks - 1) * gain, (ranks, micro_batches)


def test_a_rank_of_zb_v_is_never_idle_between_its_first_action_and_its_last() -> None:
    for ranks, micro_batches in SIZES:
        if micro_batches >= 2 * ranks - 1:
            timeline = simulated("zb-v", ranks, micro_batches, stages_per_rank=2)
            for timed, busy in zip(timeline.ranks, timeline.busy_seconds, strict=True):
                assert timed[-1].end - timed[0].start == busy


def test_zero_bubble_schedules_are_idle_for_less_than_1f1b() -> None:
    for ranks, micro_batches in [(2, 4), (4, 8), (8, 16), (8, 64)]:
        # A rank of zb-v has two stages of half the size.
        half = StageSeconds(0.5, 0.5, 0.5)
        plain = simulated("1f1b", ranks, micro_batches)
        h1 = simulated("zb-h1", ranks, micro_batches)
        v = simulated("zb-v", ranks, micro_batches, half, stages_per_rank=2)
        assert math.fsum(v.idle_seconds) < math.fsum(h1.idle_seconds) < math.fsum(plain.idle_seconds)
        assert v.busy_seconds == h1.busy_seconds == plain.busy_seconds


def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_ranks_follow() -> None:
    for ranks, micro_batches in SIZES:
        timeline = simulated("gpipe", ranks, micro_batches)
        assert [timeline.most_in_flight(stage) for stage in range(ranks)] == [micro_batches] * ranks
        if micro_batches >= ranks:
            timeline = simulated("1f1b", ranks, micro_batches)
            kept = [min(micro_batches, ranks - rank) for rank in range(ranks)]
            assert [timeline.most_in_flight(stage) for stage in range(ranks)] == kept


def test_zero_bubble_schedules_keep_no_more_than_the_first_rank_of_1f1b() -> None:
    for ranks in range(1, 7):
        micro_batches = 3 * ranks
        h1 = simulated("zb-h1", ranks, micro_batches)
        assert [h1.most_in_flight(stage) for stage in range(ranks)] == [ranks] * ranks
        before_weights = [h1.most_in_flight(stage, after_backward_input=False) for stage in range(ranks)]
        assert before_weights == [ranks - rank for rank in range(ranks)]
        v = simulated("zb-v", ranks, micro_batches, stages_per_rank=2)
        # Half a stage keeps half as many bytes.
        assert {v.peak_activation_bytes(rank, [0.5] * 2 * ranks) for rank in range(ranks)} == {ranks}


def test_activations_are_counted_from_the_start_of_a_forward_to_the_end_of_its_backward() -> None:
    timeline = simulated("zb-h1", 2, 2, StageSeconds(1.0, 2.0, 4.0))
    # Rank 1: F0 1-2, I0 2-4, F1 4-5, I1 5-7, W0 7-11, W1 11-15.
    assert [action[1:] for action, _, _ in timeline.ranks[1]] == [
        ("forward", 0),
        ("backward_input", 0),
        ("forward", 1),
        ("backward_input", 1),
        ("backward_weight", 0),
        ("backward_weight", 1),
    ]
    assert timeline.in_flight(1) == [
        InFlight(1.0, 1, 0),
        InFlight(4.0, 0, 1),
        InFlight(4.0, 1, 1),
        InFlight(7.0, 0, 2),
        InFlight(11.0, 0, 1),
        InFlight(15.0, 0, 0),
    ]
    assert timeline.most_in_flight(1) == 2
    assert timeline.most_in_flight(1, after_backward_input=False) == 1
    assert timeline.peak_activation_bytes(1, [10, 10]) == 20
    assert timeline.peak_activation_bytes(1, [10, 10], [3, 3]) == 13
    assert timeline.peak_activation_bytes(1, [10, 10], [0, 0]) == 10


def test_stages_need_not_be_equal() -> None:
    block = StageSeconds(1.0, 1.0, 1.0)
    head = StageSeconds(0.5, 0.75, 0.25, recompute=0.0)
    stages = stage_seconds([2, 3], block, embedding=StageSeconds(0.25), head=head)
    assert stages == [StageSeconds(2.25, 2.0, 2.0), StageSeconds(3.5, 3.75, 3.25)]
    timeline = simulate_pipeline(pipeline_schedule("gpipe", 2, 2), stages, send_seconds=0.5)
    spans = [[(each.start, each.end) for each in timed] for timed in timeline.ranks]
    assert spans[0] == [(0, 2.25), (2.25, 4.5), (17.25, 21.25), (24.25, 28.25)]
    assert spans[1] == [(2.75, 6.25), (6.25, 9.75), (9.75, 16.75), (16.75, 23.75)]


def test_recomputation_comes_before_the_gradient_of_the_input() -> None:
    seconds = StageSeconds(1.0, 2.0, 4.0, recompute=8.0)
    assert [seconds.of(kind) for kind in ("forward", "backward", "backward_input", "backward_weight")] == [1, 14, 10, 4]
    assert stage_seconds([0, 2], seconds) == [StageSeconds(), StageSeconds(2.0, 4.0, 8.0, 16.0)]


def test_a_rank_that_does_not_compute_while_it_sends_waits() -> None:
    schedule = pipeline_schedule("gpipe", 2, 3)
    beside = simulate_pipeline(schedule, [EQUAL] * 2, send_seconds=1.0)
    blocked = simulate_pipeline(schedule, [EQUAL] * 2, send_seconds=1.0, overlap=False)
    assert beside.sending_seconds == (0, 0)
    assert blocked.sending_seconds == (3, 3)
    assert blocked.seconds > beside.seconds


def test_messages_over_one_link_follow_each_other() -> None:
    timeline = simulate_pipeline(pipeline_schedule("gpipe", 2, 3), [EQUAL] * 2, send_seconds=5.0)
    assert [each.start for each in timeline.ranks[1]][:3] == [6, 11, 16]


def test_a_stage_on_the_same_rank_is_sent_nothing() -> None:
    schedule = pipeline_schedule("zb-v", 1, 3, stages_per_rank=2)
    assert simulate_pipeline(schedule, [EQUAL] * 2, send_seconds=100.0).seconds == 18


# Against a clock that ticks.


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineSchedule, list[StageSeconds], list[int], bool]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages_per_rank = SCHEDULES[name].stages_per_rank or draw(st.integers(1, 3))
    ranks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    try:
        schedule = pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
    except NapkinError:
        assume(False)
        raise
    ticks = st.builds(StageSeconds, *[st.integers(1, 4)] * 3, recompute=st.integers(0, 2))
    seconds = draw(st.lists(ticks, min_size=schedule.stages, max_size=schedule.stages))
    pairs = schedule.stages - 1
    return schedule, seconds, draw(st.lists(st.integers(0, 4), min_size=pairs, max_size=pairs)), draw(st.booleans())


def naive(schedule: PipelineSchedule, seconds: list[StageSeconds], sends: list[int], overlap: bool) -> NaivePipeline:
    return NaivePipeline(schedule, lambda action: int(seconds[action.stage].of(action.kind)), sends, overlap)


@given(pipelines())
def test_start_and_end_are_those_of_a_simulation_tick_by_tick(
    pipeline: tuple[PipelineSchedule, list[StageSeconds], list[int], bool],
) -> None:
    schedule, seconds, sends, overlap = pipeline
    ticking = naive(*pipeline)
    assert ticking.run()
    timeline = simulate_pipeline(schedule, seconds, send_seconds=sends, overlap=overlap)
    assert {each.action: (each.start, each.end) for timed in timeline.ranks for each in timed} == ticking.spans
    assert timeline.seconds == max(end for _, end in ticking.spans.values())


@given(pipelines(), st.randoms(use_true_random=False), st.integers(1, 6))
def test_a_deadlock_is_found_where_the_clock_ticks_in_vain(
    pipeline: tuple[PipelineSchedule, list[StageSeconds], list[int], bool], chance: random.Random, swaps: int
) -> None:
    schedule, seconds, sends, overlap = pipeline
    rows = [list(actions) for actions in schedule.actions]
    for _ in range(swaps):
        row = chance.choice(rows)
        first, second = chance.randrange(len(row)), chance.randrange(len(row))
        row[first], row[second] = row[second], row[first]
    shuffled = dataclasses.replace(schedule, actions=tuple(map(tuple, rows)))
    ticking = naive(shuffled, seconds, sends, overlap)
    if ticking.run():
        timeline = simulate_pipeline(shuffled, seconds, send_seconds=sends, overlap=overlap)
        assert {each.action: (each.start, each.end) for timed in timeline.ranks for each in timed} == ticking.spans
    else:
        with pytest.raises(NapkinError, match="deadlocks: rank"):
            simulate_pipeline(shuffled, seconds, send_seconds=sends, overlap=overlap)


@given(pipelines(), st.data())
def test_no_action_ends_earlier_when_a_stage_or_a_send_gets_slower(
    pipeline: tuple[PipelineSchedule, list[StageSeconds], list[int], bool], data: st.DataObject
) -> None:
    schedule, seconds, sends, overlap = pipeline
    extra = st.builds(StageSeconds, *[st.integers(0, 3)] * 4)
    slower = [each + data.draw(extra) for each in seconds]
    slower_sends = [each + data.draw(st.integers(0, 3)) for each in sends]
    before = simulate_pipeline(schedule, seconds, send_seconds=sends, overlap=overlap)
    after = simulate_pipeline(schedule, slower, send_seconds=slower_sends, overlap=overlap)
    blocked = simulate_pipeline(schedule, slower, send_seconds=slower_sends, overlap=False)
    for earlier, later in [(before, after), (after, blocked)]:
        for fast, slow in zip(itertools.chain(*earlier.ranks), itertools.chain(*later.ranks), strict=True):
            assert fast.action == slow.action
            assert fast.end <= slow.end


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_simulated_actions_run_in_the_order_of_torch(name: str, ranks: int) -> None:
    needed = SCHEDULES[name].stages_per_rank
    for stages_per_rank, micro_batches in itertools.product([needed] if needed else [1, 2, 4], [8, 12, 32]):
        if name == "interleaved-1f1b" or name == "zb-h1":
            micro_batches = max(micro_batches // ranks, 1) * ranks
        schedule = pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
        uneven = [StageSeconds(1.0 + stage % 3, 2.0, 1.0 + stage % 2) for stage in range(schedule.stages)]
        timeline = simulate_pipeline(schedule, uneven, send_seconds=0.5)
        for timed in timeline.ranks:
            assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(timed))
        simulated_order = [[each.action for each in sorted(timed, key=_start)] for timed in timeline.ranks]
        if name in SINGLE:
            assert simulated_order == executed_by_torch(name, ranks, micro_batches)
        else:
            assert simulated_order == table_of_torch(name, ranks, micro_batches, stages_per_rank)


def _start(timed: TimedAction) -> float:
    return timed.start


# Every schedule there is runs to its end.


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks(name: str) -> None:
    for ranks, micro_batches in SIZES:
        for stages_per_rank in range(1, 4):
            try:
                schedule = pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
            except NapkinError:
                continue
            simulate_pipeline(schedule, [EQUAL] * schedule.stages)


# Refusals.


TWO = pipeline_schedule("gpipe", 2, 1)


def with_rows(*rows: list[PipelineAction]) -> PipelineSchedule:
    return dataclasses.replace(TWO, actions=tuple(map(tuple, rows)))


F0, B0 = TWO.actions[0]
F1, B1 = TWO.actions[1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            with_rows([B0, F0], [F1, B1]),
            "schedule 'gpipe' deadlocks: rank 0 cannot run backward of micro-batch 0 in stage 0 before stage 1 is done "
            "with it, which never happens: change the order of actions",
        ),
        (with_rows([F0, F0, B0], [F1, B1]), "forward of micro-batch 0 in stage 0 is listed twice for rank 0"),
        (with_rows([F0, F1, B0], [B1]), "forward of micro-batch 0 in stage 1 is listed for rank 0, but rank 1 holds"),
        (with_rows([F0, B0], [F1]), "micro-batch 0 does not pass stage 1 once forward and once backward"),
        (with_rows([F0, B0], [F1, B1, B1._replace(kind="backward_weight")]), "micro-batch 0 does not pass stage 1"),
        (with_rows([F0, B0], [F1, B1, B1._replace(micro_batch=1)]), "backward of micro-batch 1 in stage 1 is not in"),
        (with_rows([F0, B0], [F1, B1, B1._replace(kind="send")]), "'send' is not a kind of action: use one of forward"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_table_that_cannot_run_is_refused(schedule: PipelineSchedule, message: str) -> None:
    with pytest.raises(NapkinError) as refused:
        simulate_pipeline(schedule, [EQUAL] * 2)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_numbers_that_no_pipeline_has_are_refused() -> None:
    with pytest.raises(NapkinError, match=r"seconds.*1.*pipeline.*2: give"):
        simulate_pipeline(TWO, [EQUAL])
    with pytest.raises(NapkinError, match=r"forward.*stage 1.*-1\.0 seconds: use 0.*1e\+12"):
        simulate_pipeline(TWO, [EQUAL, StageSeconds(-1.0)])
    with pytest.raises(NapkinError, match=r"backward_input.*stage 0.*seconds"):
        simulate_pipeline(TWO, [StageSeconds(1.0, math.inf), EQUAL])
    with pytest.raises(NapkinError, match=r"recompute.*stage 1.*-1 seconds"):
        simulate_pipeline(TWO, [EQUAL, StageSeconds(1.0, 2.0, recompute=-1)])
    with pytest.raises(NapkinError, match=r"send.*stages 0.*1.*seconds"):
        simulate_pipeline(TWO, [EQUAL] * 2, send_seconds=math.nan)
    with pytest.raises(NapkinError, match=r"2.*stages.*pipeline.*1"):
        simulate_pipeline(TWO, [EQUAL] * 2, send_seconds=[1.0, 1.0])
    with pytest.raises(NapkinError, match=r"1 stages.*pipeline.*2"):
        simulate_pipeline(TWO, [EQUAL] * 2).peak_activation_bytes(0, [1.0])


def test_a_rank_or_stage_that_is_not_there_is_refused() -> None:
    timeline = simulate_pipeline(TWO, [EQUAL] * 2)
    for index in (-1, 2):
        with pytest.raises(NapkinError, match=f"stage {index}.*pipeline.*2 stages: use 0.*1"):
            timeline.in_flight(index)
        with pytest.raises(NapkinError, match=f"stage {index}.*pipeline.*2 stages"):
            timeline.most_in_flight(index)
        with pytest.raises(NapkinError, match=f"rank {index}.*pipeline.*2 ranks: use 0.*1"):
            timeline.peak_activation_bytes(index, [1.0, 1.0])
        with pytest.raises(NapkinError, match=f"rank {index}.*pipeline.*2 ranks"):
            TWO.stages_of(index)


def test_a_step_without_seconds_has_no_bubble() -> None:
    timeline = simulate_pipeline(TWO, [StageSeconds()] * 2)
    assert (timeline.seconds, timeline.bubble_fraction) == (0, 0)


def test_the_examples_of_the_docstrings_are_true() -> None:
    found = doctest.testmod(pipeline_simulation)
    assert found.attempted > 0
    assert found.failed == 0
