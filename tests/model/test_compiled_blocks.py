"""The blocks of a model, or the whole model, in one compiled pass, beside the model's own modules."""

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.accounting.recording import record
from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.generation import cache_for, generate, last_logits, prefill
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.kernels.blocks.decode import Blocks, TokenPass
from napkin.kernels.operator_forms import pinned_forms
from napkin.kernels.products.linear import FEW_PRODUCTS
from napkin.model.compiled_blocks import DECODING, CompiledBlocks, weights_of_blocks
from napkin.model.config import ModelConfig
from napkin.model.gguf import load_gguf, save_gguf
from napkin.model.gguf.convert import GgufFormat
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.kv_cache import ContiguousCache
from napkin.model.quantized import Format, Int4Linear, QuantizedLinear, quantize_model
from napkin.model.transformer import Transformer
from oracles.model_switches import disturbed

LLAMA = ModelConfig(
    vocab_size=96, context_length=64, d_model=192, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=64, d_ff=96,
    norm_eps=1e-6, rope_theta=500.0, embedding_scale=1.0,
)  # fmt: skip


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call from tokens to logits, in a list."""
    seen: list[int] = []
    call = TokenPass.__call__

    def counted(self: TokenPass, tokens: list[int], *more: Any) -> Tensor:
        seen.append(len(tokens))
        return call(self, tokens, *more)

    monkeypatch.setattr(TokenPass, "__call__", counted)
    return seen


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, whole: list[int]) -> list[int]:
    """The number of tokens of each compiled pass, of the blocks or the whole, in a list."""
    decode = Blocks.decode

    def counted(self: Blocks, x: Tensor, *more: Any) -> Tensor:
        whole.append(len(x))
        return decode(self, x, *more)

    monkeypatch.setattr(Blocks, "decode", counted)
    return whole


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def opened(config: ModelConfig, to: GgufFormat, folder: Path) -> Transformer:
    save_gguf(disturbed(config), folder / f"{to}.gguf", to=to)
    return load_gguf(folder / f"{to}.gguf", integers=True)


def by_modules(model: Transformer) -> Transformer:
    plain = copy.deepcopy(model)
    plain.decode_blocks = None
    return plain


def logits_of(model: Transformer, n_sequences: int) -> list[Tensor]:
    cache = cache_for(model, n_sequences, 40)
    made = [prefill(model, [list(range(9 + b)) for b in range(n_sequences)], cache)]
    return made + [prefill(model, [[7 * t + b] for b in range(n_sequences)], cache) for t in range(5)]


@pytest.mark.parametrize(("to", "changes"), [("Q4_0", {}), ("Q8_0", {"biases": "qkv", "tie_embeddings": False})])
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_the_compiled_pass_gives_the_logits_of_the_modules(
    n_sequences: int, to: GgufFormat, changes: dict[str, Any], passes: list[int], threads: None, tmp_path: Path
) -> None:
    model = opened(dataclasses.replace(LLAMA, **changes), to, tmp_path)
    expected = logits_of(by_modules(model), n_sequences)
    assert passes == []
    torch.set_num_threads(1)
    found = logits_of(model, n_sequences)
    # A short prompt of one sequence goes through it too.
    assert passes == [9] * (n_sequences == 1) + [n_sequences] * 5
    for ours, theirs in zip(found, expected, strict=True):
        # Sums in another order, and numbers that are then rounded to another integer of 16 bits.
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
    # Rows of a matrix are whose they are: threads change nothing.
    torch.set_num_threads(3)
    for ours, theirs in zip(logits_of(model, n_sequences), found, strict=True):
        assert torch.equal(ours, theirs)


NUMBERS = ModelConfig(
    vocab_size=96, context_length=64, d_model=512, n_layers=2, n_heads=8, n_kv_heads=4, d_ff=736, norm_eps=1e-6
)
GPT2 = dataclasses.replace(
    NUMBERS, n_kv_heads=8, positions="learned", norm="layer", feed_forward="gelu_tanh", biases="all"
)


def held_in(form: str, config: ModelConfig) -> Transformer:
    """A model in bf16, fp32, or integers with scales in bf16, in the last block with AWQ's factors."""
    model = disturbed(config).eval()
    if form not in ("int8", "int4"):
        return model.to(torch.bfloat16 if form == "bf16" else torch.float32)
    down = f"{config.n_layers - 1}.feed_forward.down"
    weight: Any = model.blocks.get_submodule(down).weight
    # Columns are added where they do not fill whole groups.
    made = Int4Linear.quantized(weight.detach(), 64)
    factors = {"factors": torch.linspace(0.5, 2, weight.shape[1]).bfloat16()}
    quantize_model(model, form, calibrated={down: made | factors} if form == "int4" else None)  # pyright: ignore
    return model


