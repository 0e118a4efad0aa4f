import pytest
import torch
from torch import Tensor

from napkin.model.attention import document_ids
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer
from oracles.model_switches import SWITCHES, config_of, disturbed, random_tokens

# What a cache could get wrong: positions, windows, heads, implementations, and one of each other kind of layer. Not
# "experts_capacity": a full expert drops tokens by what else is in the pass.
WITH_CACHE = [
    name
    for name in SWITCHES
    if name.startswith(("positions", "rope", "attention", "window", "alibi", "block", "qk_norm"))
]


@pytest.fixture(params=[*WITH_CACHE, "multi_query", "interleaved", "softcap", "experts_shared", "mup_untied_biases"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return disturbed(config_of(request.param)).eval()


def in_passes(model: Transformer, tokens: Tensor, sizes: list[int], documents: Tensor | None = None) -> Tensor:
    cache = ContiguousCache(model.config, len(tokens), 14)
    parts = []
    for part, ids in zip(
        tokens.split(sizes, dim=1), [None] * len(sizes) if documents is None else documents.split(sizes, 1), strict=True
    ):
        parts.append(model.hidden(part, cache=cache.extend(part.shape[1], documents=ids)))
    return torch.cat(parts, dim=1)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-4, atol=1e-4 * max(expected.flatten().abs().tolist(), default=0)
    )


@pytest.mark.sampled(every=6)
@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 14, [5, 1, 1, 4, 3]])
def test_passes_of_any_size_equal_one_pass_over_all(model: Transformer, sizes: list[int]) -> None:
    tokens = random_tokens(model.config, length=14)
    assert_same(in_passes(model, tokens, sizes), model.hidden(tokens))


@pytest.mark.sampled(every=5)
@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 14, [5, 1, 1, 4, 3]])
def test_packed_sequences_equal_one_pass_over_all(model: Transformer, sizes: list[int]) -> None:
    tokens = random_tokens(model.config, length=14)
    documents = document_ids(tokens % 6, 3)
    assert documents.max() > 0
    assert_same(in_passes(model, tokens, sizes, documents), model.hidden(tokens, documents))


@torch.no_grad()
def test_sequences_of_unequal_lengths_equal_each_alone(model: Transformer) -> None:
    tokens = random_tokens(model.config, 3, 14)
    passes = [[3, 7, 5], [1, 1, 1], [4, 2, 0], [1, 1, 1], [5, 1, 7], [0, 0, 0]]
    cache, starts = ContiguousCache(model.config, 3, 14), [0, 0, 0]
    expected = model.hidden(tokens)
    for counts in passes:
        # Padding with a token that occurs, so that it would be seen.
        new = torch.full((3, max(*counts, 1)), 7)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            new[row, :count] = tokens[row, start : start + count]
        hidden = model.hidden(new, cache=cache.extend(new.shape[1], counts))
        assert hidden.isfinite().all()
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            assert_same(hidden[row, :count], expected[row, start : start + count])
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert cache.lengths == starts == [14, 12, 14]


@torch.no_grad()
def test_branches_equal_each_continuation_alone(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 14)
    tokens[1, :9] = tokens[0, :9]
    cache = ContiguousCache(model.config, 1, 14)
    model.hidden(tokens[:1, :9], cache=cache.extend(9))
    positions = torch.arange(9, 14).repeat(2)
    of = torch.arange(2).repeat_interleave(5)
    sees = (of[:, None] == of) & (positions[:, None] >= positions)
    hidden = model.hidden(tokens[:, 9:].reshape(1, -1), cache=cache.branch(positions, sees))
    assert_same(hidden.view(2, 5, -1), model.hidden(tokens)[:, 9:])
    # They are not kept: the sequence goes on as if they had not been.
    assert_same(model.hidden(tokens[1:, 9:], cache=cache.extend(5)), model.hidden(tokens)[1:, 9:])
    cache.truncate(6)
    rest = tokens[:1, cache.lengths[0] :]
    assert cache.lengths[0] == (0 if model.config.attention_window else 6)
    assert_same(model.hidden(rest, cache=cache.extend(rest.shape[1])), model.hidden(tokens)[:1, -rest.shape[1] :])


@torch.no_grad()
@pytest.mark.parametrize("switch", ["window", "window_plain", "window_every_other", "window_every_other_alibi"])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [3]])
def test_a_ring_with_slack_forgets_as_many_tokens(switch: str, sizes: list[int]) -> None:
    model = disturbed(config_of(switch)).eval()
    tokens = random_tokens(model.config, 2, 14)
    tokens[1, :9] = tokens[0, :9]
    cache = ContiguousCache(model.config, 1, 14, slack=3)
    for part in tokens[:1, :12].split([7, 1, 4], dim=1):
        model.hidden(part, cache=cache.extend(part.shape[1]))
    cache.truncate(9)
    assert cache.lengths == [9]
    parts = [model.hidden(part, cache=cache.extend(part.shape[1])) for part in tokens[1:, 9:12].split(sizes, dim=1)]
    assert_same(torch.cat(parts, dim=1), model.hidden(tokens)[1:, 9:12])
    cache.truncate(7)
    assert cache.lengths == [0]
