"""Multi-head latent attention: its cache, its forms, what is refused; beside NumPy: tests/model/test_switches.py."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.test_kv_blocks import rounded
from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import PagedCache, bytes_per_token
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.attention import ForwardContext
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import CachedPass, ContiguousCache, ExtendingPass
from napkin.model.latent_attention import LatentAttention
from napkin.planning.rules import cache_numbers_by_rule, parameters_by_rule
from napkin.planning.services.replica import count_parameters, count_work
from oracles.brute_force_flops import ScalarProducts
from oracles.model_switches import disturbed

CONFIG = ModelConfig(
    61,
    context_length=96,
    d_model=32,
    n_layers=2,
    n_heads=4,
    kv_lora_rank=20,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
# Wide enough for keys to be read from their slots by the compiled loop.
WIDE = dataclasses.replace(CONFIG, kv_lora_rank=256, q_lora_rank=None)


def test_a_cache_holds_the_latent_and_the_rotated_key_of_each_token_and_no_more() -> None:
    contiguous = ContiguousCache(CONFIG, capacity=10)
    # One slot of each layer is for padding.
    assert contiguous.nbytes == 2 * (20 + 4) * 4 * 11
    paged = PagedCache(CONFIG, 3, 8, dtype=torch.bfloat16)
    assert paged.nbytes == bytes_per_token(CONFIG, torch.bfloat16) * 8 * 4 == 2 * (20 + 4) * 2 * 8 * 4
    narrow = PagedCache(CONFIG, 3, 8, dtype=torch.bfloat16, kv="int8")
    # A byte for each number, and a scale of two bytes.
    assert narrow.nbytes == bytes_per_token(CONFIG, torch.bfloat16, "int8") * 8 * 4 == 2 * (20 + 4 + 2) * 8 * 4
    assert cache_numbers_by_rule(CONFIG, 10)[0] == 10 * count_work(CONFIG).kv_numbers == 2 * 24 * 10


class RoundedPass(ExtendingPass):
    """A pass whose latents are rounded as a cache in int8 rounds them."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().update(layer, rounded(keys), values)


@torch.no_grad()
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["narrow", "wide"])
def test_the_engine_scores_a_text_as_one_pass_over_the_latents(config: ModelConfig, kv: Any) -> None:
    model = disturbed(config).eval()
    draw = random.Random(0)
    prompt = [draw.randrange(61) for _ in range(50)]
    engine = Engine(model, prefill_chunk=16, block_size=8, kv=kv)
    completion = engine.submit(Request(prompt, 8, Sampling(temperature=0, logprobs=0), prompt_logprobs=True))
    engine.run()
    whole = torch.tensor([prompt + [each.token for each in completion.draws]])
    extending = ContiguousCache(config).extend(whole.shape[1])
    extending.__class__ = RoundedPass
    logits = model(whole) if kv == "auto" else model.logits_of(model.hidden(whole, cache=extending))
    expected = logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
    found = [each.logprob for each in (*completion.prompt_draws, *completion.draws) if each is not None]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_absorbed_form_mixes_what_the_expanded_one_does() -> None:
    torch.manual_seed(0)
    for attention in ("plain", "sdpa", "flash"):
        layer = disturbed(dataclasses.replace(CONFIG, attention=attention)).blocks[0].get_submodule("attention")
        assert isinstance(layer, LatentAttention)
        queries, held, mask = torch.randn(2, 5, 4, 12), torch.randn(2, 1, 7, 24), torch.zeros(5, 7)
        absorbed = layer._attend_absorbed(queries, held, mask)
        expanded = layer._attend_expanded(queries, held[:, 0, :, :20], held[:, 0, :, 20:], mask)
        torch.testing.assert_close(absorbed, expanded, rtol=1e-4, atol=1e-4)


class HeldLatents(CachedPass):
    """Stands in for a pass of which one layer's latents are held."""

    def __init__(self, held: Tensor) -> None:
        self.latents = held

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.latents, keys), dim=2), values


@pytest.mark.parametrize(("n_new", "n_held"), [(1, 0), (1, 40), (5, 40), (40, 0), (40, 56)])
def test_the_form_that_takes_fewer_products_is_computed(n_new: int, n_held: int) -> None:
    layer = disturbed(CONFIG).blocks[0].get_submodule("attention")
    assert isinstance(layer, LatentAttention)
    keys = n_new + n_held

    def products(absorbed: bool) -> int:
        """Of queries with keys, of what they mix, and of the matrix that makes keys and values."""
        if absorbed:
            return n_new * 4 * (8 + 6) * 20 + 4 * n_new * keys * (24 + 20)
        return keys * 4 * (8 + 6) * 20 + 4 * n_new * keys * (12 + 6)

    fixed = n_new * (32 * (16 + 24) + 16 * 48 + 24 * 32)
    x, held, mask = torch.randn(1, n_new, 32), torch.randn(1, 1, n_held, 24), torch.zeros(n_new, keys)
    rotation = (torch.ones(n_new, 4), torch.zeros(n_new, 4))
    with torch.no_grad(), ScalarProducts() as counted:
        layer(x, ForwardContext(rotation, mask, HeldLatents(held)))
    fewer = min(products(False), products(True)) if n_new > 1 else products(True)
    assert counted.flops == 2 * (fixed + fewer)


@pytest.mark.parametrize("q_lora_rank", [None, 16])
def test_the_parameters_by_rule_are_all_but_the_norms(q_lora_rank: int | None) -> None:
    config = dataclasses.replace(CONFIG, q_lora_rank=q_lora_rank)
    norms = 2 * (32 + 32 + 20 + (q_lora_rank or 0)) + 32
    assert parameters_by_rule(config) + norms == count_parameters(config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_lora_rank": None}, "q_lora_rank is 16 and there is no latent attention: set kv_lora_rank too"),
        ({"head_dim": 8}, "head_dim is 8 and kv_lora_rank is 20.*leave head_dim out"),
        ({"n_kv_heads": 2}, "n_kv_heads is 2 and kv_lora_rank is 20"),
        ({"qk_norm": "head"}, "qk_norm is 'head'"),
        ({"biases": "qkv"}, "biases is 'qkv'"),
        ({"mup_base_d_model": 8}, "mup_base_d_model is 8"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3, rotary positions need an even number: use 4"),
        ({"qk_nope_head_dim": None, "n_heads": 5}, "or set qk_nope_head_dim"),
    ],
)
def test_what_does_not_go_with_latents_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(NapkinError, match=told):
        dataclasses.replace(CONFIG, **changes)


def test_the_widths_that_are_left_out_are_in_deepseeks_proportions() -> None:
    config = ModelConfig(d_model=256, n_heads=2, kv_lora_rank=512)
    assert (config.resolved_qk_nope_head_dim, config.resolved_qk_rope_head_dim, config.resolved_v_head_dim) == (
        128,
        64,
        128,
    )
    assert config.resolved_head_dim == 192
