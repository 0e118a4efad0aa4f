"""Files of examples as tokens: what is in them, what is left out of them, and what damage is noticed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from napkin.chats.chat_encoder import ChatEncoder, LeftOut
from napkin.chats.chat_format import Message
from napkin.chats.chat_template import ChatTemplate
from napkin.chats.read_conversations import read_chats
from napkin.data.token_file import TokenFile, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tuning.example_file import ExampleFile, example_file_of, mask_path, write_example_file

TOKENIZER = ByteTokenizer(["<|endoftext|>"])
USER: dict[str, Any] = {"role": "user", "content": "user said ü"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "assistant said ü"}


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(TOKENIZER, None, (256,))


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def test_a_file_holds_the_sequences_and_their_masks(tmp_path: Path, encoder: ChatEncoder) -> None:
    random = np.random.default_rng(0)
    chats = [
        [
            {**each, "content": "x" * int(random.integers(1, 40))}
            for each in [USER, ASSISTANT] * int(random.integers(1, 4))
        ]
        for _ in range(30)
    ]
    file = written(tmp_path / "chats.jsonl", *({"messages": chat} for chat in chats))
    tokens = write_example_file(tmp_path / "chats.tokens", "conversations", file, encoder, max_length=10_000)
    expected = [encoder.sequence([Message(**each) for each in chat]) for chat in chats]
    assert len(tokens) == len(expected)
    for (actual,), sequence in zip(tokens, expected, strict=True):
        assert actual.tokens.tolist() == sequence.tokens.tolist()
        assert actual.loss_mask.tolist() == sequence.loss_mask.tolist()
    assert tokens.about.learned_tokens == sum(each.n_trained for each in expected)
    again = write_example_file(tmp_path / "again.tokens", "conversations", file, encoder, max_length=10_000)
    assert again.checksum == tokens.checksum
    for name in ("", ".mask", ".json"):
        assert (tmp_path / f"again.tokens{name}").read_bytes() == (tmp_path / f"chats.tokens{name}").read_bytes()


def test_three_forms_of_a_line_give_the_same_messages(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": ASSISTANT["content"]}]
    file = written(
        tmp_path / "chats.jsonl",
        {"messages": [USER, ASSISTANT]},
        "",
        {"conversations": turns},
        {"prompt": USER["content"], "completion": ASSISTANT["content"]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": [{**USER, "content": [{"type": "text", "text": USER["content"]}]}, ASSISTANT]},
    )
    found = list(read_chats(file))
    assert [each.line for each in found] == [1, 3, 4, 5, 6]
    assert {each.messages for each in found} == {(Message(**USER), Message(**ASSISTANT))}


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    refusing = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}<|endoftext|>{% endfor %}"
    )
    file = written(
        tmp_path / "chats.jsonl",
        {"messages": [USER]},
        {"messages": [ASSISTANT, USER]},
        {"messages": [USER, {**ASSISTANT, "content": "  "}]},
        {"messages": [USER, {**ASSISTANT, "content": None}]},
        {"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f"}]}]},
        {"messages": [{"role": "system", "content": "x"}, USER, ASSISTANT]},
        {"messages": [USER, {**ASSISTANT, "content": "x" * 100}]},
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER]},
    )
    encoder = ChatEncoder(TOKENIZER, refusing)
    chats = write_example_file(tmp_path / "a.tokens", "conversations", file, encoder, max_length=100)
    assert len(chats) == 1
    assert chats.left_out.counts == {
        "without an answer of the assistant's": 3,
        "that the assistant begins": 1,
        "with a content that is not text": 1,
        "with calls of tools, which are not text": 1,
        "refused by the chat template (no system)": 1,
        "longer than 100 tokens": 1,
    }
    left_out = LeftOut()
    list(read_chats(file, left_out))
    assert left_out.describe().startswith(
        "3 without an answer of the assistant's (line 1), 1 that the assistant begins (line 2)"
    )
    with pytest.raises(NapkinError, match=r"conversations.*train.*3.*\(line 1\)"):
        write_example_file(tmp_path / "b.tokens", "conversations", file, encoder, max_length=3)
    assert {each.name for each in tmp_path.iterdir()} == {"chats.jsonl", "a.tokens", "a.tokens.mask", "a.tokens.json"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"messages": [' * 2000, "is not a JSON object"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "is not a JSON object"),
        ({}, 'has nothing: a conversation has "messages"'),
        ({"text": "x", "prompt": "y"}, 'has "text", "prompt": a conversation'),
        ({"messages": []}, 'has "messages" that is not a list of messages'),
        ({"messages": ["x"]}, 'has str as number 1 of "messages"'),
        ({"messages": [USER, {"role": "assitant", "content": "x"}]}, "has the role 'assitant' as number 2"),
        ({"messages": [{"content": "x"}]}, "has the role None"),
    ],
)
def test_a_line_that_is_not_a_conversation_is_named(tmp_path: Path, line: Any, problem: str) -> None:
    file = written(tmp_path / "chats.jsonl", {"messages": [USER, ASSISTANT]}, line)
    with pytest.raises(NapkinError) as caught:
        list(read_chats(file))
    assert f"line 2 {problem}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_is_noticed(tmp_path: Path, encoder: ChatEncoder) -> None:
    file = written(tmp_path / "chats.jsonl", {"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]})
    path = tmp_path / "chats.tokens"
    write_example_file(path, "conversations", file, encoder, max_length=100)
    with pytest.raises(NapkinError, match=r"exists.*overwritten"):
        write_example_file(path, "conversations", file, encoder, max_length=100)
    for damaged in (path, mask_path(path), sidecar_path(path)):
        intact = damaged.read_bytes()
        for content in (intact[: len(intact) // 2], intact[:9] + bytes([intact[9] ^ 1]) + intact[10:], b""):
            damaged.write_bytes(content)
            with pytest.raises(CorruptFile):
                ExampleFile.open(path)
        damaged.unlink()
        with pytest.raises(NapkinError):
            ExampleFile.open(path)
        damaged.write_bytes(intact)
    assert len(ExampleFile.open(path)) == 2
    with pytest.raises(CorruptFile, match=r"conversations.*napkin tune"):
        TokenFile.open(path)


def test_a_file_of_another_version_says_how_to_make_it_again(tmp_path: Path, encoder: ChatEncoder) -> None:
    file = written(tmp_path / "chats.jsonl", {"messages": [USER, ASSISTANT]})
    path = tmp_path / "chats.tokens"
    write_example_file(path, "conversations", file, encoder, max_length=100)
    sidecar_path(path).write_text('{"format": "napkin-chat-tokens", "version": 1, "conversations": 1}')
    with pytest.raises(NapkinError, match=r"1 .*2: make .* `napkin data chat`"):
        ExampleFile.open(path)


def test_json_lines_are_encoded_once_and_again_where_anything_is_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: ChatEncoder
) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    file = written(tmp_path / "chats.jsonl", {"messages": [USER, ASSISTANT, USER, ASSISTANT]})

    def kept() -> set[Path]:
        return set((tmp_path / "cache" / "chats").glob("*.tokens"))

    first = example_file_of(file, "conversations", encoder, max_length=200)
    (path,) = kept()
    stamp = path.stat().st_mtime_ns
    assert example_file_of(file, "conversations", encoder, max_length=200).checksum == first.checksum
    assert (kept(), path.stat().st_mtime_ns) == ({path}, stamp)
    path.write_bytes(b"damaged")
    assert example_file_of(file, "conversations", encoder, max_length=200).checksum == first.checksum
    last = ChatEncoder(TOKENIZER, None, (256,), train_on="last")
    assert (
        example_file_of(file, "conversations", last, max_length=200).about.learned_tokens < first.about.learned_tokens
    )
    example_file_of(file, "conversations", encoder, max_length=199)
    assert len(kept()) == 3

    made = write_example_file(tmp_path / "made.tokens", "conversations", file, encoder, max_length=200)
    assert example_file_of(made.path, "conversations", encoder, max_length=300).checksum == first.checksum
    other = ChatEncoder(ByteTokenizer(["<|endoftext|>", "<|other|>"]), None, (256,))
    for encoder_there, most, problem in [
        (last, 200, "--learned"),
        (other, 200, "tokenizer"),
        (encoder, 50, "up to 200"),
    ]:
        with pytest.raises(NapkinError, match=problem):
            example_file_of(made.path, "conversations", encoder_there, max_length=most)
