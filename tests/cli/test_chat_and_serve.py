"""`napkin chat` and `napkin serve` on a trained run, and what they refuse."""

import io
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import napkin as library
from napkin.inference.generation import generate
from napkin.inference.loaded_model import load
from napkin.inference.settings import Sampling
from reliability.harness import Napkin as Starter

Refusal = Callable[..., str]


@pytest.mark.torture
def test_a_served_run_says_what_generate_says(place: Path, server: subprocess.Popen[str], tmp_path: Path) -> None:
    command = Starter(place, server, tmp_path).start("serve", "runs/tiny", "--port", "0", "--name", "mine")
    deadline = time.monotonic() + 100
    while not command.out.exists() or "http://" not in command.out.read_text():
        assert time.monotonic() < deadline, command.errors
        time.sleep(0.05)
    assert command.out.read_text().startswith("serving mine: ")
    address = command.out.read_text().partition("http://")[2].split()[0]
    fields = {"model": "mine", "prompt": "the", "max_tokens": 6, "temperature": 0.9, "top_p": 0.9, "seed": 2}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    command.send(signal.SIGTERM)
    assert command.wait() == 0
    assert command.errors == []
    expected = library.load("runs/tiny").generate("the", max_new_tokens=6, temperature=0.9, top_p=0.9, seed=2)
    assert choice["text"] == expected


def test_an_exported_folder_opens_as_the_run_does(place: Path, napkin: Callable[..., Any]) -> None:
    assert napkin("export", "runs/tiny", "--out", "folder").status == 0
    run, folder = load("runs/tiny"), load("folder", name="mine")
    assert (run.name, folder.name) == ("tiny", "mine")
    assert (run.start_ids, run.stop_ids) == (folder.start_ids, folder.stop_ids)
    text = "Café <|endoftext|> 🦊"
    assert run.encode(text) == folder.encode(text)
    greedy = Sampling(temperature=0)
    ids = run.encode("the")
    assert list(generate(run.model, ids, 8, greedy)) == list(generate(folder.model, ids, 8, greedy))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("runs/tiny --host 0.0.0.0", "give a key"),
        ("runs/tiny --host example.com", "give a key"),
        ("runs/tiny --port 99999", "--port is 99999"),
        ("runs/tiny --max-running 0", "--max-running is 0"),
        ("runs/tiny --request-seconds nan", "request_seconds is nan"),
        ("runs/tiny --api-key-file empty.txt", "holds no key"),
        ("runs/tiny --api-key-file missing", "No such file"),
        ("docs", "neither a run nor a Hugging Face folder"),
        ("missing", "'missing' is neither a run nor a Hugging Face folder, it does not exist"),
    ],
)
def test_what_serve_refuses(place: Path, refusal: Refusal, arguments: str, said: str) -> None:
    Path("empty.txt").write_text("\n")
    assert said in refusal("serve", *arguments.split())


def test_a_key_of_the_environment_is_one_that_clients_can_send(
    place: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAPKIN_API_KEY", "open sesame")
    assert "NAPKIN_API_KEY holds no key" in refusal("serve", "runs/tiny")


def test_a_missing_extra_is_named(place: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refusal("serve", "runs/tiny").endswith("pip install uvicorn")


def test_chat_ends_with_its_input(place: Path, napkin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("", "/quit\nnot read\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        done = napkin("chat", "runs/tiny")
        assert done.status == 0
        assert done.out == ""
        assert "has no chat template" in done.err


def test_a_message_that_does_not_fit_is_told_and_the_conversation_goes_on(
    place: Path, napkin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("a message of far more than sixteen tokens, as it seems to me\n/quit\n")
    )
    done = napkin("chat", "runs/tiny")
    assert done.status == 0
    assert "does not fit the model's context of 16 tokens" in done.err
