import dataclasses

import pytest
import torch

from napkin.inference.generation import cache_for, generate, prefill
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer
from oracles.model_switches import config_of, disturbed, random_tokens

GRID = [
    {"positions": positions, "attention_window": window, "n_kv_heads": n_kv_heads, "block": block, **more}
    for positions, window, n_kv_heads, block, more in [
        ("rope", None, 4, "pre", {}),
        ("rope", 5, 2, "sandwich", {"attention_softcap": 2.0, "qk_norm": "head"}),
        ("rope", 5, 1, "parallel", {"n_experts": 4}),
        ("learned", None, 2, "post", {"biases": "all", "norm": "layer"}),
        ("learned", 5, 4, "reordered", {"n_experts": 4, "n_shared_experts": 1, "attention": "plain"}),
        ("sinusoidal", None, 1, "pre", {"attention_softcap": 3.0}),
        ("sinusoidal", 5, 2, "post", {}),
        ("alibi", None, 2, "reordered", {"attention": "plain"}),
        ("alibi", 5, 4, "pre", {"qk_norm": "all_heads"}),
        ("none", None, 2, "sandwich", {"n_experts": 4}),
        ("none", 5, 1, "pre", {"attention_softcap": 2.0}),
        ("rope", 5, 2, "sandwich", {"full_attention_every": 2, "logit_softcap": 3.0}),
    ]
]


@pytest.fixture(params=GRID, ids=lambda switches: "-".join(map(str, switches.values())))
def model(request: pytest.FixtureRequest) -> Transformer:
    return disturbed(config_of("default", context_length=40, **request.param)).eval()


@torch.no_grad()
def recomputed(model: Transformer, prompt: list[int], n_tokens: int) -> list[int]:
    """Greedy, the whole sequence through the model for each token."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("chunk_size", [512, 4])
def test_ids_equal_those_of_the_recomputed_sequence(model: Transformer, chunk_size: int) -> None:
    prompt = random_tokens(model.config, 1, 11)[0].tolist()
    ids = list(generate(model, prompt, 25, Sampling(temperature=0), chunk_size=chunk_size))
    assert ids == recomputed(model, prompt, 25)


@pytest.mark.sampled(every=4)
def test_a_batch_of_prompts_of_unequal_lengths_gives_the_ids_of_each_alone(model: Transformer) -> None:
    rows = random_tokens(model.config, 3, 14).tolist()
    prompts = [rows[0], rows[1][:3], rows[2][:8]]
    cache = cache_for(model, 3, 40)
    ids = prefill(model, prompts, cache, chunk_size=5).argmax(dim=-1).tolist()
    made = [[token] for token in ids]
    for _ in range(15):
        ids = prefill(model, [[token] for token in ids], cache).argmax(dim=-1).tolist()
        for row, token in zip(made, ids, strict=True):
            row.append(token)
    assert made == [recomputed(model, prompt, 16) for prompt in prompts]


def test_a_sliding_window_keeps_no_more_than_the_window() -> None:
    def nbytes(context_length: int, window: int | None) -> int:
        config = ModelConfig(vocab_size=8, context_length=context_length, d_model=8, n_heads=2, attention_window=window)
        return ContiguousCache(config).nbytes

    assert nbytes(4096, 16) == nbytes(64, 16) == 2 * 4 * (16 + 1) * 8 * 4
    assert nbytes(64, None) == nbytes(64, 100) == 2 * 4 * (64 + 1) * 8 * 4


def test_logits_in_bf16_stay_within_its_resolution_of_fp32() -> None:
    model = Transformer(dataclasses.replace(config_of("grouped"), context_length=64)).eval()
    prompt = random_tokens(model.config, 1, 50)[0].tolist()
    exact = prefill(model, [prompt], cache_for(model, 1, 64))
    narrow = model.to(torch.bfloat16)
    cache = cache_for(narrow, 1, 64)
    assert {tensor.dtype for tensor in cache.keys} == {torch.bfloat16}
    close = prefill(narrow, [prompt], cache, chunk_size=7)
    assert (close - exact).norm() < 0.03 * exact.norm()
