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
from oracles import huggingface_models
from oracles.model_switches import disturbed
from peers import peer

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
MIXTRAL = dataclasses.replace(LLAMA, n_experts=5, attention_window=4)
GEMMA2 = dataclasses.replace(
    LLAMA, tie_embeddings=True, block="sandwich", feed_forward="geglu_tanh", head_dim=8, attention_scale=20**-0.5,
    attention_window=4, full_attention_every=2, attention_softcap=2.0, logit_softcap=3.0,
)  # fmt: skip
RELATIVES = {
    "llama": LLAMA,
    "granite": DEFAULT,
    "granite scaled": SCALED,
    "mistral": dataclasses.replace(LLAMA, attention_window=4),
    "mixtral": MIXTRAL,
    "qwen2": dataclasses.replace(LLAMA, biases="qkv"),
    "qwen2 windows": dataclasses.replace(LLAMA, biases="qkv", attention_window=4, full_attention_every=2),
    "qwen3": dataclasses.replace(LLAMA, qk_norm="head", head_dim=10),
    "olmo2": dataclasses.replace(LLAMA, qk_norm="all_heads", block="reordered"),
    "gemma2": GEMMA2,
}
SHAPES = pytest.mark.parametrize("config", [GPT2, *RELATIVES.values()], ids=["gpt2", *RELATIVES])

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
    transformers = peer("transformers")
    config = transformers.GPT2Config(
        vocab_size=53, n_positions=12, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None, **settings
    )
    return _disturbed(transformers.GPT2LMHeadModel(config))


