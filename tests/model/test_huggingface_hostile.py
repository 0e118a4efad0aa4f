"""Hugging Face folders that are damaged or forged: one line each, and no file outside the folder is opened."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface import load_huggingface, save_huggingface
from napkin.model.huggingface.families import FAMILIES
from napkin.model.transformer import Transformer

CONFIGS = {
    "gpt2": ModelConfig(
        vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=3, positions="learned", norm="layer",
        feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
    ),
    "llama": ModelConfig(
        vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=40, norm_eps=1e-6,
        rope_theta=500.0, tie_embeddings=False,
    ),
    "gemma2": ModelConfig(
        vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=40, norm_eps=1e-6,
        feed_forward="geglu_tanh", block="sandwich", attention_window=4, full_attention_every=2, attention_softcap=2.0,
        logit_softcap=3.0, attention_scale=0.5,
    ),
    "mixtral": ModelConfig(
        vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=8, norm_eps=1e-6,
        tie_embeddings=False, n_experts=3,
    ),
    "deepseek_v3": ModelConfig(
        vocab_size=53, context_length=12, d_model=24, n_layers=2, n_heads=4, d_ff=8, norm_eps=1e-6,
        tie_embeddings=False, kv_lora_rank=8, q_lora_rank=6, rope_pairing="interleaved", n_experts=4, d_expert=8,
        n_shared_experts=1, n_dense_layers=1, router="sigmoid", router_bias=True, rope_scaling="yarn", rope_factor=2.0,
        rope_length=1.0, attention_scale=0.5,
    ),
}  # fmt: skip

VALUES: list[Any] = [
    None, True, "7", "", [], {}, -1, 0, 1.5, 10**9, 2**31, 2**63, 10**30, float("nan"), float("inf"), [[["x"]]],
]  # fmt: skip

NAMES = [
    "../../../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "",
    "../model/model.safetensors",
    "sub/../model.safetensors",
    "sub",
    "sub/model.safetensors",
    "missing.safetensors",
    "config.json",
    "\0",
    "model.safetensors\0.txt",
    "C:\\model.safetensors",
    "..\\model.safetensors",
    "\x1b[31m",
    "x" * 5000,
    "\udcff",
    "outside.safetensors",
    "circle.safetensors",
    "fifo.safetensors",
]

INDICES: list[Any] = [
    None, [], 7, "x", {}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}},
    {"weight_map": {"a": None}}, {"weight_map": {"a": ["b"]}}, {"weight_map": {"a": {"b": "c"}}},
]  # fmt: skip

TEXTS = [b"", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000, b"nul", b"{}", b"[]", b"7", b'"x"', b"9" * 10_000]


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_huggingface(Transformer(CONFIGS[request.param], seed=1), tmp_path / "model")
    return tmp_path / "model"


def loads_or_is_refused(folder: Path) -> bool:
    """Whether a model came of it; if not, in one line."""
    try:
        model = load_huggingface(folder)
    except NapkinError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1500
        return False
    assert sum(parameter.numel() for parameter in model.parameters()) < 10**6
    return True


def refused(folder: Path) -> None:
    assert not loads_or_is_refused(folder)


@pytest.mark.sampled(every=4)
def test_settings_of_any_type_and_size_are_refused_or_ignored(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    # Those that others share with Llama are read by the same code.
    shared = (
        {"model_type"} | set(FAMILIES["llama"].write(CONFIGS["llama"]))
        if settings["model_type"] in ("gemma2", "mixtral", "deepseek_v3")
        else set()
    )
    for name in settings.keys() - shared:
        for value in VALUES:
            (folder / "config.json").write_text(json.dumps(settings | {name: value}))
            loads_or_is_refused(folder)
        (folder / "config.json").write_text(json.dumps({key: settings[key] for key in settings if key != name}))
        loads_or_is_refused(folder)
    rope = {} if shared else settings.get("rope_parameters", {})
    for name in rope:
        for value in VALUES:
            (folder / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope | {name: value}}))
            loads_or_is_refused(folder)


def test_sizes_that_no_memory_holds_are_refused_before_anything_is_allocated(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    for name in (
        "vocab_size",
        "n_embd",
        "hidden_size",
        "n_layer",
        "num_hidden_layers",
        "intermediate_size",
        "n_inner",
        "num_local_experts",
    ):
        if name in settings:
            (folder / "config.json").write_text(json.dumps(settings | {name: settings[name] * 10**9}))
            refused(folder)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_files_that_are_not_what_they_should_be_are_refused(folder: Path, name: str, text: bytes) -> None:
    (folder / name).write_bytes(text)
    refused(folder)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_of_another_form_is_refused(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder)


@pytest.mark.sampled(every=3)
@pytest.mark.skipif(os.name == "nt", reason="links and fifos are not those of Windows")
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:30]))
def test_a_file_outside_the_folder_is_not_opened(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from napkin.model.huggingface import convert

    (folder / "sub").mkdir()
    whole = folder / "model.safetensors"
    (folder / "sub" / "model.safetensors").write_bytes(whole.read_bytes())
    (folder.parent / "outside.safetensors").write_bytes(whole.read_bytes())
    (folder / "outside.safetensors").symlink_to(folder.parent / "outside.safetensors")
    (folder / "circle.safetensors").symlink_to(folder / "circle.safetensors")
    os.mkfifo(folder / "fifo.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(whole), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened: list[Path] = []
    really = convert.safe_open  # pyright: ignore[reportPrivateImportUsage]

    def note_and_open(path: Path, framework: str) -> Any:
        opened.append(path)
        return really(path, framework)

    monkeypatch.setattr(convert, "safe_open", note_and_open)
    refused(folder)
    assert opened == ([folder / "config.json"] if name == "config.json" else [])


@pytest.mark.skipif(os.name == "nt", reason="links are not those of Windows")
def test_the_hubs_cache_whose_files_are_links_is_read(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"hash-of-{file.name}"))
    assert loads_or_is_refused(snapshot)


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda tensor: None,
    "empty": lambda tensor: tensor[:0],
    "scalar": lambda tensor: tensor.sum(),
    "flat": lambda tensor: tensor.flatten(),
    "deep": lambda tensor: tensor[None, None],
    "transposed": lambda tensor: tensor.reshape(*reversed(tensor.shape), 1).contiguous(),
    "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_other_shapes_are_refused(folder: Path, damage: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors)[::3]:
        damaged = DAMAGES[damage](tensors[name])
        if damaged is not None and damaged.shape == tensors[name].shape:
            continue
        changed = tensors | {name: damaged}
        save_file({key: value for key, value in changed.items() if value is not None}, folder / "model.safetensors")
        refused(folder)


@pytest.mark.sampled(every=2)
def test_bytes_changed_anywhere_are_refused_or_read(folder: Path) -> None:
    choose = random.Random(0)
    for name in ("config.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        for _ in range(60):
            changed = bytearray(whole)
            changed[choose.randrange(min(len(whole), 3000))] = choose.randrange(256)
            (folder / name).write_bytes(changed[: choose.choice([len(whole), choose.randrange(len(whole))])])
            loads_or_is_refused(folder)
        (folder / name).write_bytes(whole)
    assert loads_or_is_refused(folder)
