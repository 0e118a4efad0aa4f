"""A folder with a text, its tokens and a trained run, made once by the commands themselves; each test has a copy."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest

from napkin.cli import main

TINY = """\
[model]
context_length = 16
d_model = 16
n_layers = 1
n_heads = 2

[training]
steps = 6
batch_size = 4
threads = 1
"""


class Done(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """Lines of standard error without those on progress, which a slow machine prints."""
        return [line for line in self.err.splitlines() if not line.startswith("training ")]


Napkin = Callable[..., Done]


@pytest.fixture(autouse=True)
def without_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read by a program is not narrowed, unless COLUMNS says so, which pytest-xdist sets."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations go where the Makefile says, else to a folder that is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        if "NAPKIN_CACHE_DIR" not in os.environ:
            patch.setenv("NAPKIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs/ and one.txt are texts, data/ and one/ the tokens of each, runs/tiny is trained on data/."""
    folder = tmp_path_factory.mktemp("trained")
    with chdir(folder):
        Path("docs").mkdir()
        for name in "ab":
            documents = (f"Document {name}{n}: fox {n} jumps over {7 * n} lazy dogs. Café 🦊\n" for n in range(20))
            Path(f"docs/{name}.txt").write_text("<|endoftext|>\n".join(documents))
        Path("one.txt").write_text("the cat sat on the mat and looked at the dog\n" * 300)
        Path("tiny.toml").write_text(TINY)
        for command in (
            "tokenizer train docs --vocab-size 300",
            "tokenizer encode docs",
            "train tiny.toml",
            "tokenizer train one.txt --vocab-size 280 --out one/tokenizer.json",
            "tokenizer encode one.txt --tokenizer one/tokenizer.json --out one",
        ):
            assert main(command.split()) == 0
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that, to work in."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def napkin(capsys: pytest.CaptureFixture[str]) -> Napkin:
    """Run a command in this process."""

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return Done(status, out, err)

    return run


@pytest.fixture
def refusal(
    napkin: Napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Callable[..., str]:
    """Run a command that must refuse, and return its line: status 2, nothing printed, made, changed or removed.

    A test that has no folder of its own gets an empty one: the checkout changes while other tests run beside it.
    """

    def run(*arguments: str, printed: bool = False) -> str:
        if Path.cwd() in (pytestconfig.invocation_params.dir, pytestconfig.rootpath):
            monkeypatch.chdir(tmp_path)
        before = contents()
        done = napkin(*arguments)
        assert done.status == 2, done
        assert done.err.count("\n") == 1, done.err
        assert done.err.endswith("\n")
        assert printed or not done.out
        assert contents() == before
        return done.err[:-1]

    return run


def contents() -> dict[str, bytes | None]:
    """Everything in this folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(Path().rglob("*"))}
