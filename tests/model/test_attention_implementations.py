import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.kernels.attention.reference import softcap
from napkin.model.attention import (
    CausalMask,
    CausalSelfAttention,
    CompiledAttention,
    FlexAttention,
    FusedAttention,
    PlainAttention,
    SlidingWindowMask,
    document_ids,
)
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import compiled_passes
from napkin.model.positions import AlibiPositions, NoPositions, alibi_slopes, position_ids
from napkin.model.transformer import Transformer
from oracles.model_switches import BASE, random_tokens

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [3] * 15 + [4]])
RULES: dict[str, tuple[CausalMask, NoPositions, Tensor | None]] = {
    "causal": (CausalMask(), NoPositions(), None),
    "documents": (CausalMask(), NoPositions(), DOCUMENTS),
    "window": (SlidingWindowMask(4), NoPositions(), None),
    "window and documents": (SlidingWindowMask(4), NoPositions(), DOCUMENTS),
    "alibi": (CausalMask(), AlibiPositions(4), None),
    "all": (SlidingWindowMask(5), AlibiPositions(4), DOCUMENTS),
}
ARGUMENTS = ("sees", "positions", "documents")
CASES = pytest.mark.parametrize(ARGUMENTS, RULES.values(), ids=RULES)
ALL_RULES = pytest.mark.parametrize(
    ARGUMENTS,
    # Tracing the kernel takes seconds.
    [pytest.param(*RULES[name], id=name, marks=[] if name == "all" else pytest.mark.torture) for name in RULES],
)
CPU = torch.device("cpu")


