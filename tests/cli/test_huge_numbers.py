"""A number that is far too large is answered at once, or refused with its limit and a way out that works."""

import re

import pytest

from napkin.cli.common import progress
from napkin.train_step import step_ledger

TINY = "--model.vocab-size 256 --model.d-model 16 --model.n-heads 2 --model.n-layers 1 --model.context-length 64"

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            f"count {TINY} --model.context-length 100000000 --training.batch-size 1",
            "a micro-batch of 1 × 100,000,000 tokens computes its loss in 195,313 chunks of 512, too many to count, "
            "the limit is 8,192: use a --model.context-length of 4194304 at most, or --training.loss-chunk-size 16384",
        ),
        (f"count {TINY} --training.batch-size 100000000", "use --training.micro-batch-size 62500, or"),
        (
            f"count {TINY} --training.batch-size 100000000 --training.micro-batch-size 1",
            "a step of 100,000,000 micro-batches through 1 layers is too long to count, the limit is 131,072",
        ),
        (f"plan {TINY} --training.batch-size 100000000 --training.micro-batch-size 1", "use a larger --training.micro"),
        ("train tiny.toml --run new --training.batch-size 100000000 --training.micro-batch-size 1", "use a larger"),
        ("fit --on 8xH100 --context-length 100000000", "use numbers whose product is at most 4,194,304"),
        ("fit --on 8xH100 --batch-size 999999999999", "use numbers whose product is at most 4,194,304"),
    ],
)
def test_a_count_that_would_take_hours_is_refused_with_its_limit(refusal, command: str, line: str) -> None:
    assert line in refusal(*command.split())


def test_the_way_out_of_too_large_a_micro_batch_is_taken(napkin, refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    # A hundredth of the chunks that are allowed, so that the test is quick.
    monkeypatch.setattr(step_ledger, "MOST_LOSS_CHUNKS", 80)
    command = f"count {TINY} --training.batch-size 100000000".split()
    line = refusal(*command)
    micro = re.search(r"use --training.micro-batch-size (\d+), or", line)
    chunk = re.search(r"(--training.loss-chunk-size) (\d+)$", line)
    assert micro is not None
    assert chunk is not None
    assert 100_000_000 % int(micro[1]) == 0
    assert napkin(*command, chunk[1], chunk[2]).status == 0


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "options",
    [
        "--training.steps 1000000000000 --optimizer.warmup-steps 999999999999",
        "--model.vocab-size 16777216 --model.d-ff 4194304",
        "--model.n-experts 1024",
        "--training.batch-size 256 --training.micro-batch-size 1",
        *(
            pytest.param(options, marks=pytest.mark.torture)
            for options in ("--model.n-experts 16384", "--training.batch-size 4096 --training.micro-batch-size 1")
        ),
    ],
)
def test_other_huge_numbers_are_counted(napkin, options: str) -> None:
    assert napkin("count", *TINY.split(), *options.split()).status == 0


def test_a_long_count_says_how_far_it_is(napkin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    done = napkin("count", *TINY.split(), "--model.n-layers", "8")
    assert done.status == 0
    assert re.search(r"counting the step +[\d,]+ operator calls", done.err)
