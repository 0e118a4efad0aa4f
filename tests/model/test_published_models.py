import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.errors import NapkinError
from napkin.model.config import preset, presets
from napkin.model.transformer import Transformer


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", presets())
def test_a_preset_has_the_published_number_of_parameters_to_the_unit(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(presets()[name].model)
    assert sum(parameter.numel() for parameter in model.parameters()) == presets()[name].parameters


def test_the_families_that_people_ask_for_are_there() -> None:
    wanted = (
        "gpt2 gpt2-medium gpt2-large gpt2-xl llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3-405b"
    )
    wanted += " qwen3-0.6b qwen3-8b olmo-2-7b mixtral-8x7b deepseek-moe-16b"
    wanted += " llama-3.1-8b llama-3.1-70b llama-3.2-1b llama-3.2-3b mistral-7b qwen3-1.7b qwen3-4b qwen3-14b qwen3-32b"
    wanted += " qwen3-30b-a3b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b"
    wanted += " llama-3.3-70b qwen3-235b-a22b qwen3-coder-480b-a35b gemma-3-270m gemma-3-1b"
    assert set(wanted.split()) == set(presets())
    assert all(found.source.count("/") == 1 for found in presets().values())


def test_a_preset_can_be_changed() -> None:
    small = preset("llama-3-8b", n_layers=2, context_length=128)
    assert (small.n_layers, small.context_length, small.rope_theta) == (2, 128, 500000.0)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["deepseek-moe-16b", "olmo-2-7b", "qwen3-8b", "gpt2-xl"])
def test_a_preset_trains_on_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        model = Transformer(preset(name, n_layers=2))
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        model.loss(tokens, tokens).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(NapkinError, match=r"'lama-3-8b'.*preset: did.*'llama-3-8b'"):
        preset("lama-3-8b")
    with pytest.raises(NapkinError, match="gpt2, gpt2-medium"):
        preset("xyz")
