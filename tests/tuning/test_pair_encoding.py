"""Pairs and unpaired preferences as examples: their tokens, their kept files, and the mismatched answers of KTO."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from napkin.chats.chat_encoder import ChatEncoder, LeftOut
from napkin.chats.chat_format import Message
from napkin.chats.chat_template import ChatTemplate
from napkin.errors import NapkinError
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tuning.example_file import ExampleFile, ExampleKind, example_file_of, write_example_file
from napkin.tuning.preference_file import encoded_pairs, encoded_unpaired_preferences
from napkin.tuning.preference_method import UnpairedExamples
from napkin.tuning.preferences import DESIRABLE
from napkin.tuning.reference_scores import ReferencedExamples, ReferenceKey, read_reference_scores, reference_writer
from napkin.tuning.sequence_step import REFERENCE

TOKENIZER = ByteTokenizer(["<|endoftext|>"])
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(TOKENIZER)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def opened(path: Path, kind: ExampleKind, encoder: ChatEncoder, max_length: int = 99) -> ExampleFile:
    return example_file_of(path, kind, encoder, max_length=max_length)


def test_units_count_answers_with_the_token_that_ends_them(tmp_path: Path, encoder: ChatEncoder) -> None:
    [(chosen, rejected)] = opened(written(tmp_path / "pairs.jsonl", PAIR), "pairs", encoder)
    assert TOKENIZER.decode(chosen.tokens.tolist()) == "user: 2+2?\nassistant: 4<|endoftext|>"
    assert TOKENIZER.decode(chosen.tokens[chosen.loss_mask].tolist()) == " 4<|endoftext|>"
    assert TOKENIZER.decode(rejected.tokens[rejected.loss_mask].tolist()) == " 5<|endoftext|>"


def test_a_file_of_pairs_has_what_is_encoded_one_by_one(tmp_path: Path, encoder: ChatEncoder) -> None:
    draw = random.Random(0)

    def text() -> str:
        return "".join(draw.choices("ab ü", k=draw.randint(1, 30))) + "."

    # More than are rendered together, some of them longer conversations.
    pairs = [
        {
            "prompt": [
                {"role": role, "content": text()} for role in ("user", "assistant", "user")[draw.choice((0, 2)) :]
            ],
            "chosen": text() + "c",
            "rejected": text() + "d",
        }
        for _ in range(150)
    ]
    examples = opened(written(tmp_path / "pairs.jsonl", *pairs), "pairs", encoder, 10_000)
    assert len(examples) == 150
    for pair, example in zip(pairs, examples, strict=True):
        messages = [Message(**each) for each in pair["prompt"]]
        prompt = encoder.prompt(messages)
        for name, sequence in zip(("chosen", "rejected"), example, strict=True):
            assert sequence.tokens.tolist() == prompt + encoder.answer(messages, pair[name])
            assert sequence.loss_mask.tolist() == [place >= len(prompt) for place in range(len(sequence.tokens))]


def test_what_was_left_out_is_told_again_and_nothing_is_encoded_again(
    tmp_path: Path, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "pairs.jsonl", PAIR, {**PAIR, "rejected": "4"}, {**PAIR, "chosen": "4" * 99}, PAIR)
    first = opened(path, "pairs", encoder)
    assert first.left_out.describe() == (
        "1 without a difference between the answers (line 2), 1 longer than 99 tokens (line 3)"
    )
    monkeypatch.setattr(ChatEncoder, "answers", None)
    second = opened(path, "pairs", encoder)
    assert (second.path, second.checksum, len(second)) == (first.path, first.checksum, 2)
    assert second.left_out.describe() == first.left_out.describe()
    with pytest.raises(NapkinError, match="holds pairs, not conversations"):
        opened(first.path, "conversations", encoder)


def test_what_a_template_refuses_is_left_out_and_what_it_changes_is_named(tmp_path: Path) -> None:
    refusing = ChatTemplate(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
        "{{ m.content }}<|endoftext|>{% endfor %}"
    )
    path = written(tmp_path / "pairs.jsonl", {**PAIR, "rejected": "no"}, {**PAIR, "prompt": "no"}, PAIR)
    left_out = LeftOut()
    assert [line for line, _ in encoded_pairs(path, ChatEncoder(TOKENIZER, refusing), left_out, 99)] == [3]
    assert left_out.describe() == "2 refused by the chat template (not that) (line 1)"
    forgetting = ChatEncoder(TOKENIZER, ChatTemplate("{{ messages[-1].content }}"))
    with pytest.raises(NapkinError, match=r"line 1.*learned"):
        list(encoded_pairs(path, forgetting, LeftOut(), 99))


def test_judged_answers_meet_another_prompts_answer(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = written(
        tmp_path / "judged.jsonl",
        {"prompt": "2+2?", "completion": "4", "label": True},
        {"prompt": "2+2?", "completion": "5", "label": 0},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    )
    examples = UnpairedExamples(opened(path, "judged answers", encoder, 27))
    texts = [
        [TOKENIZER.decode(each.tokens.tolist()).split("assistant:")[1] for each in example] for example in examples
    ]
    assert texts == [
        [" 4<|endoftext|>", " 2<|endoftext|>"],
        [" 5<|endoftext|>", " 2<|endoftext|>"],
        [" 2<|endoftext|>", " 4<|endoftext|>"],
        [" 3<|endoftext|>", " 4<|endoftext|>"],
    ]
    assert [float(answer.values[DESIRABLE][0]) for answer, _ in examples] == [1, 0, 1, 0]
    good = written(tmp_path / "good.jsonl", *[{"prompt": "a", "completion": "b", "label": True}] * 2)
    with pytest.raises(NapkinError, match=r"2 completions.*good"):
        opened(good, "judged answers", encoder)


def test_mismatched_answers_are_those_of_a_search_in_memory(tmp_path: Path, encoder: ChatEncoder) -> None:
    draw = random.Random(1)
    n_cut = 0
    for case in range(12):
        # Each fits into 26 tokens with its own prompt, and not always with another.
        prompts = [draw.choice(["a", "bb", "cccc"]) for _ in range(draw.randint(2, 9))]
        lines = [
            {"prompt": prompt, "completion": "x" * draw.randint(1, 7 - len(prompt)), "label": number % 2 == 0}
            for number, prompt in enumerate(prompts)
        ]
        if case == 0:
            lines = [{**line, "prompt": "a"} for line in lines]
        examples = UnpairedExamples(opened(written(tmp_path / f"{case}.jsonl", *lines), "judged answers", encoder, 26))
        n = len(examples)
        assert n == len(lines)
        for number, (answer, mismatched) in enumerate(examples):
            later = [lines[(number + step) % n] for step in range(1, n + 1)]
            other = next((each for each in later if each["prompt"] != lines[number]["prompt"]), later[0])
            prompt = encoder.prompt([Message("user", lines[number]["prompt"])])
            text = encoder.answer([Message("user", other["prompt"])], other["completion"])
            assert mismatched.tokens.tolist() == (prompt + text)[:26]
            assert np.flatnonzero(mismatched.loss_mask)[0] == len(prompt)
            assert bool(answer.values[DESIRABLE].all()) == lines[number]["label"]
            n_cut += len(prompt + text) > 26
    assert n_cut


def test_a_checksum_is_of_all_that_is_learned_from(tmp_path: Path, encoder: ChatEncoder) -> None:
    def checksum(*lines: Any) -> str:
        return opened(written(tmp_path / "judged.jsonl", *lines), "judged answers", encoder).checksum

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


def test_the_same_lines_give_the_same_bytes(tmp_path: Path, encoder: ChatEncoder) -> None:
    lines = [{"prompt": str(number), "chosen": "yes", "rejected": "no"} for number in range(40)]
    path = written(tmp_path / "judged.jsonl", *lines)
    names = ("", ".mask", ".json")
    files = []
    for name in ("one", "two"):
        write_example_file(tmp_path / name, "judged answers", path, encoder, max_length=99)
        files.append([(tmp_path / f"{name}{ending}").read_bytes() for ending in names])
    assert files[0] == files[1]
    assert {each.name for each in tmp_path.iterdir()} == {
        "judged.jsonl",
        *(f"{n}{e}" for n in ("one", "two") for e in names),
    }
    assert len(list(encoded_unpaired_preferences(path, encoder, LeftOut(), 99))) == 80


def test_a_reference_is_kept_in_a_file_that_others_read(tmp_path: Path, encoder: ChatEncoder) -> None:
    lines = [{"prompt": str(number), "chosen": "yes" * (number % 5 + 1), "rejected": "no"} for number in range(300)]
    examples = ReferencedExamples(opened(written(tmp_path / "pairs.jsonl", *lines), "pairs", encoder))
    key, path = ReferenceKey("0" * 64, "1" * 64, "fp32"), tmp_path / "reference.safetensors"
    draw = np.random.default_rng(2)
    expected = [draw.normal(size=each.n_trained).astype(np.float32) for example in examples for each in example]
    with reference_writer(path, key, examples.n_sequences) as writer:
        writer.add(expected[:7])
        writer.add(expected[7:])
    tensors = load_file(path)
    assert tensors["log_probabilities"].tolist() == np.concatenate(expected).tolist()
    assert tensors["ends"].tolist() == np.cumsum([len(each) for each in expected]).tolist()
    examples.scores, problem = read_reference_scores(path, key, examples.n_sequences)
    assert not problem
    found = [each.values[REFERENCE] for example in examples for each in example]
    assert all(np.array_equal(*both) for both in zip(found, expected, strict=True))
    # Nothing that was read is held: in a list the examples take half a megabyte.
    tracemalloc.start()
    assert sum(len(example) for example in examples) == len(expected)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000
    for other, why in [
        (ReferenceKey("2" * 64, "1" * 64, "fp32"), "have changed"),
        (ReferenceKey("0" * 64, "2" * 64, "fp32"), "weights"),
        (ReferenceKey("0" * 64, "", "bf16"), "another precision"),
    ]:
        assert why in read_reference_scores(path, other, examples.n_sequences)[1]
    assert read_reference_scores(path, key, examples.n_sequences - 1) == (None, "it is damaged")
    intact = path.read_bytes()
    for content in (
        b"",
        intact[:5],
        intact[:500],
        intact[:-1],
        intact[:2000] + bytes([intact[2000] ^ 1]) + intact[2001:],
    ):
        path.write_bytes(content)
        scores, problem = read_reference_scores(path, key, examples.n_sequences)
        assert scores is None
        assert problem == "it is damaged" or problem.startswith("it cannot be read")