@torch.inference_mode()
@pytest.mark.parametrize("form", ["bf16", "fp32", "int8", "int4"])
@pytest.mark.parametrize("config", [NUMBERS, GPT2], ids=["llama", "gpt2"])
def test_the_compiled_pass_of_numbers_gives_the_logits_of_the_modules(
    config: ModelConfig, form: str, passes: list[int], threads: None
) -> None:
    model = held_in(form, config)
    use_decoding_kernels(model)
    plain = by_modules(model)
    found: dict[tuple[bool, int, int], list[Tensor]] = {}
    for n_new in (1, 4, 8):
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            for each in (model, plain):
                cache, parts = cache_for(each, 2, 40), []
                prefill(each, [list(range(9)), list(range(1, 10))], cache)
                for t in range(3):
                    new = [[7 * t + i + b for i in range(n_new)] for b in range(2)]
                    parts.append(each.hidden(torch.tensor(new), cache=cache.extend(n_new)))
                found[each is model, n_new, n_threads] = parts
    assert passes == [2] * 6 + [8] * 6 + [16] * 6
    for n_new in (1, 4, 8):
        for ours, theirs, threaded in zip(
            *(found[key] for key in ((True, n_new, 1), (False, n_new, 1), (True, n_new, 3))), strict=True
        ):
            assert ours.dtype == model.dtype
            # Where sums in another order are rounded to another bf16, later numbers move with them.
            bound = 1e-5 if form == "fp32" else 2e-2
            assert (ours - theirs).float().norm() < bound * theirs.float().norm()
            assert torch.equal(ours, threaded)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("config", "changes"),
    [(NUMBERS, {}), (NUMBERS, {"tie_embeddings": False, "positions": "none"}), (GPT2, {"embedding_scale": 1.0})],
    ids=["llama", "own head", "gpt2"],
)
def test_one_call_from_tokens_to_logits_gives_those_of_the_modules(
    config: ModelConfig, changes: dict[str, Any], form: str, whole: list[int], threads: None
) -> None:
    model = held_in(form, dataclasses.replace(config, vocab_size=1024, **changes))
    use_decoding_kernels(model)
    plain = by_modules(model)
    prompt, made = list(range(300, 309)), {}
    for n_threads in (1, 3):
        torch.set_num_threads(n_threads)
        # Two texts take turns, as a draft's and its model's might.
        texts = [(cache_for(each, 1, 40), each) for each in (model, model, plain)]
        rows = [[last_logits(each, prompt, cache, 2)] for cache, each in texts]
        for tokens, n_last in (([7], 1), ([1023, 0, 512], 3), ([5], 1), ([9, 8], 1)):
            for made_rows, (cache, each) in zip(rows, texts, strict=True):
                made_rows.append(last_logits(each, tokens, cache, n_last))
        assert [cache.lengths for cache, _ in texts] == [[16]] * 3
        first, second, expected = map(torch.cat, rows)
        assert torch.equal(first, second)
        assert first.dtype == torch.float32
        assert (first - expected).norm() < 2e-2 * expected.norm()
        made[n_threads] = first
    assert torch.equal(made[1], made[3])
    assert len(whole) == 20


