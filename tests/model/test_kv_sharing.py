"""Layers that share keys and values: as a plain twin computes them, trained, cached, counted, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.accounting.metering import meter_step
from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import KVFormat, PagedCache, bytes_per_token
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.gguf import save_gguf
from napkin.model.huggingface import save_huggingface
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer
from napkin.planning.rules import cache_numbers_by_rule, parameters_by_rule
from napkin.planning.services.replica import count_work
from napkin.recipe.layout import Layout, refuse_impossible_layout
from napkin.recipe.recipe import Recipe
from napkin.train_step.compile import recompute_blocks
from oracles.cross_layer_attention import loss_of

CONFIG = ModelConfig(
    61, context_length=24, d_model=32, n_layers=5, n_heads=4, n_kv_heads=2, d_ff=40, kv_sharing=2, attention="plain"
)


def made(config: ModelConfig = CONFIG) -> Transformer:
    return Transformer(config, seed=3)


def batch(config: ModelConfig = CONFIG) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize("sharing", [1, 2, 3, 5])
def test_loss_and_gradients_are_those_of_a_plain_twin(sharing: int) -> None:
    config = replace(CONFIG, kv_sharing=sharing)
    model = made(config)
    twins = {name: each.detach().double().requires_grad_() for name, each in model.named_parameters()}
    loss, expected = model.loss(*batch()), loss_of(twins, *batch(), config)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, twins[name].grad, rtol=1e-4, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2])
def test_what_is_computed_again_changes_no_bit(kind: Any, every: int) -> None:
    plain, again = made(), made()
    recompute_blocks(again, kind, every=every)
    for model in (plain, again):
        model.loss(*batch()).backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_caches_hold_the_keys_and_values_of_a_group_once() -> None:
    numbers = 3 * 2 * 2 * 8  # Of five layers three make keys and values, of two heads of eight.
    assert cache_numbers_by_rule(CONFIG, 1)[0] == CONFIG.cached_numbers == count_work(CONFIG).kv_numbers == numbers
    # One slot of each layer is for padding.
    assert ContiguousCache(CONFIG, capacity=10).nbytes == numbers * 4 * 11
    expected: dict[KVFormat, int] = {"auto": 2 * numbers, "int8": numbers + 3 * 2 * 2 * 2}
    for kv, bytes_of_token in expected.items():
        paged = PagedCache(CONFIG, 3, 8, dtype=torch.bfloat16, kv=kv)
        assert paged.nbytes == bytes_per_token(CONFIG, torch.bfloat16, kv) * 8 * 4 == bytes_of_token * 8 * 4


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{}, {"attention_window": 5}, {"head_dim": 32, "n_kv_heads": 4}], ids=["narrow", "window", "wide"]
)
def test_the_engine_writes_what_one_pass_over_the_text_would(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    model = made(config).eval()
    engine = Engine(model, prefill_chunk=4, block_size=4)
    prompts = [[5, 7, 11, 13, 17, 19, 23], [2, 3], [41, 2, 41, 2, 41]]
    completions = [engine.submit(Request(prompt, 9, Sampling(temperature=0))) for prompt in prompts]
    engine.run()
    for prompt, completion in zip(prompts, completions, strict=True):
        text = list(prompt)
        for _ in range(9):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert list(completion.tokens) == text[len(prompt) :]


def test_parameters_and_flops_are_counted_to_the_unit() -> None:
    model = made()
    parameters = sum(each.numel() for each in model.parameters())
    norms = (2 * CONFIG.n_layers + 1) * CONFIG.d_model
    assert parameters - norms == parameters_by_rule(CONFIG)
    whole = sum(each.numel() for each in made(replace(CONFIG, kv_sharing=1)).parameters())
    assert whole - parameters == 2 * 2 * 32 * 2 * 8  # two layers without keys and values
    measured = meter_step(model, lambda: model.loss(*batch()).backward())
    tokens, weights = 24, parameters - norms
    of_pairs = 3 * 2 * 2 * CONFIG.n_layers * 2 * 12 * 12 * CONFIG.d_model
    assert measured.ledger.flops == 6 * weights * tokens + of_pairs
    work = count_work(CONFIG)
    assert work.parameters == parameters
    assert work.kv_reads == 5 / 3
    assert work.block_weights == weights - 61 * 32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_kv_heads": None, "kv_lora_rank": 16}, "kv_lora_rank is 16 and kv_sharing is 2"),
        ({"mixers": "attention,mamba2", "state_head_dim": 8}, "mixers is 'attention,mamba2' and kv_sharing is 2"),
        ({"attention_window": 4, "full_attention_every": 2}, "full_attention_every is 2 and kv_sharing is 2"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NapkinError, match=said):
        replace(CONFIG, **changes)


@pytest.mark.parametrize("name", ["tensor", "context", "pipeline"])
def test_layouts_that_would_part_keys_from_their_readers_are_refused(name: str) -> None:
    with pytest.raises(NapkinError, match=f"parallelism.{name} is 2 and model.kv_sharing is 2.*use parallelism.shard"):
        refuse_impossible_layout(Recipe(model=CONFIG), replace(Layout(), **{name: 2}))


def test_files_of_other_libraries_that_have_no_such_layers_are_refused(tmp_path: Path) -> None:
    for save in (save_huggingface, save_gguf):
        with pytest.raises(NapkinError, match="kv_sharing"):
            save(made(replace(CONFIG, tie_embeddings=False)), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_model_that_begins_behind_the_keys_says_so() -> None:
    model = made()
    tokens, _ = batch()
    with pytest.raises(NapkinError, match="begins with the first of the layers"):
        model.through(model.blocks[1:], model.embed(tokens), tokens)
