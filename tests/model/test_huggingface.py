import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from napkin.errors import CorruptFile, NapkinError
from napkin.inference.generation import generate
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.huggingface import load_huggingface, save_huggingface
from napkin.model.transformer import Transformer
from napkin.tokenizer import CharacterTokenizer, Tokenizer, train_bpe
from napkin.tokenizer.interchange import read_huggingface
from oracles import granite
from oracles.model_switches import disturbed

GPT2 = ModelConfig(
    vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=3, positions="learned", norm="layer",
    feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
)  # fmt: skip
LLAMA = ModelConfig(
    vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=40, norm_eps=1e-6,
    rope_theta=500.0, tie_embeddings=False,
)  # fmt: skip
# What a recipe has by default: a tied embedding, larger at the input.
DEFAULT = ModelConfig(vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2)
SCALED = dataclasses.replace(
    DEFAULT, embedding_scale=3.0, attention_scale=0.7, head_dim=10, tie_embeddings=False, rope_scaling="yarn",
    rope_factor=2.0,
)  # fmt: skip
SHAPES = pytest.mark.parametrize(
    "config", [GPT2, LLAMA, DEFAULT, SCALED], ids=["gpt2", "llama", "granite", "granite_scaled"]
)

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
        ({"mup_base_d_model": 8}, "mup_base_d_model 8"),
        ({"n_experts": 4}, "n_experts 4"),
        ({"attention_window": 4}, "attention_window 4"),
    ],
)
def test_a_model_that_the_families_do_not_know_is_refused(
    tmp_path: Path, changes: dict[str, Any], obstacle: str
) -> None:
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
        ({"model_type": "bert"}, "type 'bert': use one of gpt2, llama, granite"),
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


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False, "attention_scale": 0.7, "embedding_scale": 3.0, "head_dim": 10}]
)
def test_a_model_with_scales_is_saved_as_a_granite_by_its_published_equations(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    ours = disturbed(dataclasses.replace(DEFAULT, **changes))
    save_huggingface(ours, tmp_path / "model")
    expected = np.stack([granite.logits(tmp_path / "model", sequence) for sequence in random_tokens().numpy()])
    actual = ours.eval()(random_tokens()).detach().double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def their_granite(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GraniteConfig(
        vocab_size=53, max_position_embeddings=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, bos_token_id=None, eos_token_id=None, **settings,
    )  # fmt: skip
    return _disturbed(transformers.GraniteForCausalLM(config))


def test_a_granite_of_transformers_gives_the_same_logits_here(tmp_path: Path) -> None:
    theirs = their_granite(
        embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=8.0
    )
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs, length=32)


def test_scales_of_a_granite_that_napkin_lacks_are_read_into_the_weights(tmp_path: Path) -> None:
    save_huggingface(disturbed(DEFAULT), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"residual_multiplier": 0.22, "logits_scaling": 8.0}))
    expected = np.stack([granite.logits(tmp_path / "model", sequence) for sequence in random_tokens().numpy()])
    actual = load_huggingface(tmp_path / "model").eval()(random_tokens()).detach().double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    config.write_text(json.dumps(json.loads(config.read_text()) | {"logits_scaling": 0}))
    with pytest.raises(NapkinError, match="logits_scaling is 0"):
        load_huggingface(tmp_path / "model")


TEXTS = ["the cat sat on the mat", " looked at the dog 🦊", "Café\n\n1234's", ""]


def tokenizer() -> Tokenizer:
    return train_bpe(["the cat sat on the mat and looked at the dog. Café 🦊\n" * 5], vocab_size=300)


def saved_with_tokenizer(folder: Path) -> tuple[Transformer, Tokenizer]:
    ours = tokenizer()
    model = disturbed(dataclasses.replace(DEFAULT, vocab_size=ours.vocab_size, context_length=64))
    save_huggingface(model, folder, tokenizer=ours)
    return model, ours


def test_a_folder_has_the_tokenizer_and_says_where_texts_begin_and_end(tmp_path: Path) -> None:
    _, ours = saved_with_tokenizer(tmp_path / "model")
    end = ours.special_tokens["<|endoftext|>"]
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / "model" / name).read_text())
        assert (settings["bos_token_id"], settings["eos_token_id"]) == (end, end)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|endoftext|>", "<|endoftext|>")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    for text in TEXTS:
        assert theirs.encode(text).ids == [end, *ours.encode(text)]
        assert theirs.decode(ours.encode(text)) == text
    again = read_huggingface(tmp_path / "model" / "tokenizer.json", drop_template=True)
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_transformers_generates_the_same_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, ours = saved_with_tokenizer(tmp_path / "model")
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    end = ours.special_tokens["<|endoftext|>"]
    for text in TEXTS:
        inputs = their_tokenizer(text, return_tensors="pt")
        start = [end, *ours.encode(text)]
        assert inputs["input_ids"].tolist() == [start]
        with torch.no_grad():
            torch.testing.assert_close(
                theirs(inputs["input_ids"]).logits, model.eval()(torch.tensor([start])), rtol=1e-4, atol=1e-4
            )
        found = theirs.generate(**inputs, max_new_tokens=30)[0]
        expected = list(generate(model, start, 30, Sampling(temperature=0), stop=end))
        assert their_tokenizer.decode(found, skip_special_tokens=True) == text + ours.decode(expected)


def test_a_tokenizer_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    config = dataclasses.replace(DEFAULT, vocab_size=400)
    for other, changes, message in [
        (tokenizer(), {"vocab_size": 40}, "the tokenizer has 291 ids, the model 40"),
        (train_bpe(["the cat"], vocab_size=260, special_tokens=["<|x|>"]), {}, "no special token '<|endoftext|>'"),
        (CharacterTokenizer.train(["the cat"], ["<|endoftext|>"]), {}, "has no merges"),
    ]:
        with pytest.raises(NapkinError, match=re.escape(message)):
            save_huggingface(Transformer(dataclasses.replace(config, **changes)), tmp_path / "model", tokenizer=other)
        assert not list(tmp_path.iterdir())