@torch.inference_mode()
def test_what_the_one_call_has_no_form_for_goes_through_the_modules(whole: list[int]) -> None:
    model = held_in("bf16", dataclasses.replace(GPT2, vocab_size=1024))
    use_decoding_kernels(model)
    cache = cache_for(model, 1, 12)
    with pytest.raises(IndexError):
        last_logits(model, [1024], cache, 1)
    cache = cache_for(model, 1, 12)
    last_logits(model, [1] * 12, cache, 1)
    with pytest.raises(NapkinError, match=r"13 tokens exceeds the 12 of its KV cache"):
        last_logits(model, [1], cache, 1)
    assert cache.lengths == [12]
    assert whole == [12]
    too_long = ContiguousCache(dataclasses.replace(model.config, context_length=96), capacity=80, dtype=model.dtype)
    last_logits(model, [1] * 64, too_long, 1)
    with pytest.raises((IndexError, NapkinError)):
        last_logits(model, [1], too_long, 1)
    assert whole == [12]
    documents = cache_for(model, 1, 12)
    model.hidden(torch.tensor([[1, 2]]), cache=documents.extend(2, documents=torch.tensor([[0, 1]])))
    by_documents = last_logits(model, [3], documents, 1)
    alone = cache_for(model, 1, 12)
    last_logits(model, [2], alone, 1)
    assert (by_documents - last_logits(model, [3], alone, 1)).norm() < 2e-2 * by_documents.norm()
    assert whole == [12, 1, 1]
    with pinned_forms({FEW_PRODUCTS: "torch"}):
        last_logits(model, [3], alone, 1)
    for changes in ({"logit_softcap": 5.0}, {"mup_base_d_model": 64}):
        other = held_in("bf16", dataclasses.replace(NUMBERS, vocab_size=1024, **changes))
        use_decoding_kernels(other)
        assert torch.equal(prefill(other, [[5]], cache_for(other, 1, 9)), prefill(other, [[5]], cache_for(other, 1, 9)))
    assert whole == [12, 1, 1]


@torch.inference_mode()
def test_an_embedding_or_a_head_that_is_replaced_is_read_where_it_is(whole: list[int]) -> None:
    model = held_in("bf16", dataclasses.replace(GPT2, vocab_size=1024, tie_embeddings=False))
    use_decoding_kernels(model)
    before = last_logits(model, [5], cache_for(model, 1, 9), 1)
    head: Any = model.head
    head.weight = torch.nn.Parameter(-head.weight)
    assert torch.equal(last_logits(model, [5], cache_for(model, 1, 9), 1), -before)
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.roll(1, 0))
    assert torch.equal(last_logits(model, [6], cache_for(model, 1, 9), 1), -before)
    assert whole == [1, 1, 1]