def problem(n_kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def heads(n: int) -> Tensor:
        return torch.randn(2, n, 16, 8, generator=generator).to(dtype).requires_grad_()

    return heads(4), heads(n_kv_heads), heads(n_kv_heads)


def mixed_by_hand(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: CausalMask,
    positions: NoPositions,
    documents: Tensor | None,
    cap: Any,
) -> Tensor:
    """One output after another, in fp64."""
    q, k, v = queries.double(), keys.double(), values.double()
    out = torch.zeros_like(q)
    for batch in range(2):
        for head in range(4):
            shared = head * k.shape[1] // 4
            for i in range(16):
                seen = [j for j in range(16) if sees(torch.tensor(i), torch.tensor(j))]
                if documents is not None:
                    seen = [j for j in seen if documents[batch, i] == documents[batch, j]]
                scores = cap(k[batch, shared, seen] @ q[batch, head, i] * 0.3)
                scores = scores + positions.bias(torch.tensor(head), i - torch.tensor(seen)).double()
                out[batch, head, i] = scores.softmax(0) @ v[batch, shared, seen]
    return out


def implementations(positions: NoPositions) -> list[Any]:
    """Those that compute on a CPU with these positions."""
    without_biases = [] if isinstance(positions, AlibiPositions) else [CompiledAttention]
    return [PlainAttention, FusedAttention, FlexAttention, *without_biases]


@contextmanager
def unfused() -> Iterator[None]:
    """Uncompiled, flex_attention is what it is here: slow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


@pytest.mark.sampled(every=4)
@CASES
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_all_implementations_give_the_same_numbers(
    sees: CausalMask, positions: NoPositions, documents: Tensor | None, n_kv_heads: int
) -> None:
    inputs = problem(n_kv_heads)
    upstream = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    expected = mixed_by_hand(*inputs, sees, positions, documents, lambda scores: scores)
    gradients = torch.autograd.grad(expected, inputs, upstream.double())

    for implementation in implementations(positions):
        attend = implementation(4, scale=0.3, sees=sees)
        actual = attend(*inputs, attend.prepare(positions, 16, documents, CPU))
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(actual, inputs, upstream), gradients, rtol=1e-5, atol=1e-5)


@ALL_RULES
def test_the_kernel_is_given_the_same_rules(sees: CausalMask, positions: NoPositions, documents: Tensor | None) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    # The kernel has no backward pass on a CPU, and no rule may depend on the compiler: it runs as it is.
    queries, keys, values = (tensor.detach() for tensor in problem(2))
    attend = FlexAttention(4, scale=0.3, sees=sees, softcap=1.5)
    with unfused():
        prepared = attend.prepare_kernel(positions, 16, documents, CPU)
        actual = attend(queries, keys, values, prepared, kernel=flex_attention)
    expected = mixed_by_hand(queries, keys, values, sees, positions, documents, lambda scores: softcap(scores, 1.5))
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)


@CASES
def test_in_bf16_the_implementations_are_as_close_to_exact_as_the_format_allows(
    sees: CausalMask, positions: NoPositions, documents: Tensor | None
) -> None:
    queries, keys, values = (tensor.detach() for tensor in problem(2, torch.bfloat16))
    exact = mixed_by_hand(queries, keys, values, sees, positions, documents, lambda scores: scores)
    for implementation in (PlainAttention, FusedAttention):
        attend = implementation(4, scale=0.3, sees=sees)
        actual = attend(queries, keys, values, attend.prepare(positions, 16, documents, CPU))
        assert actual.dtype == torch.bfloat16
        # Scores, weights and result are rounded to 2^-9 each.
        assert (actual - exact).norm() < 0.01 * exact.norm()


def test_a_mask_is_as_small_as_its_rules_allow() -> None:
    def shape(positions: NoPositions, documents: Tensor | None) -> tuple[int, ...]:
        return tuple(PlainAttention(4, scale=0.3, sees=CausalMask()).prepare(positions, 16, documents, CPU).shape)

    assert shape(NoPositions(), None) == (16, 16)
    assert shape(AlibiPositions(4), None) == (1, 4, 16, 16)
    assert shape(NoPositions(), DOCUMENTS) == (2, 1, 16, 16)
    assert shape(AlibiPositions(4), DOCUMENTS) == (2, 4, 16, 16)


def test_alibis_slopes_are_the_papers() -> None:
    assert alibi_slopes(8) == [2**-i for i in range(1, 9)]
    assert alibi_slopes(16) == [2 ** (-i / 2) for i in range(1, 17)]
    # The authors' code for 12 heads: those of 8, then the 1st, 3rd, 5th and 7th of 16.
    assert alibi_slopes(12) == [2**-i for i in range(1, 9)] + [2 ** (-i / 2) for i in (1, 3, 5, 7)]


def test_documents_begin_after_their_separators_and_count_from_0() -> None:
    tokens = torch.tensor([[5, 6, 0, 7, 0, 0, 8], [0, 5, 5, 5, 5, 5, 0]])
    documents = document_ids(tokens, separator=0)
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert position_ids(7, documents, CPU).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert position_ids(7, None, CPU).tolist() == list(range(7))


def test_one_document_in_all_is_as_good_as_none() -> None:
    model, tokens = Transformer(BASE), random_tokens(BASE)
    torch.testing.assert_close(model(tokens, torch.ones_like(tokens)), model(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention is compiled for a GPU")
def test_on_a_gpu_flex_attention_equals_fused_attention_with_gradients() -> None:
    config = ModelConfig(vocab_size=61, context_length=256, d_model=64, n_heads=4, n_layers=2, attention_window=100)
    tokens = random_tokens(config, length=256).cuda()
    results = []
    for implementation in ("flex", "sdpa"):
        model = Transformer(dataclasses.replace(config, attention=implementation)).cuda()
        loss = model.loss(tokens, tokens)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


def test_a_model_trains_with_compiled_attention_as_with_plain() -> None:
    config = ModelConfig(vocab_size=61, context_length=300, d_model=32, n_heads=4, n_kv_heads=2, n_layers=2)
    tokens = random_tokens(config, length=300)
    curves = []
    for form in ("compiled", "plain"):
        model = Transformer(dataclasses.replace(config, attention=form))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(8):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 0.1
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-5, atol=0)


def test_compiled_passes_are_as_close_to_float64_and_leave_the_model_as_it_was() -> None:
    config = ModelConfig(vocab_size=61, context_length=300, d_model=128, n_heads=4, n_kv_heads=2, n_layers=2)
    narrow = Transformer(config, dtype=torch.bfloat16).eval()
    exact = Transformer(config, dtype=torch.float64).eval()
    exact.load_state_dict(narrow.state_dict())
    tokens = random_tokens(config, length=300)
    attentions = [each for each in narrow.modules() if isinstance(each, CausalSelfAttention)]
    before = [each.attend for each in attentions]
    with torch.no_grad():
        expected = exact.hidden(tokens)
        plain = narrow.hidden(tokens)
        with compiled_passes(narrow):
            found = narrow.hidden(tokens)
    assert (found - expected).norm() <= 1.1 * (plain - expected).norm()
    assert [each.attend for each in attentions] == before
