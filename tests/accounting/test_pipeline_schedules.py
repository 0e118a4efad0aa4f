import doctest
import itertools

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from napkin.accounting import pipeline_schedules
from napkin.accounting.pipeline_schedules import (
    MOST_ACTIONS,
    SCHEDULES,
    PipelineSchedule,
    loop_placement,
    pipeline_schedule,
    v_placement,
)
from napkin.errors import NapkinError
from oracles.torch_pipelines import MULTI, SINGLE, executed_by_torch, table_of_torch

RANKS = range(2, 9)
MICRO_BATCHES = range(1, 33)


def rows_of(schedule: PipelineSchedule) -> list[list[tuple[int, str, int]]]:
    return [list(actions) for actions in schedule.actions]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_order_is_what_torch_runs_with_one_stage_per_rank(name: str, ranks: int) -> None:
    compared = 0
    for micro_batches in MICRO_BATCHES:
        try:
            executed = executed_by_torch(name, ranks, micro_batches)
        except ValueError:
            with pytest.raises(NapkinError):
                pipeline_schedule(name, ranks, micro_batches)
            continue
        assert rows_of(pipeline_schedule(name, ranks, micro_batches)) == executed
        compared += 1
    assert compared >= len(MICRO_BATCHES) - ranks + 1


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_order_is_the_table_of_torch_with_one_stage_per_rank(name: str, ranks: int) -> None:
    for micro_batches in range(ranks, 33):
        table = table_of_torch(name, ranks, micro_batches)
        rows = rows_of(pipeline_schedule(name, ranks, micro_batches))
        if name == "1f1b":
            # torch 2.13's table has the last rank's forwards from 1 to m, though it runs 0 to m - 1 (see above).
            *table, last = table
            *rows, ours = rows
            assert [action.kind for action in last] == [kind for _, kind, _ in ours]
        assert rows == table


@pytest.mark.sampled(every=18)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MULTI)
def test_the_order_is_the_table_of_torch_action_by_action(name: str, ranks: int) -> None:
    compared = 0
    for stages_per_rank, micro_batches in itertools.product(range(1, 5), MICRO_BATCHES):
        try:
            table = table_of_torch(name, ranks, micro_batches, stages_per_rank)
        except ValueError:
            with pytest.raises(NapkinError):
                pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
            continue
        schedule = pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
        assert rows_of(schedule) == table, (stages_per_rank, micro_batches)
        compared += 1
    assert compared >= 32


@pytest.mark.parametrize("stages_per_rank", range(1, 5))
@pytest.mark.parametrize("ranks", RANKS)
def test_stages_are_on_the_ranks_on_which_torch_has_them(ranks: int, stages_per_rank: int) -> None:
    stages = ranks * stages_per_rank
    for place, style in [(loop_placement, "loop"), (v_placement, "v")]:
        expected = generate_stage_to_rank_mapping(ranks, stages, style)
        assert dict(enumerate(place(ranks, stages_per_rank))) == expected


def test_a_rank_has_the_first_and_the_last_stage_of_a_v() -> None:
    schedule = pipeline_schedule("zb-v", 4, 8, stages_per_rank=2)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert (schedule.ranks, schedule.stages) == (4, 8)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "stages_per_rank", "message"),
    [
        ("1f1", 4, 8, 1, "'1f1' is not a pipeline schedule: did you mean '1f1b'?"),
        ("gpipe", 0, 8, 1, "a pipeline of 0 ranks is not possible: use at least 1"),
        ("gpipe", 4, 0, 1, "a pipeline of 0 micro-batches is not possible: use at least 1"),
        ("zb-h1", 4, 8, -1, "a pipeline of -1 stages per rank is not possible: use at least 1"),
        (
            "1f1b",
            4,
            3,
            1,
            "1f1b needs at least as many micro-batches as ranks, and 3 are fewer than 4: use at least 4 micro-batches, "
            "or gpipe",
        ),
        ("1f1b", 4, 8, 2, "1f1b has 1 stage per rank, not 2: use 1, or interleaved-1f1b or zb-h1 or zb-v"),
        ("zb-v", 4, 8, 1, "zb-v has 2 stages per rank, not 1: use 2, or gpipe or 1f1b or interleaved-1f1b or zb-h1"),
        (
            "interleaved-1f1b",
            4,
            9,
            2,
            "interleaved-1f1b takes 9 micro-batches through 4 ranks in 2 rounds, which are not equal: use 8 or 10 "
            "micro-batches",
        ),
    ],
)
def test_what_has_no_order_is_refused_with_a_way_out(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, message: str
) -> None:
    with pytest.raises(NapkinError) as refused:
        pipeline_schedule(name, ranks, micro_batches, stages_per_rank=stages_per_rank)
    assert str(refused.value) == message


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-h1"])
def test_the_numbers_of_micro_batches_that_a_refusal_names_are_the_nearest_that_work(name: str) -> None:
    for ranks, micro_batches in itertools.product(RANKS, MICRO_BATCHES):
        try:
            pipeline_schedule(name, ranks, micro_batches, stages_per_rank=2)
        except NapkinError as refused:
            words = str(refused).partition("use ")[2].split()
            lower, higher = int(words[0]), int(words[2])
            assert lower < micro_batches < higher
            works = []
            for number in range(lower, higher + 1):
                try:
                    pipeline_schedule(name, ranks, number, stages_per_rank=2)
                except NapkinError:
                    continue
                works.append(number)
            assert works == [lower, higher]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, MOST_ACTIONS), (MOST_ACTIONS, 1), (10**30, 10**30)])
def test_a_table_too_large_for_memory_is_refused_before_it_is_made(name: str, ranks: int, micro_batches: int) -> None:
    needed = SCHEDULES[name].stages_per_rank or 4
    with pytest.raises(NapkinError, match="more than 3,000,000"):
        pipeline_schedule(name, ranks, micro_batches, stages_per_rank=needed)


def test_the_examples_of_the_docstrings_are_true() -> None:
    found = doctest.testmod(pipeline_schedules)
    assert found.attempted > 0
    assert found.failed == 0
