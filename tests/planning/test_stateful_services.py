"""Services of models whose layers carry states: their bytes as the engine allocates them, and what fits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import PagedCache
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.rules import state_bytes_by_rule
from napkin.planning.services.replica import count_work
from napkin.planning.services.service_planner import plan_service

HYBRID = ModelConfig(
    97, context_length=256, d_model=64, n_layers=6, n_heads=4, mixers="mamba2*2,attention", state_head_dim=16,
    state_size=16,
)  # fmt: skip
MAMBA = replace(HYBRID, mixers="mamba2", feed_forward="none", positions="none", n_layers=3)
DELTA = replace(HYBRID, mixers="gated_delta,attention", n_layers=4)
EACH = pytest.mark.parametrize("config", [HYBRID, MAMBA, DELTA], ids=["hybrid", "mamba", "delta"])


@pytest.mark.sampled(every=3)
@EACH
def test_work_is_that_of_the_whole_model(config: ModelConfig) -> None:
    work = count_work(config)
    model = Transformer(config)
    assert work.parameters == sum(each.numel() for each in model.parameters())
    # From two depths, as from the depth itself.
    deeper = count_work(replace(config, n_layers=2 * config.n_layers))
    assert deeper.block_weights == 2 * work.block_weights
    assert (deeper.state_flops, deeper.prompt_state_flops) == (2 * work.state_flops, 2 * work.prompt_state_flops)
    # A token reads out the sums of each head: 2 · n · w for each of them, and the delta rule reads them once before.
    stateful = config.n_layers - config.n_attention_layers
    reads = 2 if "gated_delta" in config.mixers else 1
    assert work.state_flops >= reads * stateful * 2 * config.resolved_state_heads * 16 * 16
    assert work.prompt_pair_flops == config.n_attention_layers * 4 * config.d_model * bool(config.n_attention_layers)


@EACH
def test_states_are_the_bytes_that_a_cache_has_for_each_sequence(config: ModelConfig) -> None:
    one, two = (PagedCache(config, 2, 16, dtype=torch.bfloat16, n_states=n).nbytes for n in (1, 2))
    assert count_work(config).state_bytes == two - one == state_bytes_by_rule(config)


@EACH
def test_an_engine_with_the_planned_bytes_allocates_them(config: ModelConfig) -> None:
    model = Transformer(config)
    plan = plan_service(model, None, concurrency=2, input_tokens=32, output_tokens=8, max_running=4)
    degree = plan.degrees[0]
    engine = Engine(model, max_running=4, cache_bytes=int(degree.kv_pool_bytes))
    padding = 16 * config.cached_numbers * 4
    room = 16 * config.cached_numbers * 4
    assert degree.kv_pool_bytes - room <= engine.cache.nbytes - padding <= degree.kv_pool_bytes
    assert degree.kv_bytes_per_sequence == 40 * config.cached_numbers * 4 + (
        PagedCache(config, 1, 16, n_states=2).nbytes - PagedCache(config, 1, 16, n_states=1).nbytes
    )
    with pytest.raises(NapkinError, match=r"states of max_running 4 sequences.*lower it"):
        plan_service(model, None, concurrency=2, input_tokens=32, output_tokens=8, max_running=4, cache_bytes=1000)


def test_what_fits_does_not_depend_on_the_length_where_all_layers_have_states() -> None:
    def degree(config: ModelConfig, input_tokens: int) -> Any:
        return plan_service(config, "H100", concurrency=4, input_tokens=input_tokens, output_tokens=16).degrees[0]

    short, long = degree(MAMBA, 32), degree(MAMBA, 200)
    assert short.sequences == long.sequences == short.kv_pool_bytes // count_work(MAMBA).state_bytes
    assert short.kv_bytes_per_sequence == count_work(MAMBA).state_bytes
    hybrids = degree(HYBRID, 32), degree(HYBRID, 200)
    assert hybrids[0].sequences > hybrids[1].sequences
    for each in hybrids:
        assert each.tensor == 1
        assert each.sequences == each.kv_pool_bytes // each.kv_bytes_per_sequence
    with pytest.raises(NapkinError, match="the state of a layer is not divided, use tensor 1"):
        plan_service(MAMBA, "2xH100", concurrency=4, input_tokens=32, output_tokens=16, tensor=2)
    # The sums are read and written for each sequence and token.
    more = hybrids[0].decode_bytes - count_work(HYBRID).weights_read(4) * 2 - 2 * count_work(HYBRID).head_weights
    assert more >= 2 * count_work(HYBRID).state_bytes * hybrids[0].times.running
