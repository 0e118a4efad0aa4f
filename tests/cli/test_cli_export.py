"""`napkin export`: a run's newest model and its tokenizer as a Hugging Face folder."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import load_file

from cli.conftest import Napkin
from napkin.chats.chat_format import Message
from napkin.inference.loaded_model import load
from napkin.model import load_huggingface
from oracles import huggingface_models
from peers import peer

FILES = [
    "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip


def test_a_run_of_the_default_architecture_leaves_as_a_granite(place: Path, napkin: Napkin) -> None:
    done = napkin("export", "runs/tiny", "--out", "out/model", "--json")
    assert (done.status, done.err) == (0, "")
    told = json.loads(done.out)
    assert (told["folder"], told["step"], sorted(told["files"])) == ("out/model", 6, FILES)
    assert told["files"] == {path.name: path.stat().st_size for path in Path("out/model").iterdir()}

    trained = load("runs/tiny")
    again = load_huggingface("out/model")
    assert all(
        torch.equal(again.state_dict()[name], tensor.cpu()) for name, tensor in trained.model.state_dict().items()
    )
    ids = tokenizers.Tokenizer.from_file("out/model/tokenizer.json").encode("fox 7 jumps").ids
    assert ids == [trained.tokenizer.special_tokens["<|endoftext|>"], *trained.tokenizer.encode("fox 7 jumps")]
    with torch.no_grad():
        actual = again.eval()(torch.tensor([ids]))[0].double().numpy()
    np.testing.assert_allclose(
        huggingface_models.logits(Path("out/model"), np.array(ids)), actual, rtol=1e-5, atol=1e-5
    )


@pytest.mark.peers
def test_transformers_continues_a_text_as_napkin_does(place: Path, napkin: Napkin) -> None:
    transformers = peer("transformers")
    assert napkin("export", "runs/tiny", "--out", "model").status == 0
    prompts = ["fox", "Document a1: ", ""]
    done = napkin("generate", "runs/tiny", "--temperature", "0", "--tokens", "8", "--json", "--prompts", *prompts)
    completions = [each["completion"] for each in json.loads(done.out)]
    continued = transformers.pipeline("text-generation", model="model", max_new_tokens=8, do_sample=False)
    assert [continued(prompt, return_full_text=False)[0]["generated_text"] for prompt in prompts] == completions


@pytest.mark.thorough
def test_a_tokenizer_that_transformers_has_no_file_for_can_be_left_out(place: Path, napkin: Napkin) -> None:
    for command in (
        "tokenizer train docs --kind characters --out c/tokenizer.json",
        "tokenizer encode docs --tokenizer c/tokenizer.json --out c",
        "train tiny.toml --data.tokenizer c/tokenizer.json --data.train c/train.tokens "
        "--data.validation c/validation.tokens --run runs/c",
    ):
        assert napkin(*command.split()).status == 0
    refused = napkin("export", "runs/c", "--out", "model")
    assert refused.status == 2
    assert refused.err.count("\n") == 1
    assert "--weights-only" in refused.err
    assert not Path("model").exists()
    done = napkin("export", "runs/c", "--out", "model", "--weights-only")
    assert done.status == 0
    assert sorted(path.name for path in Path("model").iterdir()) == ["config.json", "model.safetensors"]
    assert done.out.startswith("wrote model: step 6, ")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("export runs/tiny", "export: no folder to write is named: give --out FOLDER"),
        ("export runs/tiny --out docs", "'docs' exists and is not overwritten"),
        ("export docs --out new/model", "'docs'"),
        ("export nowhere --out new/model", "'nowhere'"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    refusal: Callable[..., str], command: str, message: str
) -> None:
    assert message in refusal(*command.split())


def test_a_model_of_another_architecture_is_refused_and_leaves_no_folder(place: Path, napkin: Napkin) -> None:
    assert (
        napkin("train", "tiny.toml", "--model.norm", "none", "--training.steps", "1", "--run", "runs/none").status == 0
    )
    done = napkin("export", "runs/none", "--out", "out/model")
    assert done.status == 2
    assert "has norm 'none': it cannot be saved" in done.err
    assert not Path("out").exists()


@pytest.mark.thorough
def test_a_tuned_run_leaves_merged_or_as_the_adapters_that_it_trained(place: Path, napkin: Napkin) -> None:
    chat = {"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]}
    Path("chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 4)
    Path("template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tune = "tune sft --tuning.start model --data.train chats.jsonl --adapter.kind lora --training.steps 2 --run runs/t"
    more = (
        "--optimizer.learning-rate 0.01 --optimizer.warmup-steps 0 --training.batch-size 2 --adapter.rank 2 "
        "--tuning.chat-template template.jinja"
    )
    assert napkin("export", "runs/tiny", "--out", "model").status == 0
    done = napkin(*tune.split(), *more.split())
    assert done.status == 0, done.err
    for command in ("export runs/t --out merged", "export runs/t --adapter --out adapter"):
        done = napkin(*command.split())
        assert done.status == 0, done.err
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("model", 2)

    # What the chat format and the ends of texts are is exported too: tuning may go on from there.
    opened, again = load("runs/t"), load("merged")
    message = [Message("user", "fox")]
    assert opened.chat_format.encode(message) == again.chat_format.encode(message)
    assert (opened.start_ids, opened.stop_ids) == (again.start_ids, again.stop_ids)
    assert all(
        torch.equal(tensor, again.model.state_dict()[name]) for name, tensor in opened.model.state_dict().items()
    )
    # The adapters are what merging has changed.
    base, merged = load_file("model/model.safetensors"), load_file("merged/model.safetensors")
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    tensors = load_file("adapter/adapter_model.safetensors")
    prefix = "base_model.model."
    assert changed == {
        f"{name.removeprefix(prefix).removesuffix('.lora_A.weight')}.weight"
        for name in tensors
        if name.endswith("lora_A.weight")
    }
    assert napkin("export", "runs/tiny", "--adapter", "--out", "none").err.startswith("export: 'runs/tiny' has trained")
