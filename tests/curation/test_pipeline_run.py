"""Pipelines: the same bytes whatever happens on the way, and refusals that name what is different."""

import json
import os
import re
import signal
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from curation.conftest import PIPELINE, PROGRAM, contents
from napkin.curation.engine.corpus_files import read_manifest
from napkin.curation.engine.document_story import find_story
from napkin.curation.engine.pipeline_file import pipeline_of, read_pipeline
from napkin.curation.engine.pipeline_run import curate
from napkin.curation.reading.bounded_stream import decompressed
from napkin.errors import NapkinError
from reliability.harness import Command, Napkin

pytest.importorskip("zstandard")

KILLS = [4, 40]
"""Operations on files of the corpus before which the command is killed."""
MANY_KILLS = range(1, 200)
TORTURE = pytest.mark.torture


def lines_of(path: Path) -> list[dict[str, Any]]:
    with open(path, "rb") as file:
        stream, data = decompressed(file, 10**6), b""
        while part := stream.read(2**20):
            data += part
    return [json.loads(line) for line in data.splitlines()]


def documents(corpus: Path) -> list[dict[str, Any]]:
    return [line for path in sorted((corpus / "documents").iterdir()) for line in lines_of(path)]


def dropped(corpus: Path) -> list[dict[str, Any]]:
    return [line for path in sorted((corpus / "dropped").iterdir()) for line in lines_of(path)]


def run_in(commands: Napkin, *options: str, **limits: Any) -> Command:
    """`napkin data run` in a process of its own, which knows the stages of tests."""
    words = ["data", "run", "pipeline.toml", "--out", "corpus", *options]
    return commands.run(program=f"{PROGRAM} import os; sys.stdout.flush(); os._exit(main({words!r}))", **limits)


@pytest.mark.thorough
def test_every_document_is_in_the_corpus_or_dropped_or_set_aside_and_counted(undisturbed: Path) -> None:
    corpus = undisturbed / "corpus"
    manifest = read_manifest(corpus)
    kept, gone, aside = documents(corpus), dropped(corpus), lines_of(corpus / "set_aside.jsonl")
    assert (manifest.documents, manifest.input.files) == (len(kept), 10)
    failed = sum(each["reason"] == "stage failed" for each in aside)
    assert manifest.input.read.documents == len(kept) + len(gone) + failed
    identities = [each["identity"] for each in (*kept, *gone)]
    assert len(set(identities)) == len(identities)
    reasons = sorted(each["reason"] for each in aside)
    assert reasons == ["not JSON", "not JSON", "stage failed", "stage failed", "truncated"]
    assert manifest.set_aside == {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    fragile, first, length = manifest.stages
    assert (fragile.name, fragile.version, fragile.dropped) == ("fragile", 2, {})
    assert first.dropped["copy"].documents == sum(each["rule"] == "copy" for each in gone)
    assert set(length.dropped) == {"too short", "too long"}
    assert length.entered == first.remained
    assert first.remained.documents == first.entered.documents - first.dropped["copy"].documents
    assert manifest.text_bytes == sum(len(each["text"].encode()) for each in kept) == length.remained.bytes
    texts = [each["text"] for each in kept]
    assert len(set(texts)) == len(texts)
    assert texts.count("the same text stands in every file, and remains once\n") == 1


def test_a_document_says_where_it_comes_from_and_what_happened_to_it(undisturbed: Path) -> None:
    corpus = undisturbed / "corpus"
    manifest = read_manifest(corpus)
    for each in documents(corpus)[::9]:
        with open(undisturbed / each["source"], "rb") as file:
            file.seek(each["offset"])
            begin = file.read(12)
        assert begin in each["text"].encode() + b'{"text": "line'
        assert each["licence"] == "CC-BY-4.0"
        assert [entry["stage"] for entry in each["trace"]] == ["fragile", "first", "length"]
        story = find_story(corpus, each["identity"])
        assert story.ending in [f"in documents/{file.name}" for file in manifest.files]
    copy = next(each for each in dropped(corpus) if each["rule"] == "copy")
    story = find_story(corpus, copy["identity"])
    assert story.ending == "dropped by first: copy (of raw/0.txt#4)"
    assert [entry.stage for entry in story.trace] == ["fragile"]
    assert find_story(corpus, "raw/raises.txt#1").ending.startswith("set aside: stage failed (fragile: ZeroDivision")
    for identity, complaint in {"raw/7.txt#1": "did you mean", "raw/0.txt#99": "others", "x": "identity is"}.items():
        with pytest.raises(NapkinError, match=complaint):
            find_story(corpus, identity)


def test_samples_are_the_documents_whose_identities_hash_lowest(undisturbed: Path) -> None:
    from hashlib import blake2b

    corpus = undisturbed / "corpus"
    samples = lines_of(corpus / "samples.jsonl")
    found: dict[tuple[int, str], list[str]] = {}
    for each in samples:
        found.setdefault((each["stage"], each["rule"]), []).append(each["identity"])
    numbers = {"fragile": 0, "first": 1, "length": 2}
    expected: dict[tuple[int, str], list[str]] = {(-1, ""): [each["identity"] for each in documents(corpus)]}
    for each in dropped(corpus):
        expected.setdefault((numbers[each["stage"]], each["rule"]), []).append(each["identity"])
    for rule, identities in expected.items():
        ordered = sorted(identities, key=lambda each: blake2b(each.encode(), digest_size=8).digest())
        assert found[rule] == ordered[:3]
    assert found.keys() == expected.keys()


@pytest.mark.thorough
def test_the_bytes_do_not_depend_on_the_number_of_workers(place: Path, undisturbed: Path) -> None:
    curate(read_pipeline("pipeline.toml"), Path("corpus"), workers=3)
    assert contents(place / "corpus") == contents(undisturbed / "corpus")


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.torture)])
def test_a_killed_command_goes_on_to_the_same_bytes(
    place: Path, commands: Napkin, undisturbed: Path, kills: list[int] | range
) -> None:
    for at in kills:
        command = run_in(commands, "--workers", "2", signal_at=at, near="corpus", signal=signal.SIGKILL)
        assert command.status in (-9, 0)
    assert run_in(commands, "--workers", "2").status == 0
    assert contents(place / "corpus") == contents(undisturbed / "corpus")


