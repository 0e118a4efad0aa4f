"""A conversation: what the model sees of it, and how an answer is ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.inference.conversation import Conversation
from napkin.inference.generation import generate
from napkin.inference.settings import Sampling
from oracles.served_model import CONTEXT, tiny_served_model

GREEDY = Sampling(temperature=0)
PROGRAM = """
import torch
from napkin.cli.models.generate import converse
from napkin.inference.conversation import Conversation
from napkin.inference.settings import Sampling
from oracles.served_model import tiny_served_model
torch.set_num_threads(1)
converse(Conversation(tiny_served_model()), Sampling(logit_bias=((120, 100.0),)), 1900)
"""


def test_each_answer_continues_all_that_was_said() -> None:
    opened = tiny_served_model()
    conversation = Conversation(opened, system="Be brief.")
    text = "system: Be brief.\n"
    for message in ("Hello", "Again", "And again"):
        answer = "".join(conversation.answer(message, GREEDY, max_new_tokens=15))
        text += f"user: {message}\nassistant:"
        expected = generate(opened.model, opened.encode_prompt(text), 15, GREEDY, stop=opened.stop_ids[0])
        assert answer == opened.tokenizer.decode(list(expected))
        text += f" {answer.strip()}\n"
    conversation.forget()
    first = "".join(Conversation(opened, system="Be brief.").answer("Hello", GREEDY, max_new_tokens=15))
    assert "".join(conversation.answer("Hello", GREEDY, max_new_tokens=15)) == first


def test_old_messages_are_left_out_where_the_context_ends_and_too_long_ones_refused() -> None:
    opened = tiny_served_model()
    conversation = Conversation(opened)
    with pytest.raises(NapkinError, match="shorten it"):
        next(conversation.answer("a" * CONTEXT, GREEDY))
    answer = ""
    for _ in range(3):
        answer = "".join(conversation.answer("b" * (CONTEXT // 2), GREEDY, max_new_tokens=3))
    assert conversation.n_left_out == 4
    alone = Conversation(opened)
    assert "".join(alone.answer("b" * (CONTEXT // 2), GREEDY, max_new_tokens=3)) == answer


def test_a_stopped_answer_keeps_what_was_said() -> None:
    opened = tiny_served_model()
    conversation = Conversation(opened)
    pieces = conversation.answer("Hello", Sampling(logit_bias=((120, 100.0),)), max_new_tokens=500)
    said = next(pieces) + next(pieces)
    conversation.stop()
    said += "".join(pieces)
    assert said == "x" * len(said)
    assert len(said) < 10
    text = f"user: Hello\nassistant: {said}\nuser: More\nassistant:"
    expected = generate(opened.model, opened.encode_prompt(text), 9, GREEDY, stop=opened.stop_ids[0])
    assert "".join(conversation.answer("More", GREEDY, max_new_tokens=9)) == opened.tokenizer.decode(list(expected))


@pytest.mark.thorough
def test_an_interrupt_ends_the_answer_and_not_the_program() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *filter(None, sys.path)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for _ in range(2):
            process.stdin.write("Hello\n")
            first = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            answers.append(first + process.stdout.readline())
        rest, told = process.communicate("/new\n\n/quit\nnot read\n", timeout=100)
    assert process.returncode == 0, told
    assert rest == ""
    for answer in answers:
        assert answer == "x" * (len(answer) - 1) + "\n"
        assert len(answer) < 1900
