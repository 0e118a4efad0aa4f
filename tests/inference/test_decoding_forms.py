"""How a model decodes few tokens is what was fastest on its own weights."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.hardware.form_timing import Forms
from napkin.inference.decoding_forms import choose_decoding_forms
from napkin.inference.generation import cache_for, generate, prefill
from napkin.inference.settings import Sampling
from napkin.kernels import operator_forms
from napkin.kernels.operator_forms import Choice, ShapeClass, pinned_forms
from napkin.kernels.products.linear import FEW_PRODUCTS
from napkin.model.compiled_blocks import DECODING, CompiledBlocks
from napkin.model.config import ModelConfig
from napkin.model.quantized import INTEGER_PRODUCTS, Format, QuantizedLinear, quantize_model
from napkin.model.transformer import Transformer

CONFIG = ModelConfig(vocab_size=2048, context_length=64, d_model=512, n_layers=2, n_heads=4)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Machine code stays where it is kept.
    monkeypatch.setattr(operator_forms, "cache_path", lambda kind, _: tmp_path / f"{kind}.json")
    monkeypatch.setenv("NAPKIN_FORMS", "measured")
    operator_forms._forms.cache_clear()
    yield
    operator_forms._forms.cache_clear()


@pytest.fixture(scope="module")
def weights() -> Transformer:
    return Transformer(CONFIG).eval().to(torch.bfloat16)


@pytest.fixture
def model(weights: Transformer) -> Transformer:
    """A model that no test has looked at before."""
    return copy.deepcopy(weights)


class Timing:
    """In place of clocks: the form that is fastest, by operator, and the classes that were to be timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fastest: str) -> None:
        self.asked: list[tuple[str, ShapeClass]] = []

        def time_forms(operator: str, shape_class: ShapeClass, forms: Forms, *, default: str, **_: Any) -> Choice:
            self.asked.append((operator, shape_class))
            for call in forms.values():
                call()
                call()
            form = fastest[operator.partition(" ")[0]]
            assert form in forms
            return Choice(operator, shape_class, form, default, 1.0, dict.fromkeys(forms, 1.0))

        monkeypatch.setattr("napkin.hardware.form_timing.time_forms", time_forms)


def operators_of(model: Transformer, n_tokens: int) -> set[str]:
    """The operators of napkin that some new tokens go through, and "one pass" where that takes the blocks' place."""
    found: set[str] = set()

    def watched(passes: Callable[..., Any]) -> Callable[..., Any]:
        def watching(blocks: CompiledBlocks, *arguments: Any) -> Any:
            result = passes(blocks, *arguments)
            found.update(["one pass"] * (result is not None))
            return result

        return watching

    cache = cache_for(model, 1, 40)
    prefill(model, [[1, 2, 3] * 8], cache)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__call__", "logits"):
            patch.setattr(CompiledBlocks, name, watched(getattr(CompiledBlocks, name)))
        prefill(model, [[1] * n_tokens], cache)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.decode_blocks, before = None, model.decode_blocks
        prefill(model, [[1] * n_tokens], cache)
        model.decode_blocks = before
    return found | {each.key for each in profile.key_averages() if each.key == "napkin::multiply_vector"}


def test_what_was_fastest_is_taken_and_gives_the_same_tokens(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(20))
    timing = Timing(monkeypatch, products="compiled", decoding="one pass")
    expected = list(generate(model, prompt, 10, GREEDY))
    asked = list(timing.asked)
    assert {operator for operator, _ in asked} == {FEW_PRODUCTS, DECODING}
    assert len(set(asked)) == len(asked)
    assert operators_of(model, 1) == operators_of(model, 3) == {"one pass", "napkin::multiply_vector"}
    # Another model of the same shapes has nothing left to be timed.
    choose_decoding_forms(copy.deepcopy(model))
    assert timing.asked == asked
    with pinned_forms({FEW_PRODUCTS: "torch", DECODING: "block by block"}):
        assert operators_of(model, 1) == operators_of(model, 3) == set()
        assert list(generate(model, prompt, 10, GREEDY)) == expected
    operator_forms.forget_choices()
    slower = copy.deepcopy(model)
    Timing(monkeypatch, products="torch", decoding="block by block")
    assert list(generate(slower, prompt, 10, GREEDY)) == expected
    assert operators_of(slower, 1) == operators_of(slower, 3) == set()


def test_real_clocks_choose_for_each_class_once(model: Transformer) -> None:
    choose_decoding_forms(model)
    choices = operator_forms.kept_choices()
    assert {each.operator for each in choices} == {FEW_PRODUCTS, DECODING}
    for each in choices:
        assert each.ratios[each.form] <= 1
        assert len(each.ratios) == 2


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_vectors_of_a_prompt_are_multiplied_by_integers_where_that_was_fastest(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, to: Format
) -> None:
    quantize_model(model, to)
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    timing = Timing(monkeypatch, products="integers")
    choose_decoding_forms(model)
    assert set(timing.asked) == {(INTEGER_PRODUCTS, each.class_of(n)) for each in layers for n in (17, 65, 129)}
    assert len(set(timing.asked)) == len(timing.asked)

    def reads_integers(n: int) -> bool:
        x = torch.randn(n, CONFIG.d_model).bfloat16()
        with torch.inference_mode(), torch.profiler.profile() as profile:
            result = layers[0](x)
        with torch.inference_mode(), pinned_forms({INTEGER_PRODUCTS: "numbers"}):
            of_numbers = layers[0](x).float()
        torch.testing.assert_close(result.float(), of_numbers, rtol=0.02, atol=0.02 * of_numbers.abs().max().item())
        return any(each.key == "napkin::integer_product" for each in profile.key_averages())

    assert [reads_integers(n) for n in (1, 17, 64, 65, 256, 257)] == [True] * 5 + [False]
    operator_forms.forget_choices()
    assert [reads_integers(n) for n in (1, 16, 17, 256)] == [True, True, False, False]


def test_nothing_is_timed_for_a_model_in_other_formats_and_where_defaults_are_wanted(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = Timing(monkeypatch, products="torch", decoding="block by block")
    tiny = Transformer(ModelConfig(vocab_size=64, context_length=64, d_model=64, n_layers=1, n_heads=2)).eval()
    choose_decoding_forms(tiny)
    assert timing.asked == []
    monkeypatch.setenv("NAPKIN_FORMS", "default")
    operator_forms._forms.cache_clear()
    choose_decoding_forms(model)
    assert timing.asked == []
    model.decode_blocks = CompiledBlocks()
    assert "one pass" in operators_of(model, 1)
