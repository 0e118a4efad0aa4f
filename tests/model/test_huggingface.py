import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from napkin.errors import CorruptFile, NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface import load_huggingface, save_huggingface
from napkin.model.transformer import Transformer

GPT2 = ModelConfig(
    vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=3, positions="learned", norm="layer",
    feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
)  # fmt: skip
LLAMA = ModelConfig(
    vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=40, norm_eps=1e-6,
    rope_theta=500.0, tie_embeddings=False,
)  # fmt: skip
SHAPES = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])

ROPES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8},
    {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
]  # fmt: skip


def their_gpt2(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=53, n_positions=12, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None, **settings
    )
    return _disturbed(transformers.GPT2LMHeadModel(config))


def their_llama(rope: dict[str, Any], **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=53, max_position_embeddings=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, rope_parameters=rope, bos_token_id=None, eos_token_id=None,
        **settings,
    )  # fmt: skip
    return _disturbed(transformers.LlamaForCausalLM(config))


def _disturbed(model: Any) -> Any:
    """With weights large enough for every factor to show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def random_tokens(length: int = 12) -> Tensor:
    return torch.randint(53, (2, length), generator=torch.Generator().manual_seed(1))


def assert_same_logits(ours: Transformer, theirs: Any, length: int = 12) -> None:
    tokens = random_tokens(length)
    with torch.no_grad():
        expected = theirs(tokens).logits
        actual = ours.eval()(tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    "settings", [{}, {"activation_function": "gelu"}, {"activation_function": "relu", "n_inner": 40}]
)
def test_a_gpt2_of_transformers_gives_the_same_logits_here(tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = their_gpt2(**settings)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_of_transformers_gives_the_same_logits_here(tmp_path: Path, rope: dict[str, Any], tied: bool) -> None:
    theirs = their_llama(rope, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs, length=32)


@SHAPES
def test_a_model_of_ours_gives_the_same_logits_in_transformers(tmp_path: Path, config: ModelConfig) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Transformer(config, seed=3)
    save_huggingface(ours, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert_same_logits(ours, theirs.eval())


@SHAPES
def test_a_saved_model_reads_back_bit_for_bit(tmp_path: Path, config: ModelConfig) -> None:
    ours = Transformer(config, seed=3)
    save_huggingface(ours, tmp_path / "model")
    again = load_huggingface(tmp_path / "model")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_weights_spread_over_files_and_without_a_prefix_are_found(tmp_path: Path) -> None:
    ours = Transformer(LLAMA, seed=3)
    save_huggingface(ours, tmp_path / "model")
    whole = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(whole).items()}
    whole.unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    places = {}
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "model" / f"part-{number}.safetensors")
        places |= dict.fromkeys(half, f"part-{number}.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    again = load_huggingface(tmp_path / "model")
    assert torch.equal(again(random_tokens()), ours(random_tokens()))


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"norm": "layer"}, "norm 'layer'"),
        ({"norm": "none"}, "norm 'none'"),
        ({"qk_norm": "head"}, "qk_norm 'head'"),
        ({"rope_pairing": "interleaved"}, "rope_pairing 'interleaved'"),
        ({"tie_embeddings": True}, "embedding_scale 4.898"),
        ({"n_experts": 4}, "n_experts 4"),
        ({"attention_window": 4}, "attention_window 4"),
    ],
)
def test_a_model_that_the_families_do_not_know_is_refused(
    tmp_path: Path, changes: dict[str, Any], obstacle: str
) -> None:
    import dataclasses

    with pytest.raises(NapkinError, match=obstacle):
        save_huggingface(Transformer(dataclasses.replace(LLAMA, **changes)), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="exists and is not overwritten"):
        save_huggingface(Transformer(LLAMA), tmp_path)


def test_a_folder_that_is_no_such_model_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(message: str, kind: type[NapkinError] = NapkinError) -> None:
        with pytest.raises(kind, match=message) as caught:
            load_huggingface(tmp_path / "model")
        assert "\n" not in str(caught.value)

    refused("cannot be read")
    save_huggingface(Transformer(LLAMA), tmp_path / "model")
    config, weights = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    settings, tensors = json.loads(config.read_text()), load_file(weights)

    config.write_text("{")
    refused("is not JSON", CorruptFile)
    for changes, message in [
        ({"model_type": "bert"}, "type 'bert': use one of gpt2, llama"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"vocab_size": 54}, "embed_tokens.weight have shape"),
    ]:
        config.write_text(json.dumps(settings | changes))
        refused(message)
    del settings["hidden_size"]
    config.write_text(json.dumps(settings))
    refused("lacks 'hidden_size'")

    config.write_text(json.dumps(settings | {"hidden_size": 24}))
    del tensors["model.norm.weight"]
    save_file(tensors, weights)
    refused("lacks the weight model.norm.weight", CorruptFile)
    weights.write_bytes(b"damaged")
    refused("damaged safetensors", CorruptFile)
    weights.unlink()
    refused("holds no safetensors")
