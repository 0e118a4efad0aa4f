"""Prefixes of an engine that are kept in a file: texts and counts of an engine that starts with them."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.prefix_store import PrefixStore
from napkin.inference.requests import Completion, Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer

CONFIG = ModelConfig(31, context_length=64, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, tie_embeddings=False)
PROMPTS = [list(range(25)), [*range(16), 30, 29, 28], [7] * 13]
BLOCK = 4 * 2 * 2 * 8 * 4 + 16
"""Bytes of 4 tokens in a file: keys and values, in two layers, of 8 numbers in fp32, and a digest."""


def engine_of(model: Transformer, **how: Any) -> Engine:
    return Engine(model, block_size=4, prefill_chunk=16, **how)


def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
    completions = [engine.submit(Request(prompt, 6, Sampling(seed=3))) for prompt in prompts]
    engine.run()
    assert engine.pool.n_free == engine.pool.n_blocks
    return completions


@pytest.mark.parametrize(
    "how",
    [
        {"draft": True, "proposed": 2},
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ({}, {"kv": "int8"}, {"batch_invariant": True})),
    ],
    ids=str,
)
def test_a_restarted_engine_has_the_texts_and_finds_the_tokens_of_before(tmp_path: Path, how: dict[str, Any]) -> None:
    model = Transformer(CONFIG, seed=1).eval()
    if "draft" in how:
        how = {**how, "draft": Transformer(CONFIG, seed=2).eval()}
    store = PrefixStore(10**6, tmp_path / "kept")
    first = engine_of(model, **how)
    assert store.restore(first) == 0
    texts = [each.tokens for each in run(first)]
    found = [each.cached_tokens for each in run(first)]
    assert store.keep(first) == 4 * len(first.pool.known())
    again = engine_of(model, **how)
    assert store.restore(again) == store.keep(first)
    assert again.pool.n_free == again.pool.n_blocks
    completions = run(again)
    assert [each.tokens for each in completions] == texts
    assert [each.cached_tokens for each in completions] == found
    assert again.stats().cached_tokens == sum(found) > 0
    if os.name != "nt":
        assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_what_is_kept_is_bounded_and_what_was_used_last_stays(tmp_path: Path) -> None:
    model = Transformer(CONFIG, seed=1).eval()
    engine = engine_of(model)
    for prompt in PROMPTS:
        run(engine, [prompt])
    # The last prompt and its answer have 18 computed tokens: four full blocks.
    store = PrefixStore(4 * BLOCK + 5, tmp_path / "kept")
    assert store.keep(engine) == 16
    path = store.path(engine)
    assert path.stat().st_size < 4 * BLOCK + 2000
    again = engine_of(model)
    assert store.restore(again) == 16
    assert [each.cached_tokens for each in run(again)] == [0, 0, 12]
    # A smaller pool takes those of the last use.
    small = engine_of(model, cache_bytes=2 * (BLOCK - 16))
    assert store.restore(small) == 8
    assert small.pool.known()[-1] == (small.pool.known()[-1][0], engine.pool.known()[-1][1])
    assert PrefixStore(BLOCK - 1, tmp_path / "kept").keep(engine) == 0
    with pytest.raises(NapkinError, match="use 0 or more"):
        PrefixStore(-1)


def test_a_file_that_is_damaged_or_of_something_else_is_as_if_there_were_none(tmp_path: Path) -> None:
    model = Transformer(CONFIG, seed=1).eval()
    engine, store = engine_of(model), PrefixStore(10**6, tmp_path / "kept")
    run(engine)
    assert store.keep(engine) > 0
    path = store.path(engine)
    content = path.read_bytes()
    for place in (0, 9, 40, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert store.restore(engine_of(model)) == 0
    path.write_bytes(content[:-1])
    assert store.restore(engine_of(model)) == 0
    path.write_bytes(content)
    assert store.restore(engine_of(model)) > 0
    for other in (
        store.path(engine_of(Transformer(CONFIG, seed=2))),
        store.path(engine_of(model, draft=Transformer(CONFIG, seed=2))),
        store.path(engine_of(model, kv="int8")),
        store.path(engine_of(model, batch_invariant=True)),
        store.path(Engine(model, block_size=8)),
    ):
        assert other != path
    assert [each.name for each in path.parent.iterdir()] == [path.name]