@pytest.mark.torture
def test_killed_at_any_instant_and_begun_anew_the_bytes_are_the_same(
    place: Path, commands: Napkin, undisturbed: Path
) -> None:
    import shutil

    expected = contents(undisturbed / "corpus")
    for at in MANY_KILLS:
        shutil.rmtree("corpus", ignore_errors=True)
        run_in(commands, "--workers", "2", signal_at=at, near="corpus", signal=signal.SIGKILL)
        assert run_in(commands, "--workers", "2").status == 0
        assert contents(place / "corpus") == expected, at


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moments",
    [
        [(9, ""), (14, " parent")],
        pytest.param([(n, n % 2 * " parent") for n in range(1, 40)], marks=pytest.mark.torture),
    ],
)
def test_a_worker_that_is_killed_costs_a_line(
    place: Path, commands: Napkin, undisturbed: Path, moments: list[tuple[int, str]]
) -> None:
    for at, parent in moments:
        ends = {"WORKER_ENDS": f"{at} {place / f'ended-{at}'}{parent}"}
        command = run_in(commands, "--workers", "1", environment=ends)
        if parent:
            assert command.status in (-9, 0)
            assert run_in(commands).status == 0
        else:
            assert command.status == 0
            told = [line for line in command.errors if "done again" in line]
            assert len(told) == (place / f"ended-{at}").exists()
        assert contents(place / "corpus") == contents(undisturbed / "corpus")
        subprocess.run(["rm", "-r", "corpus"], check=True)


@pytest.mark.thorough
def test_a_document_that_ends_every_worker_is_set_aside(place: Path) -> None:
    (place / "raw" / "zz.txt").write_text("before\n<|endoftext|>\nabort, please\n<|endoftext|>\nand one behind it\n")
    told: list[str] = []
    outcome = curate(read_pipeline("pipeline.toml"), Path("corpus"), on_message=told.append)
    assert outcome.manifest.set_aside["ended a worker"] == 1
    assert [re.sub(r" at .*", "", line) for line in told] == [
        "a worker ended (status 7)",
        "a worker ended again (status 7)",
    ]
    assert find_story(Path("corpus"), "raw/zz.txt#2").ending == "set aside: ended a worker (twice)"
    assert "dropped by length" in find_story(Path("corpus"), "raw/zz.txt#3").ending