def their_llama(rope: dict[str, Any], **settings: Any) -> Any:
    transformers = peer("transformers")
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
        actual = ours(tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.peers
@pytest.mark.parametrize(
    "settings", [{}, {"activation_function": "gelu"}, {"activation_function": "relu", "n_inner": 40}]
)
def test_a_gpt2_of_transformers_gives_the_same_logits_here(tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = their_gpt2(**settings)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs)


@pytest.mark.peers
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_llama_of_transformers_gives_the_same_logits_here(tmp_path: Path, rope: dict[str, Any], tied: bool) -> None:
    theirs = their_llama(rope, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs, length=32)


@pytest.mark.peers
@SHAPES
def test_a_model_of_ours_gives_the_same_logits_in_transformers(tmp_path: Path, config: ModelConfig) -> None:
    transformers = peer("transformers")
    ours = disturbed(config)
    save_huggingface(ours, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert_same_logits(ours.eval(), theirs.eval())


@SHAPES
def test_a_saved_model_reads_back_bit_for_bit(tmp_path: Path, config: ModelConfig) -> None:
    ours = Transformer(config, seed=3)
    save_huggingface(ours, tmp_path / "model")
    again = load_huggingface(tmp_path / "model")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_loaded_model_computes_without_dropout(tmp_path: Path) -> None:
    ours = Transformer(dataclasses.replace(GPT2, dropout=0.5), seed=3)
    save_huggingface(ours, tmp_path / "model")
    again = load_huggingface(tmp_path / "model")
    assert again.config.dropout == 0.5
    assert torch.equal(again(random_tokens()), ours.eval()(random_tokens()))
    assert not torch.equal(again.train()(random_tokens()), ours(random_tokens()))


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
        ({"qk_norm": "head", "biases": "qkv"}, "qk_norm 'head'|biases 'qkv'"),
        ({"qk_norm": "all_heads"}, "qk_norm 'all_heads'"),
        ({"rope_pairing": "interleaved"}, "rope_pairing 'interleaved'"),
        ({"mup_base_d_model": 8}, "mup_base_d_model 8"),
        ({"n_experts": 4, "n_shared_experts": 1}, "n_shared_experts 1"),
        ({"n_experts": 4, "normalize_expert_weights": False}, "normalize_expert_weights False"),
        ({"attention_window": 4, "full_attention_every": 2}, "full_attention_every 2"),
        ({"logit_softcap": 4.0}, "logit_softcap 4.0"),
    ],
)
def test_a_model_that_the_families_do_not_know_is_refused(
    tmp_path: Path, changes: dict[str, Any], obstacle: str
) -> None:
    with pytest.raises(NapkinError, match=obstacle):
        save_huggingface(Transformer(dataclasses.replace(LLAMA, **changes)), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match=r"exists.*overwritten"):
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
        ({"model_type": "bert"}, "type 'bert': use one of gpt2, llama, granite, mistral"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "has no factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ({"max_position_embeddings": 2**23, "head_dim": 64}, "rotary tables would have more than"),
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


def assert_logits_of_folder(model: Transformer, folder: Path, length: int) -> None:
    tokens = random_tokens(length)
    expected = np.stack([huggingface_models.logits(folder, sequence) for sequence in tokens.numpy()])
    actual = model.eval()(tokens).detach().double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", huggingface_models.FOLDERS)
def test_a_folder_gives_the_logits_of_its_familys_published_equations(tmp_path: Path, name: str) -> None:
    huggingface_models.write_random(tmp_path / "model", huggingface_models.FOLDERS[name])
    model = load_huggingface(tmp_path / "model")
    assert_logits_of_folder(model, tmp_path / "model", 32)
    # Where all of its parts are in the config here, it can be saved again.
    if name != "granite":
        save_huggingface(model, tmp_path / "again")
        assert_logits_of_folder(model, tmp_path / "again", 32)


@pytest.mark.parametrize("name", RELATIVES)
def test_a_model_is_saved_as_a_family_by_its_published_equations(tmp_path: Path, name: str) -> None:
    ours = disturbed(RELATIVES[name])
    save_huggingface(ours, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings["model_type"] == name.partition(" ")[0]
    if settings["rope_parameters"]["rope_type"] == "default":
        assert_logits_of_folder(ours, tmp_path / "model", 12)


def their_granite(**settings: Any) -> Any:
    transformers = peer("transformers")
    config = transformers.GraniteConfig(
        vocab_size=53, max_position_embeddings=32, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, bos_token_id=None, eos_token_id=None, **settings,
    )  # fmt: skip
    return _disturbed(transformers.GraniteForCausalLM(config))


THEIRS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 5},
    "Mixtral": {"num_local_experts": 5, "sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {"head_dim": 10},
    "Olmo2": {},
    "Gemma2": {
        "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0, "attn_implementation": "eager",
    },
}  # fmt: skip


def their_relative(family: str, **settings: Any) -> Any:
    transformers = peer("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=53, max_position_embeddings=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **{**THEIRS[family], **settings},
    )  # fmt: skip
    return _disturbed(getattr(transformers, f"{family}ForCausalLM")(config))


@pytest.mark.peers
@pytest.mark.parametrize("family", THEIRS)
def test_a_relative_of_llama_of_transformers_gives_the_same_logits_here(tmp_path: Path, family: str) -> None:
    theirs = their_relative(family)
    theirs.save_pretrained(tmp_path, max_shard_size="20kB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_logits(load_huggingface(tmp_path), theirs, length=33)


@pytest.mark.peers
def test_a_granite_of_transformers_gives_the_same_logits_here(tmp_path: Path) -> None:
    theirs = their_granite(
        embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=8.0
    )
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs, length=32)


def test_a_granite_whose_logits_are_divided_by_nothing_is_refused(tmp_path: Path) -> None:
    settings = {"model_type": "granite", "logits_scaling": 0}
    huggingface_models.write_random(tmp_path / "model", settings)
    with pytest.raises(NapkinError, match="logits_scaling is 0"):
        load_huggingface(tmp_path / "model")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "only a fixed period"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers: use .* each of 3"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "one of 'chunked_attention'"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"final_logit_softcapping": float("inf")}, "logit_softcap is infinite"),
    ],
)
def test_a_gemma_that_is_not_supported_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    huggingface_models.write_random(tmp_path / "model", huggingface_models.FOLDERS["gemma2"] | settings)
    with pytest.raises(NapkinError, match=message):
        load_huggingface(tmp_path / "model")


def test_weights_can_be_loaded_in_bf16(tmp_path: Path) -> None:
    huggingface_models.write_random(tmp_path / "model", huggingface_models.FOLDERS["gemma2"])
    halves = load_huggingface(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    for name, whole in load_huggingface(tmp_path / "model").state_dict().items():
        assert torch.equal(halves[name], whole.bfloat16())


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


@pytest.mark.peers
def test_transformers_generates_the_same_text(tmp_path: Path) -> None:
    transformers = peer("transformers")
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
