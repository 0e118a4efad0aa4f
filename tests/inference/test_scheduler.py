"""The schedule without a model: the invariants of blocks under random arrivals, and no torch."""

import random
import subprocess
import sys

import pytest

from napkin.inference.scheduler import ScheduledSequence, Scheduler


def test_the_scheduler_needs_no_torch() -> None:
    said = "import sys, napkin.inference.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}, {"prompts_together": True}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_lost_or_used_for_two_texts_and_every_request_ends(settings: dict, seed: int) -> None:
    """Prompts begin alike, the pool is far too small, and some are no longer wanted."""
    draw, size = random.Random(seed), 4
    scheduler = Scheduler(14, block_size=size, max_running=5, prefill_chunk=8, **settings)
    begun = [[draw.randrange(3) for _ in range(20)] for _ in range(2)]
    asked: list[ScheduledSequence] = []
    ended: set[int] = set()
    while len(ended) < 60:
        if len(asked) < 60 and draw.random() < 0.5:
            prompt = [
                *draw.choice(begun)[: draw.randint(0, 20)],
                *(draw.randrange(3) for _ in range(draw.randint(1, 9))),
            ]
            asked.append(ScheduledSequence(len(asked), prompt, len(prompt), draw.randint(1, 25)))
            scheduler.add(asked[-1])
        scheduler.admit()
        n_decoded, n_prefilled = 0, 0
        for work in scheduler.passes():
            for each, first in zip(work.sequences, work.firsts, strict=True):
                assert work.sequences[first].tokens == each.tokens or first == work.sequences.index(each)
                assert len(each.table) * size >= each.n_computed + work.n_new
                n_decoded += each.decodes
                n_prefilled += work.n_new * (not each.decodes and work.sequences[first] is each)
            for each in work.sequences:
                scheduler.advance(each, work.n_new)
                if each.n_computed == len(each.tokens):
                    each.tokens.append(draw.randrange(3))
                    if not each.wants_more:
                        scheduler.finish(each)
                        ended.add(each.number)
        assert n_decoded <= scheduler.max_running
        # In batch-invariant mode the last chunk may exceed the budget that is left, by less than a chunk.
        assert n_prefilled < scheduler.prefill_chunk * (2 if scheduler.batch_invariant else 1) + 1
        if scheduler.running and draw.random() < 0.1:
            unwanted = draw.choice([*scheduler.running, *scheduler.waiting])
            scheduler.finish(unwanted)
            ended.add(unwanted.number)
        texts: dict[int, tuple[int, ...]] = {}
        for each in scheduler.running:
            for place, block in enumerate(each.table[: each.n_computed // size]):
                text = tuple(each.tokens[: (place + 1) * size])
                assert texts.setdefault(block, text) == text
    assert scheduler.preempted > 0
    assert scheduler.pool.n_free == scheduler.pool.n_blocks
