"""Pruning beside masks of one unit at a time, finite differences, and models with parts that contribute nothing."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.attention import CausalSelfAttention
from napkin.model.config import ModelConfig
from napkin.model.huggingface import load_huggingface, save_huggingface
from napkin.model.layers import Linear
from napkin.model.pruning import (
    Kept,
    Measure,
    PrunedSizes,
    drawn_parts,
    measure_importance,
    most_important,
    prune,
    pruned_config,
    remove_parts,
)
from napkin.model.transformer import Transformer
from oracles.model_switches import BASE, config_of, disturbed, random_tokens
from peers import peer

GROUPED = dataclasses.replace(BASE, n_layers=3, n_kv_heads=2, head_dim=10, d_ff=12)
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "untied": {"tie_embeddings": False},
    "multi-head": {"n_kv_heads": None, "head_dim": None},
    "gelu": {"feed_forward": "gelu", "biases": "all", "norm": "layer", "positions": "learned"},
    "qkv biases": {"biases": "qkv", "qk_norm": "head"},
    "sandwich": {"block": "sandwich"},
    "parallel": {"block": "parallel"},
    "post": {"block": "post"},
    "window": {"attention_window": 4},
    "shared keys": {"kv_sharing": 2},
    "mup": {"mup_base_d_model": 8, "rope_pairing": "interleaved"},
}


def batches(config: ModelConfig, n: int = 3) -> list[Tensor]:
    return [random_tokens(config, batch_size=2, length=9, seed=seed) for seed in range(n)]


def outputs(block: nn.Module) -> dict[str, Linear]:
    attention, feed_forward = cast(Any, block).attention, cast(Any, block).feed_forward
    return {"kv_heads": attention.output, "hidden_units": feed_forward.down}


@torch.no_grad()
def useless(model: Transformer, layer: int, kind: str, unit: int, width: int) -> None:
    """Let one unit of a layer write nothing."""
    outputs(model.blocks[layer])[kind].weight[:, unit * width : (unit + 1) * width] = 0


@pytest.mark.parametrize("shape", SHAPES)
def test_units_that_write_nothing_are_removed_without_a_trace(shape: str) -> None:
    config = dataclasses.replace(GROUPED, **SHAPES[shape])
    model = disturbed(config).eval()
    group = config.n_heads // config.resolved_n_kv_heads * config.resolved_head_dim
    for layer in range(config.n_layers):
        useless(model, layer, "kv_heads", layer % config.resolved_n_kv_heads, group)
        for unit in (layer, 7):
            useless(model, layer, "hidden_units", unit, 1)
    # Where layers share keys, heads stay.
    n_kv_heads = config.resolved_n_kv_heads - (config.kv_sharing == 1)
    smaller = prune(model, batches(config), PrunedSizes(n_kv_heads=n_kv_heads, d_ff=10))
    assert smaller.config.n_heads == n_kv_heads * (config.n_heads // config.resolved_n_kv_heads)
    assert smaller.config.resolved_head_dim == config.resolved_head_dim
    tokens = random_tokens(config, length=16, seed=9)
    with torch.no_grad():
        expected, found = model(tokens), smaller(tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@torch.no_grad()
def empty_channels(model: Transformer, channels: list[int]) -> None:
    """Let nothing be written into some channels of the residual stream."""
    model.embedding.weight[:, channels] = 0
    for name, parameter in model.named_parameters():
        if name == "positions.weight":
            parameter[:, channels] = 0
        if name.rpartition(".")[0].endswith(("attention.output", "feed_forward.down")):
            parameter[channels] = 0


WIDTHS: dict[str, dict[str, Any]] = {
    **{name: shape for name, shape in SHAPES.items() if name != "mup"},
    "gelu": SHAPES["gelu"] | {"norm": "rms"},
    "reordered": {"block": "reordered"},
    "large epsilon": {"norm_eps": 0.3},
    "no norms": {"norm": "none"},
}


@pytest.mark.parametrize("by", ["activation", "taylor"])
@pytest.mark.parametrize("shape", WIDTHS)
def test_channels_that_are_zero_are_removed_without_a_trace(shape: str, by: Measure) -> None:
    config = dataclasses.replace(GROUPED, **WIDTHS[shape])
    model = disturbed(config).eval()
    empty = [0, 5, 6, 23]
    empty_channels(model, empty)
    given = batches(config)
    sizes = PrunedSizes(d_model=config.d_model - len(empty))
    kept = most_important(measure_importance(model, given, by), config, sizes)
    assert kept.channels == tuple(n for n in range(config.d_model) if n not in empty)
    smaller = remove_parts(model, kept)
    assert (smaller.config.d_model, smaller.config.resolved_d_ff) == (20, config.resolved_d_ff)
    assert smaller.config.resolved_head_dim == config.resolved_head_dim
    tokens = random_tokens(config, length=16, seed=9)
    with torch.no_grad():
        expected, found = model(tokens), smaller(tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_all_kinds_of_parts_are_removed_together() -> None:
    model = disturbed(GROUPED).eval()
    empty_channels(model, [1, 2])
    for layer in range(3):
        useless(model, layer, "kv_heads", 1, 20)
        useless(model, layer, "hidden_units", layer, 1)
    with torch.no_grad():
        for linear in outputs(model.blocks[1]).values():
            linear.weight.zero_()
    smaller = prune(model, batches(GROUPED), PrunedSizes(n_layers=2, n_kv_heads=1, d_ff=11, d_model=22))
    tokens = random_tokens(GROUPED, length=16)
    with torch.no_grad():
        expected, found = model(tokens), smaller(tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_importance_of_a_channel_is_the_mean_of_what_the_layers_and_the_head_read() -> None:
    config = dataclasses.replace(GROUPED, block="parallel")
    model, given = disturbed(config).eval(), batches(config)
    read: list[Tensor] = []
    with torch.no_grad():
        for tokens in given:
            stream = model.embed(tokens)
            for block in model.blocks:
                # One norm for both layers.
                read += 2 * [cast(Any, block).norm(stream)]
                stream = model.through([block], stream, tokens)
            read.append(cast(Any, model.norm)(stream))
    expected = torch.cat(read).abs().flatten(0, 1).mean(0)
    assert measure_importance(model, given).channels.tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_taylor_scores_of_channels_are_squared_slopes_by_differences() -> None:
    config = dataclasses.replace(GROUPED, tie_embeddings=False)
    model = disturbed(config).double().eval()
    given = [random_tokens(config, batch_size=2, length=9, seed=seed) for seed in range(2)]
    found = measure_importance(model, given, "taylor").channels
    sequences = torch.cat(given)
    names = ("query_key_value.weight", "gate_up.weight", "head.weight")
    readers = [parameter.data for name, parameter in model.named_parameters() if name.endswith(names)]
    assert len(readers) == 2 * config.n_layers + 1

    def losses() -> Tensor:
        with torch.no_grad():
            return torch.stack([model.loss(each[None, :-1], each[None, 1:]) for each in sequences])

    step = 1e-4
    for channel in (0, 7, 23):
        for each in readers:
            each[:, channel] *= 1 + step
        above = losses()
        for each in readers:
            each[:, channel] *= (1 - step) / (1 + step)
        slopes = (above - losses()) / (2 * step)
        for each in readers:
            each[:, channel] /= 1 - step
        assert found[channel].item() == pytest.approx(slopes.square().mean().item(), rel=2e-3)


def test_one_of_two_equal_heads_goes_where_the_other_writes_for_both() -> None:
    model = disturbed(GROUPED).eval()
    attention = cast(CausalSelfAttention, cast(Any, model.blocks[1]).attention)
    with torch.no_grad():
        queries, keys, values = attention.query_key_value.weight.split((40, 20, 20))
        for rows in (queries, keys, values):
            rows[: len(rows) // 2] = rows[len(rows) // 2 :]
        output = attention.output.weight
        output[:, :20] += output[:, 20:]
        output[:, 20:] = 0
    kept = Kept((0, 1, 2), {0: (0, 1), 1: (0,), 2: (0, 1)}, {})
    # Only layer 1 loses a head here: the others are given one that writes nothing.
    for layer in (0, 2):
        useless(model, layer, "kv_heads", 1, 20)
        kept.kv_heads[layer] = (0,)
    smaller = prune(model, batches(GROUPED), PrunedSizes(n_kv_heads=1))
    expected = remove_parts(model, kept)
    assert all(torch.equal(a, b) for a, b in zip(smaller.parameters(), expected.parameters(), strict=True))
    tokens = random_tokens(GROUPED, length=16)
    with torch.no_grad():
        assert (smaller(tokens) - model(tokens)).abs().max() < 2e-4


@pytest.mark.parametrize("shape", ["default", "gelu", "sandwich", "mup"])
def test_importance_is_the_length_of_what_a_masked_unit_takes_from_its_layer(shape: str) -> None:
    config = dataclasses.replace(GROUPED, **SHAPES[shape])
    model = disturbed(config).eval()
    given = batches(config)
    importance = measure_importance(model, given)
    for layer in range(config.n_layers):
        for kind, linear in outputs(model.blocks[layer]).items():
            found = getattr(importance, kind)[layer]
            read: list[Tensor] = []

            def record(layer: nn.Module, inputs: tuple[Tensor, ...], read: list[Tensor] = read) -> None:
                read.append(inputs[0])

            hook = linear.register_forward_pre_hook(record)
            with torch.no_grad():
                for tokens in given:
                    model(tokens)
                hook.remove()
                width = linear.weight.shape[1] // len(found)
                for unit, score in enumerate(found.tolist()):
                    lengths = []
                    for x in read:
                        masked = x.clone()
                        masked[..., unit * width : (unit + 1) * width] = 0
                        lengths.append((linear(x) - linear(masked)).norm(dim=-1))
                    assert score == pytest.approx(torch.cat(lengths).mean().item(), rel=1e-3)


def test_taylor_scores_are_squared_slopes_of_the_loss_by_differences() -> None:
    model = disturbed(GROUPED).double().eval()
    given = [random_tokens(GROUPED, batch_size=2, length=9, seed=seed) for seed in range(2)]
    importance = measure_importance(model, given, "taylor")
    sequences = torch.cat(given)

    def losses() -> Tensor:
        with torch.no_grad():
            return torch.stack([model.loss(each[None, :-1], each[None, 1:]) for each in sequences])

    step = 1e-3
    for layer, kind, unit, width in ((0, "kv_heads", 1, 20), (2, "kv_heads", 0, 20), (1, "hidden_units", 5, 1)):
        weight = outputs(model.blocks[layer])[kind].weight.data[:, unit * width : (unit + 1) * width]
        original = weight.clone()
        weight.copy_(original * (1 + step))
        above = losses()
        weight.copy_(original * (1 - step))
        slopes = (above - losses()) / (2 * step)
        weight.copy_(original)
        found = getattr(importance, kind)[layer][unit].item()
        assert found == pytest.approx(slopes.square().mean().item(), rel=2e-3)


def test_influence_of_a_layer_is_how_far_it_turns_the_stream() -> None:
    model = disturbed(GROUPED).eval()
    given = batches(GROUPED)
    found = measure_importance(model, given).layers
    turned = torch.zeros(3, 0)
    with torch.no_grad():
        for tokens in given:
            streams = [model.embed(tokens)]
            for block in model.blocks:
                streams.append(model.through([block], streams[-1], tokens))
            cosines = [(x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)) for x, y in pairwise(streams)]
            turned = torch.cat([turned, torch.stack(cosines).flatten(1)], dim=1)
    assert found.tolist() == pytest.approx((1 - turned).mean(1).tolist(), rel=1e-4)
    with torch.no_grad():
        block = cast(Any, model.blocks[1])
        for linear in outputs(block).values():
            linear.weight.zero_()
    smaller = prune(model, given, PrunedSizes(n_layers=2))
    with torch.no_grad():
        assert torch.equal(smaller(given[0]), model(given[0]))


@pytest.mark.parametrize("by", ["activation", "taylor"])
def test_what_is_kept_does_not_depend_on_the_order_of_batches(by: Measure) -> None:
    model = disturbed(dataclasses.replace(GROUPED, d_ff=96, n_layers=4)).eval()
    given = batches(model.config, 6)
    sizes = PrunedSizes(n_layers=2, n_kv_heads=1, d_ff=40, d_model=15)
    kept = most_important(measure_importance(model, given, by), model.config, sizes)
    other = [given[n] for n in (3, 0, 5, 1, 4, 2)]
    assert most_important(measure_importance(model, other, by), model.config, sizes) == kept
    together = [torch.cat(given)]
    assert most_important(measure_importance(model, together, by), model.config, sizes) == kept
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("switch", ["window_every_other", "experts_shared", "attention_latent", "qk_norm_all_heads"])
def test_layers_and_what_else_is_possible_are_removed(switch: str) -> None:
    config = config_of(switch, n_layers=6, full_attention_every=2 if "window" in switch else None)
    model = disturbed(config).eval()
    kept = Kept((0, 1, 3, 5) if "window" not in switch else (0, 3, 4, 5), {}, {})
    smaller = remove_parts(model, kept)
    assert smaller.config.n_layers == 4
    tokens = random_tokens(config)
    with torch.no_grad():
        stream = model.embed(tokens)
        for layer in kept.layers:
            stream = model.through([model.blocks[layer]], stream, tokens)
        assert torch.equal(smaller(tokens), model.logits_of(model.normalized(stream)))


@pytest.mark.parametrize(
    ("switch", "changes", "sizes", "complaint"),
    [
        ("default", {}, {}, "nothing is to be removed"),
        ("default", {}, {"n_layers": 2, "d_ff": 32, "d_model": 24}, "nothing is to be removed"),
        ("default", {}, {"d_model": 25}, "d_model is 25, the model has 24: keep 1 to 24"),
        ("default", {"norm": "layer"}, {"d_model": 8}, "subtract the mean"),
        ("default", {"positions": "sinusoidal"}, {"d_model": 8}, "sinusoidal"),
        ("default", {"mup_base_d_model": 8}, {"d_model": 8}, "of the width"),
        ("experts", {}, {"d_model": 8}, "routers"),
        ("attention_latent", {}, {"d_model": 8}, "latent attention"),
        ("default", {"mixers": "mamba2,attention", "state_head_dim": 16}, {"d_model": 8}, "a state"),
        ("default", {}, {"n_layers": 0}, "n_layers is 0, the model has 2: keep 1 to 2"),
        ("grouped", {}, {"n_kv_heads": 3}, "n_kv_heads is 3, the model has 2"),
        ("default", {}, {"d_ff": 33}, "d_ff is 33, the model has 32"),
        ("experts", {}, {"d_ff": 8}, "4 experts"),
        ("attention_latent", {}, {"n_kv_heads": 1}, "latent attention"),
        ("qk_norm_all_heads", {}, {"n_kv_heads": 1}, "all_heads"),
        ("positions_alibi", {}, {"n_kv_heads": 1}, "alibi"),
        ("default", {"kv_sharing": 2}, {"n_layers": 1}, "groups of 2 layers share"),
        ("default", {"kv_sharing": 2}, {"n_kv_heads": 1}, "groups of 2 layers share"),
        ("default", {"mixers": "mamba2,attention", "state_head_dim": 16}, {"n_kv_heads": 1}, "a state"),
    ],
)
def test_impossible_sizes_are_refused(
    switch: str, changes: dict[str, Any], sizes: dict[str, int], complaint: str
) -> None:
    config = config_of(switch, **changes)
    with pytest.raises(NapkinError, match=complaint):
        most_important(measure_importance(Transformer(config), []), config, PrunedSizes(**sizes))
    with pytest.raises(NapkinError, match=complaint):
        drawn_parts(config, PrunedSizes(**sizes))


def test_windows_that_no_config_has_are_refused() -> None:
    config = config_of("window_every_other", n_layers=6)
    with pytest.raises(NapkinError, match="layers 1, 2, 4"):
        pruned_config(config, Kept((1, 2, 4), {}, {}))
    only = pruned_config(config, Kept((1, 3), {}, {}))
    assert only.attention_windows == [None, None]
    dense = config_of("experts_shared", n_layers=4, n_dense_layers=2)
    with pytest.raises(NapkinError, match="no experts"):
        pruned_config(dense, Kept((0, 1), {}, {}))
    assert pruned_config(dense, Kept((0, 2), {}, {})).n_dense_layers == 1


def test_mixers_of_kept_layers_stay() -> None:
    config = config_of("default", n_layers=5, mixers="mamba2*2,attention", state_head_dim=16)
    model = disturbed(config).eval()
    smaller = prune(model, batches(config), PrunedSizes(n_layers=3, d_ff=20))
    kept = most_important(measure_importance(model, batches(config)), config, PrunedSizes(n_layers=3))
    assert smaller.config.layer_mixers == [config.layer_mixers[layer] for layer in kept.layers]
    assert smaller(random_tokens(config)).isfinite().all()


def test_drawn_parts_are_other_ones_of_the_same_sizes() -> None:
    sizes = PrunedSizes(n_layers=2, n_kv_heads=1, d_ff=5, d_model=9)
    kept, again, other = (drawn_parts(GROUPED, sizes, seed) for seed in (0, 0, 1))
    assert kept == again != other
    assert len(kept.layers) == 2
    assert len({*kept.channels}) == 9
    assert kept.hidden_units.keys() == set(kept.layers)
    for layer in kept.layers:
        assert len(set(kept.hidden_units[layer])) == 5
        assert list(kept.hidden_units[layer]) == sorted(kept.hidden_units[layer])
    assert len({tuple(each) for each in kept.hidden_units.values()}) == 2


def test_folders_of_pruned_models_give_their_logits(tmp_path: Path) -> None:
    config = dataclasses.replace(GROUPED, embedding_scale=1.0)
    smaller = prune(disturbed(config), batches(config), PrunedSizes(2, 1, 7, 22))
    save_huggingface(smaller, tmp_path / "smaller")
    read = load_huggingface(tmp_path / "smaller")
    tokens = random_tokens(config)
    with torch.no_grad():
        assert torch.equal(read(tokens), smaller(tokens))


@pytest.mark.peers
@pytest.mark.parametrize("changes", [{"embedding_scale": 1.0}, {}, {"biases": "qkv", "embedding_scale": 1.0}])
def test_transformers_give_the_logits_of_pruned_models(tmp_path: Path, changes: dict[str, Any]) -> None:
    transformers = peer("transformers")
    config = dataclasses.replace(GROUPED, head_dim=None if "biases" in changes else 10, **changes)
    sizes = PrunedSizes(2, None if "biases" in changes else 1, 7, None if "biases" in changes else 22)
    smaller = prune(disturbed(config), batches(config), sizes)
    save_huggingface(smaller, tmp_path / "smaller")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller", dtype=torch.float32).eval()
    tokens = random_tokens(config)
    with torch.no_grad():
        assert (theirs(tokens).logits - smaller(tokens)).abs().max() < 1e-4
