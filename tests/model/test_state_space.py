"""Layers with a state in a model: Mamba-2's by its definition, hybrids with attention, packed documents, caches."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.config_checks import mixer_pattern
from napkin.model.kv_cache import ContiguousCache
from napkin.model.state_space import Mamba2
from napkin.model.transformer import Transformer
from napkin.optim.base import muon_groups

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "context_length": 160,
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 2,
    "state_size": 8,
}
MAMBA = ModelConfig(**SIZES, mixers="mamba2", feed_forward="none", state_head_dim=8, state_groups=2, positions="none")
HYBRID = ModelConfig(**SIZES, mixers="mamba2*2, attention", state_head_dim=8, attention_window=24)
DELTA = replace(HYBRID, mixers="attention,gated_delta", state_groups=4)
MODELS = {"mamba2": MAMBA, "hybrid": HYBRID, "gated_delta": DELTA}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def tokens(length: int = 150) -> Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(3))


def test_the_layer_is_mamba2s_definition_token_by_token() -> None:
    torch.manual_seed(0)
    layer = Mamba2(MAMBA).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(1, 11, 32, dtype=torch.float64)
    width, states = 64, 8
    rows = layer.input.weight.split((width, width, 2 * states, 2 * states, 8))
    gate, values, keys, queries, steps = (x[0] @ each.T for each in rows)
    inputs = torch.cat((values, keys, queries), dim=1)
    filters = layer.convolution.weight[:, 0]
    state, outputs = torch.zeros(8, 8, states, dtype=torch.float64), []
    for t in range(11):
        taps = sum(filters[:, 3 - back] * inputs[t - back] for back in range(min(4, t + 1)))
        assert isinstance(taps, Tensor)
        convolved = F.silu(taps + cast("Tensor", layer.convolution.bias))
        value, key, query = convolved.split((width, 2 * states, 2 * states))
        value, key, query = value.view(8, 8), key.view(2, states), query.view(2, states)
        y = torch.empty(8, 8, dtype=torch.float64)
        for head in range(8):
            step = F.softplus(steps[t, head] + layer.step_bias[head])
            decay = torch.exp(-step * layer.log_decay[head].exp())
            state[head] = decay * state[head] + step * torch.outer(value[head], key[head // 4])
            y[head] = state[head] @ query[head // 4] + layer.skip[head] * value[head]
        gated = y.flatten() * F.silu(gate[t])
        groups = gated.view(2, 32)
        normed = (groups * (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten() * layer.norm.gain
        outputs.append(layer.output.weight @ normed)
    torch.testing.assert_close(layer(x)[0], torch.stack(outputs), rtol=1e-5, atol=1e-6)


@each_model
def test_tokens_through_a_cache_are_computed_as_in_one_pass(config: ModelConfig) -> None:
    model, ids = Transformer(config).eval(), tokens()
    with torch.no_grad():
        whole = model.hidden(ids)
        cache = ContiguousCache(config, 2)
        # The second sequence ends after 67 tokens, then goes on with others; the first waits meanwhile.
        parts = [model.hidden(ids[:, a:b], cache=cache.extend(b - a)) for a, b in ((0, 65), (65, 66), (66, 67))]
        padded = torch.cat((ids[:1, 67:77], torch.zeros(1, 10, dtype=torch.int64)))
        first = model.hidden(padded, cache=cache.extend(10, [10, 0]))
        both = model.hidden(torch.stack((ids[0, 77:80], ids[1, 67:70])), cache=cache.extend(3))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, :67], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first[0], whole[0, 67:77], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both, torch.stack((whole[0, 77:80], whole[1, 67:70])), rtol=1e-4, atol=1e-5)


@each_model
def test_packed_documents_do_not_see_each_other(config: ModelConfig) -> None:
    model, ids = Transformer(config).eval(), tokens()
    documents = torch.tensor([[0] * 40 + [1] * 110, [0] * 64 + [1] + [2] * 85])
    with torch.no_grad():
        packed = model.hidden(ids, documents)
        alone = model.hidden(ids[:1, 40:]), model.hidden(ids[1:, 65:])
        cache = ContiguousCache(config, 2)
        cuts = ((0, 38), (38, 41), (41, 42), (42, 66), (66, 150))
        cached = [model.hidden(ids[:, a:b], cache=cache.extend(b - a, documents=documents[:, a:b])) for a, b in cuts]
    torch.testing.assert_close(packed[:1, 40:], alone[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1:, 65:], alone[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(cached, dim=1), packed, rtol=1e-4, atol=1e-5)


def test_a_cache_with_states_forgets_all_tokens_or_none() -> None:
    model, cache = Transformer(HYBRID).eval(), ContiguousCache(HYBRID)
    with torch.no_grad():
        model.hidden(tokens()[:1, :30], cache=cache.extend(30))
        cache.truncate(30)
        assert cache.lengths == [30]
        cache.truncate(20)
        assert cache.lengths == [0]
        again = model.hidden(tokens()[:1, :20], cache=cache.extend(20))
        torch.testing.assert_close(again, model.hidden(tokens()[:1, :20]), rtol=1e-4, atol=1e-5)
    with pytest.raises(NapkinError, match="mamba2"):
        cache.branch(torch.tensor([20]), torch.ones(1, 1, dtype=torch.bool))


def test_muon_leaves_the_filters_of_convolutions_to_adamw() -> None:
    model = Transformer(MAMBA)
    matrices = muon_groups(model, 0.1)[0]["params"]
    assert len(matrices) == 2 * MAMBA.n_layers
    assert all(each.shape[-2] > 1 for each in matrices)


def test_a_pattern_of_mixers_is_repeated_over_the_layers() -> None:
    assert replace(HYBRID, n_layers=5).layer_mixers == ["mamba2", "mamba2", "attention", "mamba2", "mamba2"]
    assert mixer_pattern("attention") == ("attention",)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mixers": "mamba"}, "'mamba'"),
        ({"mixers": "mamba2*0"}, "mamba2*0"),
        ({"mixers": "mamba2,gated_delta"}, "gated_delta"),
        ({"mixers": "mamba2,"}, "''"),
        ({"block": "post"}, "'post'"),
        ({"norm": "none"}, "'none'"),
        ({"mup_base_d_model": 16}, "mup_base_d_model"),
        ({"state_head_dim": 7}, "7"),
        ({"state_groups": 3}, "3"),
        ({"feed_forward": "none"}, "mamba2*2, attention"),
        ({"mixers": "mamba2", "feed_forward": "none", "d_ff": 64}, "d_ff"),
    ],
)
def test_what_does_not_fit_a_state_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(NapkinError) as caught:
        replace(HYBRID, **changes)
    assert named in str(caught.value)
