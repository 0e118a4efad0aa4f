"""Keys and values in int8: what they take, how far they are off, and that answers do not depend on what else runs."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.inference.engine import Engine
from napkin.inference.paged_cache import Blocks, PagedCache, bytes_per_token
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import ContiguousCache, ExtendingPass
from napkin.model.transformer import Transformer
from napkin.planning import plan_service
from oracles.model_switches import disturbed

CONFIG = ModelConfig(61, context_length=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)


def rounded(numbers: Tensor) -> Tensor:
    """By the formula, in NumPy: each vector is a whole number times the largest of them / 127, which is a bf16."""
    vectors = numbers.double().numpy()
    scale = torch.from_numpy(np.abs(vectors).max(-1, keepdims=True) / 127).float().bfloat16().double().numpy()
    whole = np.clip(np.rint(np.divide(vectors, scale, where=scale > 0, out=np.zeros_like(vectors))), -127, 127)
    return torch.from_numpy(whole * scale).to(numbers.dtype)


class RoundedPass(ExtendingPass):
    """A pass over another cache, which keeps what is rounded."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().update(layer, rounded(keys), rounded(values))


def test_a_number_is_off_by_half_a_scale_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(3, 2, 5, 8, generator=generator) * 10.0 ** torch.arange(-6, 9, 3)[:, None]
    new[0, 0, 0] = 0
    held = Blocks((7, 2, 4, 8), torch.float32, torch.device("cpu"), "int8")
    table = torch.tensor([[5, 1], [0, 2], [4, 3]])
    positions = torch.arange(5).expand(3, -1)
    held.put(table.gather(1, positions // 4), positions % 4, new)
    seen = held.seen(table, 5)
    torch.testing.assert_close(seen, rounded(new), rtol=0, atol=0)
    # A scale in bf16 may be a 256th larger than the largest number / 127.
    bound = new.abs().amax(-1, keepdim=True) / 127 / 2 * (1 + 2**-8)
    assert (seen - new).abs().le(bound).all()


@pytest.mark.parametrize("changes", [{}, {"attention_window": 5}, {"positions": "alibi", "n_kv_heads": 1}], ids=str)
def test_scores_are_those_of_a_model_whose_keys_and_values_are_rounded(changes: dict[str, object]) -> None:
    model = disturbed(dataclasses.replace(CONFIG, **changes)).eval()  # pyright: ignore[reportArgumentType]
    draw = random.Random(0)
    prompt = [draw.randrange(61) for _ in range(50)]
    engine = Engine(model, prefill_chunk=16, block_size=8, kv="int8")
    completion = engine.submit(Request(prompt, 0, Sampling(temperature=0), prompt_logprobs=True))
    engine.run()
    found = [each.logprob for each in completion.prompt_draws if each is not None]

    cache = ContiguousCache(model.config, capacity=50)
    extending = cache.extend(50)
    extending.__class__ = RoundedPass
    with torch.inference_mode():
        logprobs = model.logits_of(model.hidden(torch.tensor([prompt]), cache=extending))[0].log_softmax(-1)
        plain = model(torch.tensor([prompt]))[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
    # Rounding shows, and costs little.
    cost = plain[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0] - expected
    assert 1e-5 < cost.abs().mean() < 0.05


def test_each_layer_reads_blocks_with_its_own_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wide enough that a single token reads the blocks where they are.
    model = Transformer(dataclasses.replace(CONFIG, d_model=256, n_kv_heads=4, n_layers=3), seed=1).eval()
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.get_submodule("attention.query_key_value").get_parameter("weight").mul_(1 + 2 * layer)
    tokens = torch.randint(61, (1, 20), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def last_hidden() -> Tensor:
        cache = PagedCache(model.config, 8, 8, kv="int8")
        model.hidden(tokens[:, :19], cache=cache.extend([[0, 1, 2]], [0], [19], 19))
        return model.hidden(tokens[:, 19:], cache=cache.extend([[0, 1, 2]], [19], [1], 1))

    in_blocks = last_hidden()
    monkeypatch.setattr("napkin.inference.paged_cache.reads_slots", lambda *_: False)
    torch.testing.assert_close(in_blocks, last_hidden(), rtol=1e-4, atol=1e-4)


def test_ids_are_those_of_each_request_alone_in_a_pool_far_too_small() -> None:
    model = Transformer(CONFIG, seed=1).eval()
    with torch.no_grad():
        model.head_weight.mul_(20)
    draw = random.Random(1)
    asked = [
        Request([draw.randrange(61) for _ in range(draw.randint(1, 40))], draw.randint(1, 20), Sampling(seed=number))
        for number in range(10)
    ]
    block = 8 * bytes_per_token(CONFIG, torch.float32, "int8")
    small = Engine(model, max_running=6, prefill_chunk=8, block_size=8, cache_bytes=10 * block, kv="int8")
    assert small.pool.n_blocks == 10
    # One block more takes padding.
    assert small.cache.nbytes == 11 * block
    completions = [small.submit(request) for request in asked]
    small.run()
    assert small.stats().preempted > 0
    assert small.pool.n_free == small.pool.n_blocks
    for request, completion in zip(asked, completions, strict=True):
        alone = Engine(model, max_running=1, kv="int8")
        expected = alone.submit(request)
        alone.run()
        assert completion.tokens == expected.tokens


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_what_was_drawn_has_the_scores_that_it_has_as_a_prompt(n_kv_heads: int) -> None:
    """One token at a time is compared with keys where they are kept, a prompt with a copy in fp32."""
    config = dataclasses.replace(CONFIG, d_model=512, n_heads=4, n_kv_heads=n_kv_heads)
    model = Transformer(config, seed=1).eval()
    with torch.no_grad():
        model.head_weight.mul_(5)
    engine = Engine(model, block_size=8, kv="int8")
    prompt = list(range(20))
    drawn = engine.submit(Request(prompt, 30, Sampling(seed=1, logprobs=1)))
    engine.run()
    scored = engine.submit(Request([*prompt, *drawn.tokens], 0, Sampling(logprobs=1), prompt_logprobs=True))
    engine.run()
    found = torch.tensor([each.logprob for each in drawn.draws])
    expected = torch.tensor([each.logprob for each in scored.prompt_draws[len(prompt) :] if each is not None])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_bytes_are_about_half_of_those_in_bf16_and_the_plan_has_them() -> None:
    config = ModelConfig(61, context_length=64, d_model=128, n_layers=2, n_heads=2)
    of = {kv: bytes_per_token(config, torch.bfloat16, kv) for kv in ("auto", "int8")}
    assert of == {"auto": 2 * 2 * 2 * 64 * 2, "int8": 2 * 2 * 2 * (64 + 2)}
    plan = plan_service(
        config, cache_bytes=4 * 32 * of["int8"], kv="int8", concurrency=2, input_tokens=16, output_tokens=8
    )
    (here,) = plan.degrees
    assert here.kv_bytes_per_sequence == 24 * of["int8"]
    assert here.times is not None
    assert here.times.running == 2
