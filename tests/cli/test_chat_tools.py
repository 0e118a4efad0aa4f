"""`napkin chat --tools`: calls are run and told, the model reads what they say, and an answer has a last turn."""

import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cli.conftest import Napkin
from napkin.chats.chat_format import Message
from napkin.cli.models.generate import chosen_tools, converse
from napkin.environments.tools import MOST_CALLS
from napkin.grading.sandbox.confinement import can_confine
from napkin.inference import load
from napkin.inference.conversation import Conversation
from napkin.inference.settings import Sampling
from napkin.model import ModelConfig, Transformer, save_huggingface
from napkin.model.huggingface import TextForm
from napkin.tokenizer import BPETokenizer

needs_sandbox = pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls")

END, ASSISTANT, AFTER, BEGIN, CLOSE = "<|end|>", "<|assistant|>", "<|after|>", "<calculator>", "</calculator>"
# Behind what a tool says the prompt ends otherwise, by which a model of pairs of tokens knows that it has been told.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages[-1].role == 'tool' %}NEXT{% else %}<|assistant|>{% endif %}{% endif %}"
)
CALL = f"{BEGIN}6*7{CLOSE}"


def saved(path: Path, after_a_tool: str) -> Path:
    """A model whose next token follows from the last one: it calls the calculator and, told so by the prompt, ends."""
    tokenizer = BPETokenizer([], [END, ASSISTANT, AFTER, BEGIN, CLOSE])
    config = ModelConfig(tokenizer.vocab_size, 256, d_model=288, n_layers=1, n_heads=4, tie_embeddings=False)
    model = Transformer(config, seed=1)
    ids = {**{chr(n): n for n in range(256)}, **tokenizer.special_tokens}
    chain = [ASSISTANT, BEGIN, "6", "*", "7", CLOSE, END]
    follows = dict(pairwise(chain)) | {AFTER: "4", "4": "2", "2": END}
    with torch.no_grad():
        model.embedding.weight.copy_(4 * torch.eye(config.vocab_size, config.d_model))
        model.head_weight.zero_()
        for before, after in follows.items():
            model.head_weight[ids[after], ids[before]] = 10.0
    template = TEMPLATE.replace("NEXT", after_a_tool)
    save_huggingface(model, path, tokenizer=tokenizer, form=TextForm([], [END], template))
    return path


def said_by(folder: Path, monkeypatch: pytest.MonkeyPatch, tools: str) -> list[Message]:
    """What is said in a conversation of one question."""
    chosen = chosen_tools(tools)
    conversation = Conversation(load(folder), tools=[] if chosen is None else chosen.schemas)
    monkeypatch.setattr(sys, "stdin", io.StringIO("How much?\n"))
    converse(conversation, Sampling(temperature=0), 20, chosen)
    return list(conversation.messages)


@needs_sandbox
def test_a_call_is_run_and_told_and_the_model_answers_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "model", AFTER)
    said = said_by(folder, monkeypatch, "calculator")
    assert said == [
        Message("user", "How much?"),
        Message("assistant", CALL),
        Message("tool", repr(6 * 7)),
        Message("assistant", "42"),
    ]
    shown = capsys.readouterr()
    assert shown.out == f"{CALL}\n42\n"
    told = shown.err.splitlines()
    assert "runs calculator in the sandbox: 6*7" in told[-2]
    assert "calculator says: 42" in told[-1]


def test_without_tools_a_call_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.role for each in said_by(saved(tmp_path / "model", AFTER), monkeypatch, "")] == ["user", "assistant"]


@needs_sandbox
def test_a_model_that_calls_without_end_has_a_last_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_by(saved(tmp_path / "model", ASSISTANT), monkeypatch, "calculator,python")
    assert [each.role for each in said] == ["user", *["assistant", "tool"] * MOST_CALLS, "assistant"]
    assert {each.content for each in said[1:]} == {CALL, "42"}


@needs_sandbox
@pytest.mark.parametrize(("after", "right"), [(AFTER, 1.0), (ASSISTANT, 0.0)])
def test_a_task_is_answered_with_tools_and_not_without(
    napkin: Napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, right: float
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", after)
    rows = [{"question": f"How much is it, {n}?", "answer": "42"} for n in range(3)]
    Path("task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("evaluate", "task", "model", "--task", "task.jsonl", "--chat", "--answer-tokens", "20", "--json")
    without = json.loads(napkin(*command).out)
    found = json.loads(napkin(*command, "--tools", "calculator", "--out", "with.json").out)
    assert without["scores"]["exact_match"]["mean"] == 0.0
    assert found["scores"]["exact_match"]["mean"] == right
    # An answer that only calls ends with the turn after the last call.
    items = [json.loads(line) for line in Path("with.items.jsonl").read_text().splitlines()]
    assert [each["text"] for each in items if "text" in each] == ["42" if right else CALL] * 3
    assert found["model"]["tools"] == ["calculator"]
    assert "tools" not in without["model"]


@needs_sandbox
def test_tools_that_are_not_known_and_models_without_a_template_are_refused(napkin: Napkin, place: Path) -> None:
    done = napkin("chat", "runs/tiny", "--tools", "calculater")
    assert (done.status, len(done.messages)) == (2, 1)
    assert "'calculater' in 'calculater' is not a tool: did you mean 'calculator'" in done.messages[0]
    done = napkin("chat", "runs/tiny", "--tools", "calculator")
    assert done.status == 2
    assert "has no chat template" in done.messages[-1]
    Path("sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    done = napkin("evaluate", "task", "runs/tiny", "--task", "sums.jsonl", "--tools", "calculator")
    assert (done.status, len(done.messages)) == (2, 1)
    assert "add --chat" in done.messages[0]