def test_content_of_which_no_stage_made_text_is_set_aside(place: Path) -> None:
    outcome = curate(pipeline_of({"input": {"paths": ["raw/page.html", "raw/0.txt"]}}), Path("corpus"))
    assert outcome.manifest.set_aside == {"no text": 1}
    assert (
        find_story(Path("corpus"), "raw/page.html#1").ending == "set aside: no text (no stage made text of text/html)"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("most", [1200, pytest.param(300, marks=TORTURE), pytest.param(4000, marks=TORTURE)])
def test_a_full_disk_is_a_line_and_the_corpus_can_be_finished(
    place: Path, commands: Napkin, undisturbed: Path, most: int
) -> None:
    command = run_in(commands, largest_file=most)
    assert command.status == 2
    assert len(command.errors) == 1, command.errors
    assert "File too large" in command.errors[0]
    assert run_in(commands).status == 0
    assert contents(place / "corpus") == contents(undisturbed / "corpus")


def test_what_is_finished_says_so_and_what_is_different_is_refused(place: Path, undisturbed: Path) -> None:
    raw = place / "raw"
    (place / "corpus").symlink_to(undisturbed / "corpus")
    again = curate(read_pipeline("pipeline.toml"), Path("corpus"))
    assert again.was_finished
    for old, new, complaint in (
        ("least = 20", "least = 30", "stage 3.least was 20, it is 30 now"),
        ('name = "first"', 'name = "fragile"', 'stage 2.name was "first", it is "fragile" now'),
        ('[[stage]]\nname = "fragile"\n', "", "stage was fragile, first, length, it is first, length now"),
        ("samples = 3", 'samples = 3\nformat = "text"', None),
        ('format = "jsonl.zst"', 'format = "text"', 'output.format was "jsonl.zst", it is "text" now'),
    ):
        (place / "pipeline.toml").write_text(PIPELINE.replace(old, new))
        if complaint is None:
            with pytest.raises(NapkinError, match="is not TOML"):
                read_pipeline("pipeline.toml")
            continue
        with pytest.raises(NapkinError, match=re.escape(f"made otherwise: {complaint}")):
            curate(read_pipeline("pipeline.toml"), Path("corpus"))
    pipeline = pipeline_of_text(PIPELINE)
    (raw / "3.txt").write_text("something else")
    with pytest.raises(NapkinError, match=r"'raw/3.txt'.*changed"):
        curate(pipeline, Path("corpus"))
    (raw / "3.txt").unlink()
    with pytest.raises(NapkinError, match=r"'raw/3.txt'.*'raw/4.txt'"):
        curate(pipeline, Path("corpus"))
    Path("other").mkdir()
    Path("other/file").write_text("")
    with pytest.raises(NapkinError, match="'other' exists"):
        curate(pipeline, Path("other"))
    with pytest.raises(NapkinError, match=r"raw/4.txt' exists"):
        curate(pipeline, raw / "4.txt")
    assert os.listdir("other") == ["file"]


def pipeline_of_text(text: str) -> Any:
    import tomllib

    return pipeline_of(tomllib.loads(text))


def test_two_commands_do_not_write_one_corpus(place: Path) -> None:
    import fcntl

    Path("corpus").mkdir()
    descriptor = os.open("corpus", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(NapkinError, match=r"written.*process"):
            curate(read_pipeline("pipeline.toml"), Path("corpus"))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[input]\npath = ['x']", "unknown field 'input.path': did you mean 'input.paths'?"),
        ("[inputs]\n", "unknown field 'inputs': did you mean 'input'?"),
        ("", "input.paths is empty"),
        ("[input]\npaths = 'x'", "Expected `array`, got `str` - at `input.paths`"),
        ("[input]\npaths = ['']", "input.paths has ''"),
        ("[input]\npaths = ['x']\nshard_bytes = 0", "input.shard_bytes is 0: use a number from 1"),
        ("stage = 3\n[input]\npaths = ['x']", "stage is not a list of tables"),
        ("[input]\npaths = ['x']\n[[stage]]\nleast = 3", "stage 1 has no name"),
        ("[input]\npaths = ['x']\n[[stage]]\nname = 'lenght'", "there is no stage 'lenght': did you mean 'length'?"),
        ("[input]\npaths = ['x']\n[output]\nformat = 'csv'", "Invalid enum value 'csv' - at `output.format`"),
    ],
)
def test_a_pipeline_that_is_wrong_is_refused_by_its_field(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "pipeline.toml").write_text(text)
    with pytest.raises(NapkinError, match=re.escape(complaint)):
        read_pipeline(tmp_path / "pipeline.toml")


def test_a_list_that_changes_between_two_runs_is_refused_as_an_option_would_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text about cheese")
    words = tmp_path / "words.txt"
    words.write_text("sausage\n")
    text = f'[input]\npaths = ["{tmp_path}/a.txt"]\n[[stage]]\nname = "word-list"\nfile = "{words}"\n'
    manifest = curate(pipeline_of_text(text), tmp_path / "corpus").manifest
    assert manifest.files_of_options == {str(words): sha256(b"sausage\n").hexdigest()}
    assert curate(pipeline_of_text(text), tmp_path / "corpus").was_finished
    words.write_text("cheese\n")
    with pytest.raises(NapkinError, match=r"words.txt'.*changed"):
        curate(pipeline_of_text(text), tmp_path / "corpus")
