"""Adapters in peft's files: what they make of the model that they are for, by its definition and by peft."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from model.test_adapters import CONFIGS, TOKENS, adapted
from napkin.errors import NapkinError
from napkin.model.adapters import adapted_layers, adapters_off, merge_adapters
from napkin.model.huggingface import load_huggingface, save_adapters, save_huggingface
from napkin.model.transformer import Transformer
from peers import peer

MODULES = {
    "all": ("attention", "mlp"),
    "query and value": ("attention.query", "attention.value", "mlp.down"),
    "output": ("attention.output",),
    "head": ("head",),
}
CASES = [("llama", "all"), ("llama", "query and value"), ("llama", "head"), ("gpt2", "all"), ("gpt2", "output")]


def written(folder: Path, config: str, modules: str, *, with_magnitude: bool) -> Transformer:
    """A model whose adapters are in `folder`/adapter and are for `folder`/base."""
    chosen = CONFIGS[config]
    if config == "gpt2":
        # GPT-2's head is its embedding, which is not scaled.
        changes: Any = {"tie_embeddings": True, "embedding_scale": 1.0}
        chosen = type(chosen)(**{**vars(chosen), **changes})
    model = adapted(chosen, MODULES[modules], with_magnitude=with_magnitude, dtype=torch.float32)
    plain = Transformer(chosen)
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if ".adapter." not in name})
    save_huggingface(plain, folder / "base")
    save_adapters(model, folder / "adapter", base=folder / "base")
    return model


def merged_by_definition(folder: Path) -> Path:
    """The base with its adapters merged, by names and numbers in the files alone."""
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    weights = load_file(folder / "base" / "model.safetensors")
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    layers = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight")}
    named = {f"base_model.model.{name.removesuffix('.weight')}" for name in weights}
    ends = tuple(f".{target}" for target in config["target_modules"])
    assert layers == {name for name in named if name.endswith(ends)}
    for layer in layers:
        stored = f"{layer.removeprefix('base_model.model.')}.weight"
        weight = weights[stored].astype(np.float64)
        weight = weight.T if config["fan_in_fan_out"] else weight
        a, b = (tensors[f"{layer}.lora_{which}.weight"].astype(np.float64) for which in "AB")
        patterns = [
            next((value for name, value in config[pattern].items() if layer.endswith(f".{name}")), config[default])
            for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        ]
        assert len(a) == patterns[0]
        whole = weight + patterns[1] / patterns[0] * b @ a
        if config["use_dora"]:
            length = tensors[f"{layer}.lora_magnitude_vector"] / np.sqrt((whole**2).sum(axis=1))
            whole = whole * length[:, None]
        weights[stored] = np.ascontiguousarray(whole.T if config["fan_in_fan_out"] else whole).astype(np.float32)
    shutil.copytree(folder / "base", folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    return folder / "merged"


@pytest.mark.parametrize(("config", "modules"), CASES)
@pytest.mark.parametrize("with_magnitude", [False, True])
def test_files_of_adapters_say_what_merging_does(
    tmp_path: Path, config: str, modules: str, with_magnitude: bool
) -> None:
    model = written(tmp_path, config, modules, with_magnitude=with_magnitude)
    expected = load_huggingface(merged_by_definition(tmp_path))
    merge_adapters(model)
    for name, tensor in model.state_dict().items():
        assert (tensor - expected.state_dict()[name]).abs().max() < 1e-5, name


@pytest.mark.peers
@pytest.mark.parametrize(("config", "modules"), CASES)
@pytest.mark.parametrize("with_magnitude", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_peft_computes_the_same(tmp_path: Path, config: str, modules: str, with_magnitude: bool) -> None:
    peft = peer("peft")
    transformers = peer("transformers")
    model = written(tmp_path, config, modules, with_magnitude=with_magnitude).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=2e-4)
        with adapters_off(model), theirs.disable_adapter():
            assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=2e-4)


def test_a_factor_of_a_family_is_that_of_its_adapters(tmp_path: Path) -> None:
    """Granite multiplies what layers write: here the weights hold that, and there the adapters do not."""
    model = written(tmp_path, "llama", "output", with_magnitude=False)
    settings = json.loads((tmp_path / "base" / "config.json").read_text())
    settings |= {
        "model_type": "granite", "residual_multiplier": 0.5, "attention_multiplier": 6**-0.5,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    }  # fmt: skip
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings))
    save_adapters(model, tmp_path / "other", base=tmp_path / "base")
    plain, divided = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "other"))
    for name, tensor in plain.items():
        np.testing.assert_allclose(divided[name], tensor * (2.0 if "lora_B" in name else 1.0), rtol=1e-6)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match=r"model.*adapters"):
        save_adapters(Transformer(CONFIGS["llama"]), tmp_path / "adapter")
    model = adapted(CONFIGS["mup"], ("attention",), with_magnitude=False, dtype=torch.float32)
    with pytest.raises(NapkinError, match=r"Hugging.*folder"):
        save_adapters(model, tmp_path / "adapter")
    assert list(adapted_layers(model))
    (tmp_path / "adapter").mkdir()
    with pytest.raises(NapkinError, match=r"exists.*overwritten"):
        save_adapters(model, tmp_path / "adapter")
