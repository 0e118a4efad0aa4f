"""`napkin tune sft`, and what becomes of a tuned run: exported, quantized, asked."""

import json
from pathlib import Path

import pytest

from napkin.chats.chat_format import Message
from napkin.inference.generation import generate
from napkin.inference.loaded_model import load
from napkin.inference.settings import Sampling
from napkin.tuning.method import encoder_of_base, open_base

BASE = "--data.train data/train.tokens --data.validation None --data.tokenizer data/tokenizer.json --training.steps 2"
SIZES = "--model.context-length 64 --model.d-model 16 --model.n-layers 1 --model.n-heads 2 --training.batch-size 2"
TUNE = "--training.steps 3 --training.batch-size 2 --training.threads 1"
TEMPLATE = (
    "{% for m in messages %}{{ m.role + '> ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant> {% endif %}"
)


@pytest.fixture
def chats(place: Path) -> Path:
    lines = [{"prompt": f"say {word}", "completion": word} for word in ("one", "two", "three", "four")]
    (place / "chats.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in [*lines, {"prompt": "", "completion": ""}])
    )
    return place


@pytest.mark.thorough
def test_a_tuned_run_is_asked_as_it_was_trained_wherever_it_goes(napkin, refusal, chats: Path) -> None:
    Path("own.jinja").write_text(TEMPLATE)
    assert napkin("train", *BASE.split(), *SIZES.split(), "--run", "runs/base").status == 0
    tuned = (
        f"--tuning.start runs/base --tuning.chat-template own.jinja --data.train chats.jsonl {TUNE} --run runs/tuned"
    )
    done = napkin("tune", "sft", *tuned.split(), "--data.validation", "chats.jsonl")
    assert done.status == 0, done.err
    assert "1 of 5 conversations are left out: 1 without an answer of the assistant's" in done.err
    assert "validation loss" in done.out
    assert napkin("export", "runs/tuned", "--out", "exported").status == 0
    assert napkin("quantize", "runs/tuned", "--to", "int8").status == 0

    asked = [Message("user", "say one"), Message("assistant", "one"), Message("user", "say two")]
    encoder = encoder_of_base(open_base("runs/base"), "own.jinja")
    expected = encoder.prompt(asked)
    trained_on = encoder.sequence([*asked, Message("assistant", "two")]).tokens.tolist()
    assert trained_on[: len(expected)] == expected
    for folder in ("runs/tuned", "exported", "runs/tuned-int8"):
        opened = load(folder)
        assert opened.chat_format.encode(asked) == expected
        assert opened.stop_ids == encoder.stop_ids
        fields = [{"role": each.role, "content": each.content} for each in asked]
        drawn = generate(opened.model, expected, 9, Sampling(temperature=0), stop=encoder.stop_ids[0])
        assert opened.chat(fields, max_new_tokens=9, temperature=0) == opened.tokenizer.decode(list(drawn))
    again = "--tuning.start exported --data.train chats.jsonl --adapter.rank 2 --run runs/again"
    assert napkin("tune", "sft", *again.split(), *TUNE.split()).status == 0
    assert load("runs/again").chat_format.encode(asked) == expected
    assert "has no validation tokens" in refusal("evaluate", "runs/tuned")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--data.train chats.jsonl", "no model to start from is named"),
        ("--tuning.start runs/tiny", "no conversations to train on are named"),
        ("--tuning.start runs/tiny --data.train missing.jsonl", "there is no file 'missing.jsonl'"),
        ("--tuning.start runs/tiny --data.train docs", "there is no file 'docs'"),
        ("--tuning.start runs/tiny --data.train one.txt", "'one.txt' line 1 is not a JSON object"),
        ("--tuning.start runs/tiny --data.train chats.jsonl --tuning.max-length 17", "tuning.max_length is 17"),
        ("--tuning.start runs/tiny --data.train chats.jsonl --tuning.max-length 3", "4 longer than 3 tokens"),
        ("--tuning.start runs/tiny --data.train chats.jsonl --tuning.chat-template docs", "'docs' cannot be read"),
    ],
)
def test_what_cannot_be_learned_is_one_line_and_leaves_nothing(
    refusal, chats: Path, arguments: str, complaint: str
) -> None:
    assert complaint in refusal("tune", "sft", *arguments.split(), "--run", "runs/new")
    assert not Path("runs/new").exists()
