import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from napkin.model.config import ModelConfig, preset, presets
from napkin.model.kv_cache import ContiguousCache
from napkin.planning.services.replica import TRACED_TOKENS, count_forward, count_work

SMALL = ModelConfig(vocab_size=512, d_model=64, n_layers=5, n_heads=4, n_kv_heads=2, tie_embeddings=False)
EXPERTS = dataclasses.replace(
    SMALL, n_experts=8, experts_per_token=2, n_shared_experts=1, n_dense_layers=1, d_expert=48
)


@pytest.mark.thorough
@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_the_flops_from_two_depths_are_those_of_the_whole_model_traced(config: ModelConfig) -> None:
    work = count_work(config)
    for tokens in (1, 300):
        ledger = count_forward(config, tokens)
        assert work.parameters == ledger.parameters
        assert work.prefill_flops(tokens) == pytest.approx(ledger.causal_flops, rel=1e-9)
    for held in (0, 1, 77):
        # The new token sees itself too.
        assert work.decode_flops(1, held + 1) == pytest.approx(count_forward(config, 1, held).causal_flops, rel=1e-9)
    traced = count_forward(config, TRACED_TOKENS)
    elementwise = [row for row in traced.rows if not row.contraction and row.component != "embedding"]
    touched = sum(row.bytes_read + row.bytes_written for row in elementwise)
    assert TRACED_TOKENS * (work.whole_bytes + work.divided_bytes) == pytest.approx(touched, rel=1e-9)


def test_the_weights_and_the_cache_of_llama_are_those_of_its_shape() -> None:
    work = count_work(preset("llama-3-8b"))
    d, ff, kv = 4096, 14336, 8 * 128
    assert work.block_weights == 32 * (d * (d + 2 * kv) + d * d + 3 * d * ff)
    assert work.head_weights == 128256 * d
    assert work.parameters == presets()["llama-3-8b"].parameters
    assert work.kv_numbers == 2 * 32 * kv
    assert work.pair_flops == 4 * 32 * d


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 4}, {"positions": "alibi"}, {"attention_softcap": 30.0}])
def test_the_cache_that_a_decode_step_is_counted_to_read_is_what_the_cache_holds(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    cache = ContiguousCache(config, capacity=100, dtype=torch.bfloat16)
    # One slot of each layer is for padding.
    assert count_work(config).kv_numbers * 2 == cache.nbytes / 101


def test_a_step_reads_the_experts_that_any_of_its_tokens_chose() -> None:
    work = count_work(EXPERTS)
    draw = np.random.default_rng(0)
    each = 3 * 64 * 48
    for tokens in (1, 3, 20):
        chosen = [len({int(expert) for _ in range(tokens) for expert in draw.permutation(8)[:2]}) for _ in range(4000)]
        others = work.block_weights - work.expert_weights
        assert work.weights_read(tokens) == pytest.approx(others + 4 * each * float(np.mean(chosen)), rel=0.01)
    assert work.expert_weights == 4 * 2 * each


def test_a_window_bounds_pairs_and_cache_as_counting_each_pair_does() -> None:
    config = dataclasses.replace(SMALL, attention_window=7, full_attention_every=2)
    work = count_work(config)
    for tokens in (1, 7, 8, 50):
        seen = [[min(at + 1, 7) if (block + 1) % 2 else at + 1 for at in range(tokens)] for block in range(5)]
        assert work.pairs(tokens) == pytest.approx(sum(map(sum, seen)) / 5)
        assert work.kept(tokens) == pytest.approx(sum(each[-1] for each in seen) / 5)
