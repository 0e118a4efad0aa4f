"""Raw documents, a pipeline over them, and the corpus that nothing happened to."""

import gzip
import json
import os
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from napkin.curation.engine.pipeline_file import read_pipeline
from napkin.curation.engine.pipeline_run import curate
from napkin.curation.registry import STAGES, StageEntry
from reliability.harness import Napkin

SITE = Path(__file__).parent / "worker_site"
PIPELINE = """\
[input]
paths = ["raw"]
licence = "CC-BY-4.0"
shard_bytes = 20_000

[[stage]]
name = "fragile"

[[stage]]
name = "first"

[[stage]]
name = "length"
least = 20
most = 2_000

[output]
format = "jsonl.zst"
shard_bytes = 5_000
samples = 3
"""
# Debian's Python has imported a sitecustomize of its own.
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(SITE)!r}); sys.modules.pop('sitecustomize', None); import sitecustomize; "
    "from napkin.cli import main; "
)
"""Begins a program in which the stages of tests are known, to its workers too."""


def write_raw(folder: Path) -> None:
    """Files of text, JSON lines and gzip, with copies, short and long documents, and some that cannot be read."""
    folder.mkdir()
    for file in range(6):
        parts = [f"document {file}.{number}: {'word ' * (number * 7 % 50)}\n" for number in range(20)]
        parts[3] = "the same text stands in every file, and remains once\n"
        (folder / f"{file}.txt").write_text("<|endoftext|>\n".join(parts))
    lines = [json.dumps({"text": f"line {number} {'x' * (number * 90 % 2500)}", "n": number}) for number in range(40)]
    lines[7] = '{"text": "cut'
    (folder / "lines.jsonl").write_text("\n".join(lines))
    (folder / "more.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:20]).encode(), mtime=0)[:-9])
    (folder / "page.html").write_text("<p>no stage makes text of it</p>")
    (folder / "raises.txt").write_text("raise an exception, please\n<|endoftext|>\na surrogate, please: here\n")
    for path in folder.iterdir():
        # A corpus says when its files were changed.
        os.utime(path, ns=(10**18, 10**18))


def know_stages(patch: pytest.MonkeyPatch) -> None:
    """Make the stages of tests known, to workers too."""
    patch.syspath_prepend(str(SITE))
    patch.setitem(STAGES, "first", StageEntry("curation_stages:FirstOfEachText", ""))
    patch.setitem(STAGES, "fragile", StageEntry("curation_stages:Fragile", ""))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with raw documents and a pipeline."""
    know_stages(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_raw(tmp_path / "raw")
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    return tmp_path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like `place`, with the corpus that one worker made."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        know_stages(patch)
        write_raw(folder / "raw")
        (folder / "pipeline.toml").write_text(PIPELINE)
        curate(read_pipeline("pipeline.toml"), Path("corpus"))
    return folder


@pytest.fixture
def commands(place: Path, server: subprocess.Popen[str]) -> Napkin:
    """Commands in `place`."""
    return Napkin(place, server)


def contents(corpus: Path) -> dict[str, bytes]:
    """Every file of a corpus but the one with seconds."""
    files = {str(path.relative_to(corpus)): path.read_bytes() for path in corpus.rglob("*") if path.is_file()}
    files.pop("meter.json", None)
    return files
