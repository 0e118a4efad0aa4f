"""A fifo, a device, a socket or a folder where a file is expected: one line, at once."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Refusal = Callable[..., str]
KINDS = ["fifo", "/dev/zero", "socket", "folder"]

COMMANDS = {
    "tokenizer train": "tokenizer train {} --out new.json",
    "tokenizer encode": "tokenizer encode {} --out new",
    "tokenizer encode --tokenizer": "tokenizer encode docs --tokenizer {} --out new",
    "tokenizer show": "tokenizer show {}",
    "tokenizer compare": "tokenizer compare {}",
    "tokenizer compare --with": "tokenizer compare one.txt --with {}",
    "tokenizer compare --learn-from": "tokenizer compare one.txt --learn-from {}",
    "tokenizer import": "tokenizer import {} --out new.json",
    "tokenizer export": "tokenizer export {} --out new.json",
    "train": "train {} --run new",
    "train --data.train": "train tiny.toml --data.train {} --run new",
    "train --data.validation": "train tiny.toml --data.validation {} --run new",
    "train --data.tokenizer": "train tiny.toml --data.tokenizer {} --run new",
    "train --preset": "train --preset {} --run new",
    "plan": "plan {}",
    "plan --on": "plan tiny.toml --on {}",
    "count": "count {}",
    "recipe": "recipe {}",
    "hardware": "hardware {}",
    "fit": "fit --on {}",
    "launch": "launch {} --nodes 1",
    "launch --run": "launch tiny.toml --nodes 1 --gpus-per-node 1 --run {}",
    "resume": "resume {}",
    "evaluate": "evaluate {}",
    "evaluate --tokens": "evaluate runs/tiny --tokens {}",
    "generate": "generate {}",
    "chat": "chat {}",
    "serve": "serve {}",
    "serve --api-key-file": "serve runs/tiny --api-key-file {}",
    "export": "export {} --out new",
    "report": "report {}",
    "runs": "runs {}",
}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A command that waits for what never comes is ended."""
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture
def irregular(place: Path, kind: str) -> Iterator[str]:
    if kind == "fifo":
        os.mkfifo("fifo")
    elif kind == "folder":
        Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "socket":
            listening.bind("socket")
        yield kind


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_at_once(refusal: Refusal, irregular: str, command: str) -> None:
    line = refusal(*COMMANDS[command].format(irregular).split())
    assert irregular in line


@pytest.mark.parametrize("kind", ["fifo"])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("data/train.tokens", "train tiny.toml --run new"),
        ("data/train.tokens.json", "train tiny.toml --run new"),
        ("data/tokenizer.json", "train tiny.toml --run new"),
        ("data/validation.tokens", "evaluate runs/tiny"),
        ("runs/tiny/recipe.toml", "resume runs/tiny"),
        ("runs/tiny/tokenizer.json", "generate runs/tiny"),
        ("runs/tiny/metrics.jsonl", "report runs/tiny"),
        ("runs/tiny/measurement.json", "report runs/tiny"),
        ("runs/tiny/run.json", "report runs/tiny"),
        ("runs/tiny/plan.json", "report runs/tiny"),
        ("runs/tiny/checkpoints/step-00000006/model.safetensors", "evaluate runs/tiny"),
        ("runs/tiny/checkpoints/step-00000006/SHA256SUMS", "evaluate runs/tiny"),
        ("runs/tiny/checkpoints/step-00000006/state.json", "evaluate runs/tiny"),
    ],
)
def test_a_fifo_in_the_place_of_one_of_our_files_is_not_waited_for(
    napkin: Callable[..., tuple[int, str, str]], irregular: str, name: str, command: str
) -> None:
    Path(name).unlink(missing_ok=True)
    os.mkfifo(name)
    status, _, _ = napkin(*command.split())
    # A report says which file is missing; everything else is refused.
    assert status in (0, 2)
