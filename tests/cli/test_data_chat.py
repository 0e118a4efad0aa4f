"""`napkin data chat`: what is shown, counted and written."""

import json
from pathlib import Path

import pytest

from napkin.tuning.example_file import ExampleFile

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "Is it blue?"},
            {"role": "assistant", "content": "Yes <|endoftext|>\n\x1b[31mé"},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "Air."},
        ]
    },
    {"messages": [{"role": "user", "content": "hi"}]},
    {"prompt": "2+2", "completion": "4"},
]


@pytest.fixture
def chats(place: Path) -> Path:
    path = place / "chats.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    return path


def test_what_is_learned_is_marked_and_nothing_reaches_the_terminal_as_it_is(napkin, chats: Path) -> None:
    done = napkin("data", "chat", "chats.jsonl", "--show", "--tokenizer", "one/tokenizer.json")
    assert done.status == 0, done.err
    assert (
        "<|endoftext|>user: Is it blue?↵\n"
        "assistant:{+ Yes \\<|endoftext|>↵\n"
        "\\x1b[31mé<|endoftext|>+}↵\n"
        "user: Why?↵\n"
        "assistant:{+ Air.<|endoftext|>+}\n"
    ) in done.out
    assert "left out: 1 without an answer of the assistant's, the first in line 2" in done.out
    last = napkin("data", "chat", "chats.jsonl", "--show", "--learned", "last", "--tokenizer", "one/tokenizer.json")
    assert last.out.count("{+") - 1 == 2


def test_a_file_is_written_that_is_counted_and_shown_again(napkin, refusal, chats: Path) -> None:
    options = ("--tokenizer", "one/tokenizer.json")
    done = napkin("data", "chat", "chats.jsonl", *options, "--out", "new/chats.tokens", "--json")
    told = json.loads(done.out)
    opened = ExampleFile.open("new/chats.tokens")
    assert (told["conversations"], told["tokens"]) == (2, opened.about.tokens)
    assert told["left_out"] == {"without an answer of the assistant's": 1}
    again = napkin("data", "chat", "new/chats.tokens", *options, "--show", "--first", "1")
    assert "{+ Air.<|endoftext|>+}" in again.out
    assert "'new/chats.tokens' exists" in refusal("data", "chat", "chats.jsonl", *options, "--out", "new/chats.tokens")
    assert "holds tokens already" in refusal("data", "chat", "new/chats.tokens", *options, "--out", "x.tokens")
    assert "another tokenizer" in refusal("data", "chat", "new/chats.tokens", "--start", "runs/tiny")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("chats.jsonl", "name a model with --start, or a tokenizer with --tokenizer"),
        ("chats.jsonl --start runs/tiny --tokenizer one/tokenizer.json", "and not both"),
        ("missing.jsonl --start runs/tiny", "'missing.jsonl' cannot be read"),
        ("one.txt --start runs/tiny", "'one.txt' line 1 is not a JSON object"),
        ("chats.jsonl --start docs", "'docs' is neither a run nor a Hugging Face folder"),
        ("chats.jsonl --start runs/tiny --chat-template missing", "'missing' cannot be read"),
        ("chats.jsonl --start runs/tiny --chat-template grows", "2 refused by the chat template (it needs more memory"),
        ("chats.jsonl --start runs/tiny --chat-template refuses", "2 refused by the chat template (no)"),
        ("chats.jsonl --start runs/tiny --chat-template forgets", "'chats.jsonl' line 1 cannot be learned from"),
        ("chats.jsonl --start runs/tiny", "2 longer than 16 tokens (line 1)"),
        ("chats.jsonl --start runs/tiny --first 0", "--first is 0: use 1 to 1,000"),
        ("chats.jsonl --start runs/tiny --max-length -1", "--max-length is -1"),
    ],
)
def test_what_cannot_be_encoded_is_one_line(refusal, chats: Path, arguments: str, complaint: str) -> None:
    Path("grows").write_text("{{ 'x' * 10**11 }}")
    Path("refuses").write_text("{{ raise_exception('no') }}")
    Path("forgets").write_text("{{ messages[-1].content }}")
    assert complaint in refusal("data", "chat", *arguments.split())
