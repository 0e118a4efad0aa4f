"""The ledger that is written to be read, beside the engine's: the same numbers."""

import doctest
from random import Random

import pytest
import torch

from napkin import count
from napkin.accounting import educational
from napkin.accounting.educational import educational_ledger
from napkin.accounting.recording import Recorder
from oracles.tiny_models import attention, deep_linear, encoder, language_model, linear_stack

MODELS = (linear_stack, deep_linear, attention, encoder, language_model)
OPTIMIZERS = (None, torch.optim.AdamW, torch.optim.SGD)


def test_its_examples_are_true():
    tried = doctest.testmod(educational)
    assert (tried.failed, tried.attempted > 8) == (0, True)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.torture)], ids=str)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_flops_and_peak_bytes_are_the_engines_on_random_models(make, seeds: range, monkeypatch: pytest.MonkeyPatch):
    # What kernels take while they run is the engine's alone.
    monkeypatch.setattr(Recorder, "_scratch", lambda *_: 0)
    for seed in seeds:
        torch.manual_seed(seed)
        module, batch = make(Random(seed))
        optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
        engine, by_hand = count(module, batch, optimizer=optimizer), educational_ledger(module, batch, optimizer)
        assert (by_hand.parameters, by_hand.flops) == (engine.parameters, engine.flops), seed
        assert by_hand.flops_of("forward") == engine.forward_flops, seed
        assert by_hand.peak_bytes == engine.peak_bytes, seed
        at_peak = {category: size for category, size in engine.peak_by_category.items() if size}
        assert {category: size for category, size in by_hand.peak_by_category.items() if size} == at_peak, seed


def test_seconds_are_those_of_the_binding_ceiling_of_each_operator():
    module = torch.nn.Linear(256, 256, bias=False)
    ledger = educational_ledger(module, torch.zeros(64, 256))
    # Products of forward and backward pass, by FLOPs; everything else moves bytes alone.
    products = [row for row in ledger.rows if row.flops]
    assert [row.flops for row in products] == 2 * [2 * 64 * 256 * 256]
    assert ledger.seconds(1.0, float("inf")) == ledger.flops
    moved = sum(row.bytes_read + row.bytes_written for row in ledger.rows)
    assert ledger.seconds(float("inf"), 1.0) == moved
    assert max(ledger.flops / 1e9, moved / 1e9) < ledger.seconds(1e9, 1e9) < (ledger.flops + moved) / 1e9