@torch.inference_mode()
def test_a_model_that_has_decoded_is_copied_and_pickled(whole: list[int]) -> None:
    model = held_in("bf16", dataclasses.replace(GPT2, vocab_size=1024))
    use_decoding_kernels(model)
    expected = last_logits(model, [5], cache_for(model, 1, 9), 1)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(last_logits(made, [5], cache_for(made, 1, 9), 1), expected)
    assert whole == [1, 1, 1]


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_quantized_model_says_what_its_weights_in_bf16_say(to: Format, passes: list[int]) -> None:
    config = ModelConfig(vocab_size=24, context_length=48, d_model=128, n_layers=2, n_heads=2, d_ff=96)
    model, text = Transformer(config, seed=3), torch.arange(480) * torch.arange(480) % 23
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = torch.stack([text[7 * step % 400 + i :][:33] for i in range(8)])
        optimizer.zero_grad()
        model.loss(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
    quantize_model(model, to, group_size=32)
    plain = Transformer(config).to(torch.bfloat16).eval()
    tensors = {name: each for name, each in model.state_dict().items() if name in plain.state_dict()}
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    plain.load_state_dict(tensors | {f"{name}.weight": each.weight for name, each in layers.items()}, strict=False)
    plain.embedding.weight.data.copy_(model.embedding.weight)
    for start in range(12):
        prompt = text[start : start + 9].tolist()
        greedy = Sampling(temperature=0)
        assert list(generate(model, prompt, 16, greedy)) == list(generate(plain, prompt, 16, greedy))
    assert len(passes) == 12 * 16


@torch.inference_mode()
def test_the_form_that_was_faster_here_decides_how_many_tokens_go_through_the_pass(passes: list[int]) -> None:
    model = held_in("bf16", NUMBERS)
    use_decoding_kernels(model)
    tokens = torch.arange(40)[None]
    for form, n_new, expected in (("block by block", 1, []), ("one pass", 33, [33]), ("one pass", 1, [1])):
        cache = cache_for(model, 1, 64)
        with pinned_forms({DECODING: form}):
            model.hidden(tokens[:, :n_new], cache=cache.extend(n_new))
        assert passes == expected
        passes.clear()


@torch.inference_mode()
def test_matrices_that_are_moved_or_replaced_are_read_where_they_are(passes: list[int]) -> None:
    model = disturbed(NUMBERS).eval()
    use_decoding_kernels(model)
    first = logits_of(model, 1)
    block = model.blocks[1]
    block.feed_forward.down.weight = torch.nn.Parameter(2 * block.feed_forward.down.weight)  # pyright: ignore
    second = logits_of(model, 1)
    assert not torch.allclose(first[-1], second[-1], rtol=1e-2)
    torch.testing.assert_close(second, logits_of(by_modules(model), 1), rtol=1e-3, atol=1e-3)
    block.attention.output.adapter = torch.nn.Identity()  # pyright: ignore
    n_passes = len(passes)
    assert weights_of_blocks(model) is None
    model.to(torch.bfloat16)
    block.attention.output.adapter = None  # pyright: ignore
    third = logits_of(model, 1)
    assert len(passes) > n_passes
    assert third[-1].argmax() == second[-1].argmax()


def test_an_engine_decodes_its_requests_together_by_the_compiled_pass(passes: list[int], tmp_path: Path) -> None:
    model = opened(LLAMA, "Q8_0", tmp_path)
    requests = [Request([3 + i, 5, 8, 13], 6 + i, Sampling(temperature=0.0)) for i in range(3)]
    tokens = []
    for each in (model, by_modules(model)):
        engine = Engine(each, cache_bytes=2**20, max_running=4)
        completions = [engine.submit(request) for request in requests]
        engine.run()
        tokens.append([completion.tokens for completion in completions])
    assert tokens[0] == tokens[1]
    assert max(passes) == 3


def test_a_meter_sees_the_operators_of_the_modules(passes: list[int], tmp_path: Path) -> None:
    model = opened(LLAMA, "Q8_0", tmp_path)
    cache = cache_for(model, 1, 20)
    prefill(model, [list(range(9))], cache)
    passes.clear()
    ledger = record(model, lambda: prefill(model, [[4]], cache), warm_up=0)
    assert passes == []
    n_matrices = sum(row.operator == "integer_product" for row in ledger.rows)
    assert n_matrices == 4 * LLAMA.n_layers + 1


@pytest.mark.parametrize(
    "changes",
    [{"attention_window": 8}, {"qk_norm": "head"}, {"feed_forward": "geglu_tanh"}, {"block": "sandwich"}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_architectures_are_declined(changes: dict[str, Any], tmp_path: Path) -> None:
    model = opened(LLAMA, "Q8_0", tmp_path)
    assert weights_of_blocks(model) is not None
    other = Transformer(dataclasses.replace(LLAMA, **changes)).eval()
    for mine, theirs in zip(other.blocks, model.blocks, strict=True):
        for part, name in (("attention", "query_key_value"), ("attention", "output")):
            setattr(mine.get_submodule(part), name, getattr(theirs.get_submodule(part), name))
        for name in ("gate_up", "down"):
            setattr(mine.get_submodule("feed_forward"), name, getattr(theirs.get_submodule("feed_forward"), name))
    other.decode_blocks = CompiledBlocks()
    assert weights_of_blocks(other) is None
    assert all(torch.equal(a, b) for a, b in zip(logits_of(other, 1), logits_of(by_modules(other), 1), strict=True))
