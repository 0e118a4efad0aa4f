"""The rules of layers with a state are what is counted, what the allocator gives, and what the caches hold."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from napkin.accounting.counting import count
from napkin.accounting.rules import rules_table
from napkin.inference.paged_cache import PagedCache, state_bytes_per_sequence
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer
from napkin.planning.planner import resolve
from napkin.planning.rules import sizes_of
from napkin.planning.step.machine import ThisMachine
from napkin.recipe import Recipe, TrainingConfig
from napkin.train_step.step_ledger import count_step
from oracles.allocator import growth_at_peak

MAMBA = ModelConfig(
    vocab_size=128,
    d_model=128,
    n_layers=3,
    context_length=128,
    mixers="mamba2",
    feed_forward="none",
    positions="none",
    state_size=16,
    state_head_dim=32,
)
DELTA = replace(MAMBA, mixers="gated_delta,attention", feed_forward="swiglu", state_groups=2, n_layers=4)
HYBRID = replace(MAMBA, mixers="attention,mamba2*2", feed_forward="swiglu", state_groups=2)


@pytest.mark.parametrize("model", [MAMBA, HYBRID], ids=["mamba2", "hybrid"])
def test_flops_kept_bytes_and_states_by_rule_are_those_of_the_count(model: ModelConfig) -> None:
    recipe = Recipe(model=model, training=TrainingConfig(batch_size=2, device="cpu", precision="fp32"))
    resolved = resolve(recipe, ThisMachine(device="cpu"))
    rows = {row.quantity: row for row in rules_table(count_step(resolved), sizes_of(resolved.recipe))}
    assert rows["FLOPs, scans of states"].rule == rows["FLOPs, scans of states"].count
    assert rows["FLOPs, by layer"].error == pytest.approx(0, abs=0.01)
    assert rows["parameters, by layer"].error == pytest.approx(0, abs=0.01)
    kept = rows["activations per layer, states"]
    assert kept.rule == pytest.approx(kept.count, rel=0.01)
    assert ("KV cache of a sequence" in rows) == (model is HYBRID)

    states = rows["states of a sequence"].rule
    assert states == state_bytes_per_sequence(model, torch.bfloat16)
    small = replace(model, vocab_size=8)
    made = [PagedCache(small, 1, 4, dtype=torch.bfloat16, n_states=n).nbytes for n in (3, 5)]
    assert made[1] - made[0] == 2 * states
    if model is MAMBA:
        assert ContiguousCache(small, 2, dtype=torch.bfloat16).nbytes == 2 * states


def test_flops_and_parameters_of_a_delta_rule_are_those_of_the_count() -> None:
    recipe = Recipe(model=DELTA, training=TrainingConfig(batch_size=2, device="cpu", precision="fp32"))
    resolved = resolve(recipe, ThisMachine(device="cpu"))
    rows = {row.quantity: row for row in rules_table(count_step(resolved), sizes_of(resolved.recipe))}
    assert rows["FLOPs, scans of states"].rule == rows["FLOPs, scans of states"].count
    assert rows["FLOPs, by layer"].error == pytest.approx(0, abs=0.01)
    assert rows["parameters, by layer"].error == pytest.approx(0, abs=0.01)
    assert rows["states of a sequence"].rule == state_bytes_per_sequence(DELTA, torch.bfloat16)


@pytest.mark.parametrize("model", [MAMBA, HYBRID], ids=["mamba2", "hybrid"])
def test_the_peak_bytes_of_a_step_by_count_are_the_allocators(model: ModelConfig) -> None:
    built, tokens = Transformer(model), torch.zeros(2, 129, dtype=torch.int64)

    def step(module: torch.nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(module, Transformer)
        loss = module.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return loss

    built.zero_grad()
    step(built, tokens)
    built.zero_grad(set_to_none=False)
    ledger = count(built, tokens, step)
    before = sum(parameter.nbytes for parameter in built.parameters()) * 2 + tokens.nbytes
    grown, _ = growth_at_peak(lambda: step(built, tokens))
    assert ledger.peak_bytes - before == pytest.approx(grown, rel=0.02)
