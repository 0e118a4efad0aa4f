"""The engine with layers that carry a state: equal to passes without a cache, whatever runs, waits or is preempted."""

from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import bytes_per_token, state_bytes_per_sequence
from napkin.inference.requests import Request
from napkin.inference.scoring import score
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "context_length": 160,
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 2,
    "state_size": 8,
}
MAMBA = ModelConfig(**SIZES, mixers="mamba2", feed_forward="none", state_head_dim=8, positions="none")
HYBRID = ModelConfig(**SIZES, mixers="mamba2*2,attention", state_head_dim=8, state_groups=2)
N_NEW = 6


def prompts() -> list[list[int]]:
    """Of several lengths; two are equal, and one is the beginning of another."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in (5, 20, 39, 17)]
    return [*drawn, drawn[1], drawn[2][:25]]


def greedy(model: Transformer, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(N_NEW):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", [MAMBA, HYBRID], ids=["mamba2", "hybrid"])
def test_completions_are_those_without_a_cache_also_after_preemption(config: ModelConfig) -> None:
    model = Transformer(config).eval()
    wanted = [greedy(model, prompt) for prompt in prompts()]
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"batch_invariant": True},
        {"prompts_together": True},
        {"max_running": 2, "prefill_chunk": 32},
    )
    preempted = 0
    for how in ways:
        states = how.get("max_running", 16) * state_bytes_per_sequence(config, torch.float32)
        # Blocks for 5 · 16 tokens: fewer than the prompts have.
        blocks = 5 * 16 * bytes_per_token(config, torch.float32)
        engine = Engine(model, cache_bytes=states + blocks, **how)
        completions = [engine.submit(Request(prompt, N_NEW, Sampling(temperature=0))) for prompt in prompts()]
        engine.run()
        assert [each.tokens for each in completions] == wanted
        stats = engine.stats()
        preempted += stats.preempted
        # Nothing is shared with another sequence but equal prompts that are computed together.
        assert stats.cached_tokens == (20 if "prompts_together" in how else 0)
    assert (preempted > 0) == (config is HYBRID)


def test_a_step_that_raised_is_computed_again_from_the_states_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(HYBRID).eval()
    engine, (first, *_) = Engine(model), prompts()
    completion = engine.submit(Request(first, N_NEW, Sampling(temperature=0)))
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(model, "logits_of", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.run()
    assert completion.tokens == greedy(model, first)


def test_slots_are_free_again_when_requests_end_or_fail() -> None:
    model = Transformer(MAMBA).eval()
    engine = Engine(model, max_running=2)
    for _ in range(2):
        waiting = [engine.submit(Request(prompt, N_NEW, Sampling(temperature=0))) for prompt in prompts()]
        engine.step()
        engine.cancel(waiting[0])
        engine.step()
        engine.fail_all(RuntimeError("the device is gone"))
        last = engine.submit(Request(prompts()[3], N_NEW, Sampling(temperature=0)))
        engine.run()
        assert last.tokens == greedy(model, prompts()[3])


def test_the_bytes_of_states_are_those_of_the_closed_form_and_of_the_tensors() -> None:
    # Per layer 3 inputs of 64 + 2 · 2 · 8 channels, and 8 heads of 8 · 8 numbers, in fp32.
    assert state_bytes_per_sequence(HYBRID, torch.float32) == 2 * (3 * 96 * 4 + 8 * 8 * 8 * 4)
    engine = Engine(Transformer(HYBRID), max_running=5)
    # One block more takes what padding writes.
    blocks = (engine.pool.n_blocks + 1) * 16 * bytes_per_token(HYBRID, torch.float32)
    assert engine.stats().cache_bytes == blocks + 5 * state_bytes_per_sequence(HYBRID, torch.float32)
    with pytest.raises(NapkinError, match="max_running"):
        Engine(Transformer(HYBRID), max_running=5, cache_bytes=1000)


def test_scores_of_continuations_are_those_of_whole_passes() -> None:
    model = Transformer(HYBRID).eval()
    pairs = [(prompt[:-4], prompt[-4:]) for prompt in prompts()]
    for (context, continuation), found in zip(pairs, score(model, pairs, chunk_size=16), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation]]))[0, len(context) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(4), continuation]
        assert found.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
