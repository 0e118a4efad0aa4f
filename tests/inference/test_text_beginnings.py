"""The token that a text without a prompt follows: what a model's files say, as transformers and lm-eval read them."""

import json
from pathlib import Path
from typing import Any

import pytest

import napkin
from napkin.chats.chat_template import ChatTemplate
from napkin.inference import LoadedModel
from napkin.model.config import ModelConfig
from napkin.tokenizer import train_bpe
from oracles.model_switches import disturbed
from peers import peer

TEXT = "the cat sat on the mat, the dog sat on the log. " * 20
BOS, EOS = "<|im_start|>", "<|im_end|>"
TOKENIZER = train_bpe([TEXT], 300, special_tokens=["<|endoftext|>", BOS, EOS])
TOKENS = TOKENIZER.special_tokens
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", {"eos_token": EOS})


def model_of(start_ids: tuple[int, ...], bos_id: int | None, template: ChatTemplate | None = None) -> LoadedModel:
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size, context_length=64, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32,
        norm_eps=1e-5, tie_embeddings=True, embedding_scale=1.0,
    )  # fmt: skip
    model = disturbed(config).eval()
    stops = (TOKENS[EOS],)
    return LoadedModel(Path("m"), "m", config, TOKENIZER, start_ids, stops, template, bos_id=bos_id).with_model(model)


CASES = [
    pytest.param((), TOKENS[BOS], None, TOKENS[BOS], id="bos named, not added"),
    pytest.param((), TOKENS[BOS], TEMPLATE, TOKENS[BOS], id="bos named, not added, with a template"),
    pytest.param((TOKENS[BOS],), TOKENS[BOS], None, TOKENS[BOS], id="bos added"),
    pytest.param((), None, None, TOKENS[EOS], id="no bos"),
]


@pytest.mark.parametrize(("start_ids", "bos_id", "template", "expected"), CASES)
@pytest.mark.parametrize("name", ["folder", "file.gguf"])
def test_a_text_follows_bos_where_the_files_name_it_and_else_the_end_token(
    tmp_path: Path,
    name: str,
    start_ids: tuple[int, ...],
    bos_id: int | None,
    template: ChatTemplate | None,
    expected: int,
) -> None:
    made = model_of(start_ids, bos_id, template)
    assert made.document_ids == (expected,)
    made.export(tmp_path / name, to="F32")
    loaded = napkin.load(tmp_path / name)
    assert loaded.document_ids == (expected,)
    # Texts with a prompt are what they were.
    assert loaded.encode_prompt("the dog") == [*start_ids, *TOKENIZER.encode("the dog")]
    # A text that the model begins by itself.
    by_hand = model_of((expected,), bos_id, template)
    assert loaded.generate("", max_new_tokens=4, temperature=0.0) == by_hand.generate(
        "", max_new_tokens=4, temperature=0.0
    )
    # What a run that is tuned from it keeps.
    kept = loaded.conversation_file()
    assert TOKENS.get(kept.template_tokens.get("bos_token", EOS)) == expected


def test_a_bos_that_is_not_a_token_is_none(tmp_path: Path) -> None:
    model_of((), TOKENS[BOS]).export(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    for bos in ("<nowhere>", None, 7):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": bos}))
        assert napkin.load(tmp_path / "m").document_ids == (TOKENS[EOS],)


@pytest.mark.peers
@pytest.mark.parametrize(("start_ids", "bos_id", "template", "expected"), CASES)
def test_it_is_the_token_that_the_harness_takes_with_transformers(
    tmp_path: Path, start_ids: tuple[int, ...], bos_id: int | None, template: Any, expected: int
) -> None:
    model_of(start_ids, bos_id, template).export(tmp_path / "m")
    read = peer("transformers").AutoTokenizer.from_pretrained(tmp_path / "m")
    assert (read.eos_token_id if read.bos_token_id is None else read.bos_token_id) == expected
    theirs = peer("lm_eval.models.huggingface").HFLM(pretrained=str(tmp_path / "m"), device="cpu")
    assert napkin.load(tmp_path / "m").document_ids == (theirs.prefix_token_id,)
