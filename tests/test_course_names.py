"""The names in the course's table of adapters are public, and together make what the course asks for: a Transformer in
its arrangement beside plain PyTorch, batches of any place, lines that stand once."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import napkin

PAGE = Path(__file__).parents[1] / "docs" / "course.md"


def test_every_name_of_the_table_is_there_after_a_bare_import() -> None:
    table = PAGE.read_text().partition("| its adapters | napkin |")[2].partition("\n## ")[0]
    names = re.findall(r"`(napkin(?:\.[A-Za-z_]+)+)", table)
    assert len(set(names)) > 45
    for name in names:
        module = napkin
        for part in name.split(".")[1:]:
            # Each package on the way says that it offers the next one.
            assert part in getattr(module, "__all__", dir(module)), name
            module = getattr(module, part)
    for name in re.findall(r"`([a-z_]+)`", table.partition("policy_gradient.group_normalised")[2].partition("GSPO")[0]):
        assert name.startswith("run_") or hasattr(napkin.tuning.policy_gradient, name), name


def rotated(x: Tensor, theta: float) -> Tensor:
    """Neighbours as complex numbers, turned by position / theta^(2i / width)."""
    width, length = x.shape[-1], x.shape[-2]
    angles = torch.arange(length).double()[:, None] / theta ** (torch.arange(0, width, 2).double() / width)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def attention(x: Tensor, stacked: Tensor, output: Tensor, heads: int, theta: float | None) -> Tensor:
    queries, keys, values = (
        rearrange(x @ part.T, "b t (h c) -> b h t c", h=heads) for part in stacked.double().chunk(3)
    )
    if theta is not None:
        queries, keys = rotated(queries, theta), rotated(keys, theta)
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return rearrange(mixed, "b h t c -> b t (h c)") @ output.double().T


def test_a_transformer_in_the_arrangement_of_the_course_is_that_of_plain_pytorch() -> None:
    config = napkin.ModelConfig(
        50, 16, d_model=32, n_layers=2, n_heads=4, d_ff=48, rope_theta=1000.0, rope_pairing="interleaved",
        tie_embeddings=False,
    )  # fmt: skip
    model = napkin.Transformer(config, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gain"):
                parameter.uniform_(0.5, 1.5)
    weights = model.state_dict()
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(2))

    def normed(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (32,), weights[name].double(), 1e-5)

    x = weights["embedding.weight"].double()[tokens]
    for layer in range(2):
        of = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        read = normed(x, f"blocks.{layer}.attention_norm.gain")
        mixed = attention(read, of["attention.query_key_value.weight"], of["attention.output.weight"], 4, 1000.0)
        x = x + mixed
        gate, up = (
            normed(x, f"blocks.{layer}.feed_forward_norm.gain") @ of["feed_forward.gate_up.weight"].double().T
        ).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ of["feed_forward.down.weight"].double().T
        if layer == 0:
            alone = model.through([model.blocks[0]], weights["embedding.weight"][tokens], tokens)
            torch.testing.assert_close(alone.double(), x, rtol=1e-4, atol=1e-5)
    logits = normed(x, "norm.gain") @ weights["head.weight"].double().T
    torch.testing.assert_close(model(tokens).double(), logits, rtol=1e-4, atol=1e-4)


def test_attention_by_itself_without_rotation_and_with_given_positions_is_that_of_plain_pytorch() -> None:
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    rope = napkin.model.RotaryEmbedding(8, 16, theta=1000.0, pairing="interleaved")
    for rotate, theta in ((lambda each: each, None), (napkin.kernels.rotate_interleaved, 1000.0)):
        layer = napkin.model.CausalSelfAttention(32, 4, rotate=rotate)
        context = None if theta is None else napkin.model.ForwardContext(rope(torch.arange(9)))
        wanted = attention(x.double(), layer.query_key_value.weight, layer.output.weight, 4, theta)
        torch.testing.assert_close(layer(x, context).double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_permutation_of_the_places_draws_each_of_them_equally_often() -> None:
    drawn = Counter(
        int(place) for epoch in range(30) for place in napkin.data.KeyedPermutation(93, epoch)(np.arange(93))
    )
    assert drawn == dict.fromkeys(range(93), 30)
    orders = {tuple(napkin.data.KeyedPermutation(93, epoch)(np.arange(93)).tolist()) for epoch in range(30)}
    assert len(orders) == 30


def test_lines_that_stand_twice_are_in_no_document() -> None:
    texts = {"a": "one\ntwo\nthree\n", "b": "two\nfour\n", "c": "five\n", "d": "three\ntwo\n"}
    counts = Counter(line for text in texts.values() for line in text.splitlines())
    wanted = {name: [line for line in text.splitlines() if counts[line] == 1] for name, text in texts.items()}
    stage = napkin.curation.DuplicateLines(shortest=1, keep="none")
    found = {
        record.identity: record.text.splitlines()
        for record in napkin.curation.apply_stages(
            [napkin.curation.Record(name, text) for name, text in texts.items()], [stage]
        )
    }
    assert found == {name: lines for name, lines in wanted.items() if lines}
