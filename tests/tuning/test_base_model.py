"""The model that tuning starts from: the weights of a run or of a Hugging Face folder, and what is refused."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

import napkin
from napkin.chats.chat_format import Message
from napkin.chats.chat_template import ChatTemplate
from napkin.errors import NapkinError
from napkin.inference.loaded_model import LoadedModel, load
from napkin.model.config import ModelConfig
from napkin.model.huggingface import save_huggingface
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.runs.run_folder import RunFolder, conversation_files
from napkin.tokenizer import train_bpe
from napkin.training.run import train
from napkin.tuning.method import open_base, reference_model
from oracles.model_switches import disturbed
from oracles.tiny_run import tiny_recipe, write_tiny_text

TEXT = "the cat sat on the mat and looked at the dog.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    write_tiny_text(folder)
    recipe = tiny_recipe(folder, steps=4, checkpoint_every=2, evaluate_every=4)
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, average_decay=0.5))
    train(recipe, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("huggingface") / "model"
    tokenizer = train_bpe([TEXT * 5], vocab_size=300)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=64, d_model=24, n_layers=2, n_heads=4)
    save_huggingface(disturbed(config), path, tokenizer=tokenizer)
    (path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    return path


def loaded(start: LoadedModel) -> Transformer:
    model = Transformer(start.config, seed=7)
    start.load_into(model)
    return model


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.thorough
def test_a_start_has_the_weights_that_its_folder_is_used_with(run: Path, folder: Path) -> None:
    for path in (run, folder):
        start = open_base(path)
        assert equal(loaded(start), napkin.load(path).model)
        reference = reference_model(start, Precision("fp32", "cpu"))
        assert equal(reference, napkin.load(path).model)
        assert not reference.training
        assert not napkin.load(path).model.training
        assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_a_fingerprint_is_that_of_the_weights(run: Path, folder: Path, tmp_path: Path) -> None:
    for path in (run, folder):
        shutil.copytree(path, copy := tmp_path / path.name)
        assert open_base(copy).fingerprint == open_base(path).fingerprint
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other")
    assert open_base(tmp_path / "model").fingerprint != open_base(folder).fingerprint
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    shutil.rmtree(newest)
    assert open_base(tmp_path / "run").fingerprint != open_base(run).fingerprint


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    newest, before = sorted((tmp_path / "run" / "checkpoints").iterdir(), reverse=True)
    (newest / "model.safetensors").write_bytes(b"damaged")
    checkpoint = open_base(tmp_path / "run").checkpoint
    assert checkpoint is not None
    assert checkpoint.path == before
    shutil.rmtree(newest)
    expected = napkin.load(tmp_path / "run").model
    assert equal(loaded(open_base(tmp_path / "run")), expected)


def test_texts_of_a_tuned_run_are_those_of_its_start(folder: Path, tmp_path: Path) -> None:
    start = open_base(folder)
    recipe = dataclasses.replace(tiny_recipe(tmp_path), model=start.config)
    RunFolder.create(tmp_path / "run", recipe, start.tokenizer, conversation_files(start.conversation_file()))
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir()
    again = open_base(tmp_path / "run")
    assert (again.start_ids, again.stop_ids) == (start.start_ids, start.stop_ids)
    assert isinstance(again.chat_template, ChatTemplate)
    message = Message("user", "the cat")
    assert again.chat_format.encode([message]) == load(folder).chat_format.encode([message])


def test_what_is_not_a_start_is_named_in_one_line(run: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model_type": "bert"}')
    shutil.copy(folder / "tokenizer.json", tmp_path / "foreign")
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "quantized.json").write_text("{}")
    RunFolder.create(tmp_path / "new", RunFolder(run).recipe, RunFolder(run).tokenizer)
    for name, message in {
        "missing": "neither a run nor a Hugging Face folder, it does not exist",
        "empty": "neither a run nor a Hugging Face folder",
        "foreign": "holds a model of type 'bert'",
        "quantized": "is quantized",
        "new": "has no checkpoint yet",
    }.items():
        with pytest.raises(NapkinError, match=message) as caught:
            open_base(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(NapkinError, match=r"model.*start"):
        open_base("")


def test_a_model_of_another_config_or_tokenizer_is_refused(run: Path, folder: Path) -> None:
    start = open_base(run)
    other = Transformer(dataclasses.replace(start.config, norm_eps=1e-3))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(NapkinError, match=r"model.norm_eps.*0.001.*'.*'"):
        start.load_into(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(NapkinError, match="another tokenizer"):
        start.refuse_other_tokenizer(open_base(folder).tokenizer, "the data")
    start.refuse_other_tokenizer(open_base(run).tokenizer, "the data")
    # Dropout, initialization and the implementation of attention compute the same function of the weights.
    start.load_into(Transformer(dataclasses.replace(start.config, dropout=0.1, attention="plain", init="fixed")))
