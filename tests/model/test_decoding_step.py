"""The formulas of a block's decoding step give what the block gives, and blocks without such a step are told."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.inference.paged_cache import KVFormat, PagedCache
from napkin.model import kernel_forms
from napkin.model.config import ModelConfig
from napkin.model.decoding_step import DecodingStep
from napkin.model.quantized import Int8Linear, quantize_model
from napkin.model.transformer import Transformer
from oracles.model_switches import disturbed

# Wide enough that single tokens are compared with keys in their blocks on a CPU too.
CONFIG = ModelConfig(61, context_length=64, d_model=64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=64, d_ff=80)
TABLES, LENGTHS = [[2, 0], [1], [4, 3]], [13, 3, 9]


@torch.inference_mode()
def hidden_of(model: Transformer, kv: KVFormat) -> Tensor:
    cache = PagedCache(model.config, 5, 8, dtype=model.dtype, kv=kv)
    draw = torch.Generator().manual_seed(0)
    for table, length in zip(TABLES, LENGTHS, strict=True):
        tokens = torch.randint(61, (1, length), generator=draw)
        model.hidden(tokens, cache=cache.extend([table], [0], [length], length))
    return model.hidden(torch.tensor([[5], [6], [7]]), cache=cache.extend(TABLES, LENGTHS, [1] * 3, 1))


@pytest.mark.parametrize(
    ("changes", "kv", "bits"),
    [
        ({}, "auto", 32),
        ({"qk_norm": "head", "rope_pairing": "interleaved"}, "int8", 32),
        ({"norm": "layer", "biases": "all", "positions": "learned", "feed_forward": "gelu_tanh"}, "auto", 32),
        ({"block": "parallel", "feed_forward": "relu_squared", "mup_base_d_model": 16}, "auto", 32),
        ({"biases": "all", "feed_forward": "geglu"}, "auto", 8),
    ],
    ids=str,
)
def test_a_step_by_its_formulas_is_the_blocks(
    changes: dict[str, Any], kv: KVFormat, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = disturbed(dataclasses.replace(CONFIG, **changes)).eval()
    if bits == 8:
        quantize_model(model, "int8")
    expected = hidden_of(model, kv)
    monkeypatch.setattr(kernel_forms, "triton_obstacle", lambda _: None)
    monkeypatch.setattr("napkin.model.decoding_step.reads_vectors", lambda *_: True)
    called, step = [], DecodingStep.__call__
    monkeypatch.setattr(DecodingStep, "__call__", lambda *given: called.append(given) or step(*given))
    assert kernel_forms.use_decoding_kernels(model) is None
    found = hidden_of(model, kv)
    assert len(called) == CONFIG.n_layers
    bound = 5e-2 if bits == 8 else 2e-2 if kv == "int8" else 1e-4
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_blocks_without_a_step_are_told() -> None:
    for changes, reason in (
        ({}, None),
        ({"block": "post"}, "PostNormBlock"),
        ({"block": "sandwich"}, "SandwichBlock"),
        ({"norm": "none"}, "no norm"),
        ({"qk_norm": "all_heads"}, "normed together"),
        ({"n_experts": 4}, "MixtureOfExperts"),
    ):
        model = Transformer(dataclasses.replace(CONFIG, **changes))
        told = DecodingStep.obstacle(model.blocks[0])
        assert (told is None) == (reason is None)
        assert (reason or "") in (told or "")
    model = Transformer(CONFIG)
    matrix = Int8Linear(64, 80, {"values": torch.zeros(64, 80, dtype=torch.int8), "scales": torch.ones(64, 2)})
    model.blocks[0].get_submodule("feed_forward").down = matrix
    assert "another format" in str(DecodingStep.obstacle(model.blocks[0]))
    # Without Triton nothing changes.
    before = model.run_block
    assert kernel_forms.use_decoding_kernels(model) is not None
    assert model.run_block is before
