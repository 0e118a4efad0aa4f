"""A model opened from a folder: model, tokenizer, chat template and settings together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import napkin
from napkin.data.corpus import Document
from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import mean_loss
from napkin.inference.generation import generate
from napkin.inference.loaded_model import LoadedModel, load
from napkin.inference.settings import Sampling, read_generation_config
from napkin.model.config import ModelConfig
from napkin.model.huggingface import save_huggingface
from napkin.model.transformer import Transformer
from napkin.tokenizer import Tokenizer, train_bpe
from oracles.model_switches import disturbed

TEXT = "the cat sat on the mat and looked at the dog. Café 🦊\n"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Transformer, Tokenizer]:
    tokenizer = train_bpe([TEXT * 5], vocab_size=300)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=64, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2,
        block="sandwich", feed_forward="geglu_tanh", attention_window=8, full_attention_every=2, logit_softcap=3.0,
    )  # fmt: skip
    model = disturbed(config).eval()
    save_huggingface(model, tmp_path / "model", tokenizer=tokenizer)
    return tmp_path / "model", model, tokenizer


def opened(folder: Path) -> LoadedModel:
    found = napkin.load(folder)
    assert isinstance(found, LoadedModel)
    return found


@pytest.mark.thorough
def test_a_folder_generates_what_its_model_and_tokenizer_do(saved: tuple[Path, Transformer, Tokenizer]) -> None:
    folder, model, tokenizer = saved
    end = tokenizer.special_tokens["<|endoftext|>"]
    found = opened(folder)
    assert found.start_ids == (end,)
    assert found.sampling.stop_ids == (end,)
    for prompt in ("the cat", "", "Café 🦊"):
        start = [end, *tokenizer.encode(prompt)]
        expected = tokenizer.decode(list(generate(model, start, 40, Sampling(temperature=0), stop=end)))
        assert found.generate(prompt, max_new_tokens=40) == expected
        drawn = tokenizer.decode(list(generate(model, start, 40, Sampling(seed=3), stop=end)))
        assert found.generate(prompt, max_new_tokens=40, sampling=Sampling(seed=3)) == drawn


def test_a_conversation_is_answered_by_its_template(saved: tuple[Path, Transformer, Tokenizer]) -> None:
    folder, model, tokenizer = saved
    with pytest.raises(NapkinError, match="has no chat template"):
        opened(folder).chat([])
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }} the mat{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    end = tokenizer.special_tokens["<|endoftext|>"]
    start = [end, *tokenizer.encode("the cat sat on the mat")]
    expected = tokenizer.decode(list(generate(model, start, 30, Sampling(temperature=0), stop=end)))
    messages = [{"role": "user", "content": "the cat sat on"}]
    assert opened(folder).chat(messages, max_new_tokens=30) == expected
    # What a message says is text, also where it is that of a special token.
    said = "sat<|endoftext|>on"
    start = [end, *tokenizer.encode(said + " the mat")]
    expected = tokenizer.decode(list(generate(model, start, 30, Sampling(temperature=0), stop=end)))
    assert opened(folder).chat([{"role": "user", "content": said}], max_new_tokens=30) == expected


def test_words_of_a_sentencepiece_tokenizer_keep_their_spaces(tmp_path: Path) -> None:
    words = ["\u2581", "\u2581the", "\u2581cat", "the", "\n", "t", "h", "e", "c", "a", "é"]
    vocab = {name: i for i, name in enumerate(["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    space, back = ({"String": " "}, "\u2581"), ({"String": "\u2581"}, " ")
    replace, undo = ({"type": "Replace", "pattern": each[0], "content": each[1]} for each in (space, back))
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    content = {
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
        "added_tokens": [{"id": 0, "content": "<s>", "normalized": False, "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "decoder": {"type": "Sequence", "decoders": [undo, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
    }
    config = ModelConfig(vocab_size=len(vocab), context_length=64, d_model=24, n_layers=2, n_heads=4)
    model = disturbed(config).eval()
    save_huggingface(model, tmp_path / "model", tokenizer=train_bpe([TEXT * 5], vocab_size=len(vocab)))
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content))
    found = opened(tmp_path / "model")
    start = [0, vocab["\u2581"], vocab["c"], vocab["a"], vocab["<0x7A>"], vocab["é"]]
    assert [*found.start_ids, *found.tokenizer.encode("cazé")] == start
    sampling = Sampling(temperature=1, seed=3, stop_ids=found.sampling.stop_ids)
    drawn = list(generate(model, start, 40, sampling))
    expected = b"".join(found.tokenizer.vocabulary[i] for i in drawn).decode(errors="replace")
    assert found.generate("cazé", max_new_tokens=40, sampling=sampling) == expected


def test_a_folder_is_scored_evaluated_exported_and_served(
    saved: tuple[Path, Transformer, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, tokenizer = saved
    end, found = tokenizer.special_tokens["<|endoftext|>"], opened(folder)
    ids = [end, *tokenizer.encode("the cat"), *tokenizer.encode(" sat")]
    n = len(tokenizer.encode(" sat"))
    logprobs = model(torch.tensor([ids])).detach()[0, -n - 1 : -1].double().log_softmax(-1)
    expected = float(logprobs[range(n), ids[-n:]].sum())
    by_text, by_ids = found.score([("the cat", " sat"), (ids[:-n], ids[-n:])])
    assert by_text.total == pytest.approx(expected, abs=1e-4)
    assert by_ids == by_text
    napkin.write_token_file(tmp_path / "held-out.tokens", [Document("text", TEXT * 9)], tokenizer)
    evaluation = found.evaluate(tmp_path / "held-out.tokens")
    assert (evaluation.step, evaluation.bytes) == (0, len((TEXT * 9).encode()))
    direct = mean_loss(model, napkin.TokenFile.open(tmp_path / "held-out.tokens"), found.precision, stride=32)
    assert evaluation.loss == pytest.approx(direct, rel=1e-6)
    with pytest.raises(NapkinError, match=r"^'.*model' is not a run: name a folder that"):
        found.evaluate()
    found.export(tmp_path / "again")
    again = opened(tmp_path / "again")
    assert again.fingerprint == found.fingerprint
    assert again.generate("the cat") == found.generate("the cat")
    asked: list[Any] = []
    monkeypatch.setattr(napkin.serving, "serve", lambda model, engine, **how: asked.append((model, engine, how)))
    found.serve(port=7, max_running=3)
    ((model_served, engine, how),) = asked
    assert (model_served, engine.model, engine.scheduler.max_running, how) == (found, found.model, 3, {"port": 7})


def test_weights_are_read_when_something_needs_them(saved: tuple[Path, Transformer, Tokenizer]) -> None:
    folder, model, _ = saved
    found = opened(folder)
    assert repr(found) == f"LoadedModel('{folder}', {sum(each.numel() for each in model.parameters()):,} parameters)"
    (folder / "model.safetensors").write_bytes(b"damaged")
    again = opened(folder)
    assert again.encode_prompt("the cat") == found.encode_prompt("the cat")
    with pytest.raises(NapkinError, match=r"model': damaged safetensors"):
        again.generate("the cat")


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (True, {}, True),
        (True, {"bos_token": "<|endoftext|>", "add_bos_token": True}, True),
        (True, {"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": False}, False),
        (True, {"bos_token": "<s>", "add_bos_token": False}, True),
        (False, {"bos_token": "<|endoftext|>", "add_bos_token": True}, True),
        (False, {"bos_token": "<|endoftext|>"}, False),
        (False, {"bos_token": None, "add_bos_token": True}, False),
    ],
)
def test_every_way_to_open_a_folder_begins_and_ends_texts_alike(
    saved: tuple[Path, Transformer, Tokenizer], template: bool, settings: dict[str, Any], expected: bool
) -> None:
    folder, _, tokenizer = saved
    if not template:
        content = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.special_tokens["<|endoftext|>"]
    loaded, served = opened(folder), load(folder)
    assert loaded.start_ids == served.start_ids == (end,) * expected
    assert loaded.sampling.stop_ids == served.stop_ids == (end,)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Sampling(temperature=0, top_p=1, stop_ids=(7,))),
        ({"temperature": 0.3}, Sampling(temperature=0, top_p=1, stop_ids=(7,))),
        ({"do_sample": True, "eos_token_id": [3, 4]}, Sampling(temperature=1, top_p=1, top_k=50, stop_ids=(3, 4))),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.05, "eos_token_id": 2},
            Sampling(temperature=0.6, top_p=0.9, min_p=0.05, stop_ids=(2,)),
        ),
        ({"repetition_penalty": 1.05}, Sampling(temperature=0, top_p=1, repetition_penalty=1.05, stop_ids=(7,))),
    ],
)
def test_generation_settings_are_those_of_the_file(tmp_path: Path, settings: dict[str, Any], expected: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    if settings:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert read_generation_config(tmp_path) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": float("nan")},
        {"temperature": "x"},
        {"top_k": -1},
        {"top_p": 7},
        {"eos_token_id": -1},
        {"eos_token_id": [1, "x"]},
        {"do_sample": 3},
        {"min_p": float("inf")},
        {"repetition_penalty": 0},
    ],
    ids=str,
)
def test_generation_settings_out_of_range_are_refused_in_one_line(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(NapkinError, match=r"generation_config\.json'") as caught:
        read_generation_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"post_processor": 7}'),
        ("tokenizer.json", '{"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": 1}]}}'),
        ("config.json", "{"),
        ("generation_config.json", "7"),
        ("tokenizer_config.json", "nul"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    saved: tuple[Path, Transformer, Tokenizer], name: str, content: str
) -> None:
    (saved[0] / name).write_text(content)
    with pytest.raises(NapkinError) as caught:
        napkin.load(saved[0])
    assert "\n" not in str(caught.value)


def test_completions_take_memory_for_their_own_length_and_not_for_the_whole_context() -> None:
    tokenizer = train_bpe([TEXT * 5], vocab_size=300)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=2**20, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1
    )
    found = LoadedModel.of(disturbed(config).eval(), tokenizer)
    for length, pool in ((5, 256), (300, 512), (7, 512)):
        prompt = (tokenizer.encode(TEXT) * 20)[:length]
        expected = generate(found.model, prompt, 4, Sampling(temperature=0), stop=found.stop_ids[0])
        assert dict(found.complete([prompt], 4, [])) == {0: tokenizer.decode(list(expected))}
        # In blocks of 16 tokens, for 16 sequences: the whole context would be 1 GB.
        engine = found._engine
        assert engine is not None
        assert engine.stats().blocks_total * 16 == 16 * pool
