"""Files of preferences: what becomes a unit, what is left out and counted, what is named in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from napkin.alignment.chats.chat_encoder import ChatEncoder
from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.pair_file import (
    checksum_of_units,
    judged_units,
    pair_units,
    read_judged_answers,
    read_pairs,
)
from napkin.alignment.preferences.kto import DESIRABLE
from napkin.errors import NapkinError
from napkin.inference.chat_format import Message
from napkin.tokenizer.byte_level import ByteTokenizer

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
    units = pair_units(read_pairs(path, left_out), ChatEncoder(TOKENIZER), 50, left_out)
    assert len(units) == 1
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


def test_units_count_answers_with_the_token_that_ends_them(tmp_path: Path) -> None:
    encoder = ChatEncoder(TOKENIZER)
    left_out = LeftOut()
    [(chosen, rejected)] = pair_units(
        read_pairs(written(tmp_path / "pairs.jsonl", PAIR), left_out), encoder, 99, left_out
    )
    assert encoder.tokenizer.decode(chosen.tokens.tolist()) == "user: 2+2?\nassistant: 4<|endoftext|>"
    assert encoder.tokenizer.decode(chosen.tokens[chosen.counts].tolist()) == " 4<|endoftext|>"
    assert encoder.tokenizer.decode(rejected.tokens[rejected.counts].tolist()) == " 5<|endoftext|>"


def test_judged_answers_meet_another_prompts_answer(tmp_path: Path) -> None:
    path = written(
        tmp_path / "judged.jsonl",
        {"prompt": "2+2?", "completion": "4", "label": True},
        {"prompt": "2+2?", "completion": "5", "label": 0},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    )
    encoder, left_out = ChatEncoder(TOKENIZER), LeftOut()
    units = judged_units(read_judged_answers(path, left_out), encoder, 27, left_out)
    texts = [[encoder.tokenizer.decode(each.tokens.tolist()).split("assistant:")[1] for each in unit] for unit in units]
    assert texts == [
        [" 4<|endoftext|>", " 2<|endoftext|>"],
        [" 5<|endoftext|>", " 2<|endoftext|>"],
        [" 2<|endoftext|>", " 4<|endoftext|>"],
        [" 3<|endoftext|>", " 4<|endoftext|>"],
    ]
    assert [float(answer.values[DESIRABLE][0]) for answer, _ in units] == [1, 0, 1, 0]
    good = written(tmp_path / "good.jsonl", *[{"prompt": "a", "completion": "b", "label": True}] * 2)
    with pytest.raises(NapkinError, match="all 2 answers are good"):
        judged_units(read_judged_answers(good, left_out), encoder, 99, left_out)
    wrong = written(tmp_path / "wrong.jsonl", {"prompt": "a", "completion": "b", "label": "yes"})
    with pytest.raises(NapkinError, match="line 1 has the label 'yes'"):
        list(read_judged_answers(wrong, left_out))


def test_a_checksum_is_of_all_that_is_learned_from(tmp_path: Path) -> None:
    def checksum(*lines: Any) -> str:
        left_out = LeftOut()
        judged = read_judged_answers(written(tmp_path / "judged.jsonl", *lines), left_out)
        return checksum_of_units(judged_units(judged, ChatEncoder(TOKENIZER), 99, left_out))

    lines = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, False)]
    first = checksum(*lines)
    assert first == checksum(*lines)
    others = [
        checksum(*lines[::-1]),
        checksum(*lines[:2]),
        checksum({**lines[0], "completion": "c"}, *lines[1:]),
        checksum({**lines[0], "prompt": "c"}, *lines[1:]),
    ]
    assert len({first, *others}) == 5
