"""Files of preferences: what is a pair, what is left out and counted, what is named in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from napkin.chats.chat_encoder import ChatEncoder, LeftOut
from napkin.chats.chat_format import Message
from napkin.errors import NapkinError
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tuning.preference_file import encoded_pairs, read_pairs, read_unpaired_preferences

TOKENIZER = ByteTokenizer(["<|endoftext|>"])
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_all_forms_of_a_pair_are_one(tmp_path: Path) -> None:
    question = [said("user", "2+2?")]
    four, five = said("assistant", "4"), said("assistant", "5")
    path = written(
        tmp_path / "pairs.jsonl",
        PAIR,
        {"prompt": question, "chosen": [four], "rejected": [five], "score_chosen": 3},
        {"chosen": [*question, four], "rejected": [*question, five]},
        {"prompt": "2+2?", "chosen": [*question, four], "rejected": [*question, five]},
    )
    left_out = LeftOut()
    pairs = list(read_pairs(path, left_out))
    assert {(pair.prompt, pair.chosen, pair.rejected) for pair in pairs} == {((Message("user", "2+2?"),), "4", "5")}
    assert [pair.line for pair in pairs] == [1, 2, 3, 4]
    assert left_out.n == 0
    # An answer may be a continuation of a longer conversation.
    before = [said("system", "Be brief."), said("user", "a"), said("assistant", "b"), said("user", "c")]
    path = written(tmp_path / "long.jsonl", {"chosen": [*before, four], "rejected": [*before, five]})
    [pair] = read_pairs(path, left_out)
    assert [message.content for message in pair.prompt] == ["Be brief.", "a", "b", "c"]


def test_what_teaches_nothing_is_counted(tmp_path: Path) -> None:
    path = written(
        tmp_path / "pairs.jsonl",
        PAIR,
        {**PAIR, "rejected": "4"},
        {**PAIR, "chosen": " \n"},
        {**PAIR, "chosen": [said("assistant", [{"type": "image"}])]},
        {**PAIR, "chosen": [said("assistant", "4"), said("user", "5")]},
        {
            "chosen": [said("user", "a"), said("assistant", "b")],
            "rejected": [said("user", "c"), said("assistant", "d")],
        },
        {**PAIR, "rejected": "5" * 60},
        {**PAIR, "rejected": "4 "},
    )
    left_out = LeftOut()
    assert [line for line, _ in encoded_pairs(path, ChatEncoder(TOKENIZER), left_out, 50)] == [1]
    assert left_out.first_lines == {
        "without a difference between the answers": 2,
        "with an empty answer": 3,
        "with a content that is not text": 4,
        "with an answer that is not one message of the assistant's": 5,
        "without a shared beginning of chosen and rejected": 6,
        "longer than 50 tokens": 7,
        "without a difference between the answers in tokens": 8,
    }


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object"),
        (
            {"prompt": "a", "choosen": "b", "rejected": "c"},
            """line 2 has no "chosen": 'choosen': did you mean 'chosen'""",
        ),
        ({"prompt": "a", "completion": "b"}, 'line 2 has no "chosen"'),
        ({"chosen": "a", "rejected": "b"}, 'line 2 has no "prompt"'),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, 'line 2 has "prompt" that is not a list of messages'),
        ({"prompt": [said("robot", "b")], "chosen": "b", "rejected": "c"}, "line 2 has the role 'robot'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    path = written(tmp_path / "pairs.jsonl", PAIR, line)
    with pytest.raises(NapkinError) as error:
        list(read_pairs(path, LeftOut()))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_label_that_is_none_is_named(tmp_path: Path) -> None:
    wrong = written(tmp_path / "wrong.jsonl", {"prompt": "a", "completion": "b", "label": "yes"})
    with pytest.raises(NapkinError, match=r"line 1.*label 'yes'"):
        list(read_unpaired_preferences(wrong, LeftOut()))
