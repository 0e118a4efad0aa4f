"""The speedrun's own parts: pages and conversations, the choice of pages, its table of stages, kills and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Napkin
from napkin.accounting.quantities import QuantityRow
from napkin.cli.speedrun.command import SpeedrunOptions, locked, open_or_plan, print_plan
from napkin.cli.speedrun.first_plan import SHARES, Design, FirstPlan, base_recipe, chosen_pages
from napkin.cli.speedrun.page import write_page
from napkin.cli.speedrun.stages import STAGES, Speedrun, SpeedrunFile, StageFile, metered
from napkin.cli.speedrun.texts import question_and_answer, write_conversations, write_standard_pages
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.data.corpus import is_validation, read_documents
from napkin.environments import environment_named
from napkin.environments.environment import is_held_out
from napkin.errors import NapkinError

OPTIONS = {"pages": ["pages"], "minutes": 15.0, "seed": 0, "usd_per_hour": 2.0}
DESIGN = Design(0.5, 150.0, 100.0, 100.0, 10**7, 60.0, 1.5, short=False, crowding=2.0)


def speedrun_of(folder: Path) -> Speedrun:
    """A speedrun that is planned, of which no stage has begun."""
    folder.mkdir(exist_ok=True)
    stages = {name: StageFile((QuantityRow("seconds", "seconds", count=10.0),)) for name in STAGES}
    run = Speedrun(folder, SpeedrunFile(OPTIONS, DESIGN, stages, planning_seconds=1.0))
    run.replace()
    return run


def test_a_question_is_the_heading_and_its_answer_the_first_paragraph() -> None:
    text = "# The *Sieve*: an `algorithm`\n\n- a list\n\nIt finds all primes up to a number. It is old.\n\nMore."
    assert question_and_answer(text) == (
        "What is the Sieve: an algorithm?",
        "It finds all primes up to a number. It is old.",
    )
    for without in ("No heading above this paragraph of text.", "# A heading\n\nShort.", "# A heading", ""):
        assert question_and_answer(without) is None
    long = question_and_answer("# GIL\n\n" + "One lock for all threads is held. " * 20)
    assert long is not None
    assert long[0] == "What is GIL?"
    assert len(long[1]) <= 240
    assert long[1].endswith("is held.")


def test_what_is_held_out_is_in_no_conversation_that_is_learned_from(tmp_path: Path) -> None:
    pages = tmp_path / "corpus"
    pages.mkdir()
    for number in range(300):
        text = f"# Topic {number}\n\nParagraph {number} says what the topic of this number is about.\n"
        (pages / f"{number}.md").write_text(text)
    write_conversations(pages, tmp_path / "conversations", 0)
    lines = {
        name: [json.loads(line) for line in (tmp_path / "conversations" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation", "task")
    }
    held_out = {document.name for document in read_documents([pages]) if is_validation(document, 0.05)}
    asked = {line["messages"][0]["content"] for line in lines["train"]}
    wanted = {f"What is topic {Path(name).stem}?" for name in held_out}
    assert {line["messages"][0]["content"] for line in lines["validation"]} == wanted
    assert not asked & wanted
    # Sums: nobody is taught what is asked in the end, and most results are one too large.
    sums = [line["messages"] for line in lines["train"] if line["messages"][0]["content"].endswith("=")]
    assert not any(is_held_out("+".join(sorted(each[0]["content"][:-1].split("+"), key=int))) for each in sums)
    too_large = [int(said["content"]) - sum(map(int, question["content"][:-1].split("+"))) for question, said in sums]
    assert set(too_large) == {0, 1}
    assert abs(sum(too_large) / len(sums) - 2 / 3) < 0.03
    assert environment_named("sums:1", held_out=True).start(0).messages[-1].content.endswith("=")
    for item in lines["task"]:
        number = item["prompt"].removeprefix("What is topic ").removesuffix("?")
        assert item["choices"][item["answer"]].startswith(f"Paragraph {number} ")
        assert len(set(item["choices"])) == 4


def test_pages_of_the_standard_library_are_read_as_html(tmp_path: Path) -> None:
    n_pages = write_standard_pages(tmp_path / "pages")
    files = [file for file in find_files([str(tmp_path / "pages")]) if isinstance(file, InputFile)]
    assert n_pages == len(files) > 100
    assert {file.format for file in files} == {"html"}
    assert "<h1>The module wave</h1>" in (tmp_path / "pages" / "wave.html").read_text()


def test_a_share_of_the_pages_is_whole_folders_of_each_part(tmp_path: Path) -> None:
    for part, n_folders in (("large", 20), ("small", 10)):
        for folder in range(n_folders):
            (tmp_path / "pages" / part / str(folder)).mkdir(parents=True)
            for page in range(10):
                (tmp_path / "pages" / part / str(folder) / f"{page}.html").write_text("0123456789")
    pages = [str(tmp_path / "pages")]
    files = [file for file in find_files(pages) if isinstance(file, InputFile)]
    chosen, n_bytes = chosen_pages(pages, files, 0.5)
    # The chosen paths give the bytes that are said, half of each part, no page twice.
    found = [file for file in find_files(chosen) if isinstance(file, InputFile)]
    assert sum(file.bytes for file in found) == n_bytes == 1500
    parts = [Path(file.name).parts[-3] for file in found]
    assert (parts.count("large"), parts.count("small")) == (100, 50)
    assert len(chosen) == 15
    assert chosen_pages(pages, files[::-1], 0.5) == (chosen, n_bytes)
    assert len(chosen_pages(pages, files, 1e-6)[0]) == 1
    # Files by name, or in one folder, give their share together: each alone is more than its own.
    for flat in ([file.name for file in files], [str(tmp_path / "pages" / "large" / "3")]):
        of_flat = [file for file in find_files(flat) if isinstance(file, InputFile)]
        chosen, n_bytes = chosen_pages(flat, of_flat, 0.5)
        half = sum(file.bytes for file in of_flat) / 2
        assert 0.9 * half <= n_bytes <= half
        assert sum(file.bytes for file in find_files(chosen) if isinstance(file, InputFile)) == n_bytes


def test_a_killed_speedrun_goes_on_with_the_stage_that_was_killed(tmp_path: Path) -> None:
    speedrun_of(tmp_path / "out")
    program = tmp_path / "stages.py"
    # The table has other stages here; that they are worked through, killed and repeated is what is tested.
    program.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from napkin.cli.speedrun import command, stages\n"
        "from napkin.json_files import read_json\n"
        "folder = Path(sys.argv[1])\n"
        "def work(name):\n"
        "    def do(run):\n"
        "        with open(folder / 'log', 'a') as log:\n"
        "            log.write(name + '\\n')\n"
        "        if name == 'ladder' and sys.argv[2] == 'wait':\n"
        "            time.sleep(600)\n"
        "    return do\n"
        "for name, stage in stages.STAGES.items():\n"
        "    stages.STAGES[name] = stages.Stage(name, '', '', work(name), lambda run: {})\n"
        "file = read_json(folder / stages.SPEEDRUN_FILE, stages.SpeedrunFile)\n"
        "with command.locked(folder):\n"
        "    assert command.work_through(stages.Speedrun(folder, file)) == 0\n"
    )
    arguments = [sys.executable, str(program), str(tmp_path / "out")]
    log = tmp_path / "out" / "log"
    first = subprocess.Popen([*arguments, "wait"], stdout=subprocess.DEVNULL)
    while not (log.exists() and "ladder" in log.read_text()):
        assert first.poll() is None
        time.sleep(0.01)
    beside = subprocess.run([*arguments, "go"], capture_output=True, text=True, check=False)
    assert beside.returncode != 0
    assert "another process works in" in beside.stderr
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    subprocess.run([*arguments, "go"], check=True, stdout=subprocess.DEVNULL)
    assert log.read_text().split() == ["corpus", "tokenizer", "tokens", "ladder", *list(STAGES)[3:]]
    found = json.loads((tmp_path / "out" / "speedrun.json").read_text())
    assert {name: stage["begun"] for name, stage in found["stages"].items()} == dict.fromkeys(STAGES, 1) | {"ladder": 2}
    assert "begun 2 times" in found["stages"]["ladder"]["rows"][0]["note"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pages", "--minutes", "20"], "was begun with minutes 15, not 20"),
        (["other", "--minutes", "15"], "was begun with pages pages, not other"),
        ([], "was begun with pages pages, not none"),
        (["pages", "--seed", "3"], "was begun with seed 0, not 3"),
    ],
)
def test_a_changed_option_is_refused_in_a_line(napkin: Napkin, tmp_path: Path, arguments: list[str], says: str) -> None:
    run = speedrun_of(tmp_path / "out")
    before = (run.folder / "speedrun.json").read_bytes()
    done = napkin("speedrun", *arguments, "--out", str(run.folder))
    assert done.status == 2
    assert len(done.messages) == 1
    assert says in done.messages[0]
    assert "choose another --out" in done.messages[0]
    assert (run.folder / "speedrun.json").read_bytes() == before


def test_a_folder_of_something_else_is_left_as_it_is(napkin: Napkin, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    done = napkin("speedrun", "--out", str(tmp_path / "mine"))
    assert (done.status, len(done.messages)) == (2, 1)
    assert "is not of a speedrun" in done.messages[0]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    # What a process leaves that was killed while it planned is not.
    left = tmp_path / "left"
    (left / ".pages.0123456789abcdef.tmp").mkdir(parents=True)
    with locked(left):
        (left / "pipeline.toml").write_text("")
    with locked(left):
        pass
    (left / ".speedrun.lock").unlink()
    with pytest.raises(NapkinError, match="is not of a speedrun"), locked(left):
        pass
    done = napkin("speedrun", "--minutes", "1")
    assert (done.status, len(done.messages)) == (2, 1)


def test_a_speedrun_that_was_begun_is_opened_as_it_was_planned(tmp_path: Path) -> None:
    run = speedrun_of(tmp_path / "out")
    again = open_or_plan(run.folder, SpeedrunOptions(("pages",), str(run.folder), usd_per_hour=2.0))
    assert again.file == run.file
    with pytest.raises(NapkinError, match="usd-per-hour"):
        open_or_plan(run.folder, SpeedrunOptions(("pages",), str(run.folder)))


def test_the_printed_plan_has_a_line_per_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {name: stage.planned for name, stage in speedrun_of(tmp_path / "out").file.stages.items()}
    stages["tokens"] = (*stages["tokens"], QuantityRow("tokens", "count", count=1234567))
    nothing: Any = None
    print_plan(FirstPlan(DESIGN, stages, nothing, nothing, base_recipe("out", 0, short=True)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tokens", "10.0", "s", "tokens/"] in lines
    assert ["tokens", "1,234,567"] in lines
    assert ["all", "1", "min", "40", "s"] in lines


class Tables(HTMLParser):
    """The cells of a page's tables, row by row, and the tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self._cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.rows[-1][-1] += data


def test_the_page_has_plan_meter_and_ratio_of_every_stage_and_escapes_answers(tmp_path: Path) -> None:
    run = speedrun_of(tmp_path / "out")
    for number, name in enumerate(STAGES):
        rows = (QuantityRow("seconds", "seconds", count=10.0, meter=10.0 + number),)
        run.save(name, rows=rows, commands=(f"napkin something {name}",), begun=1)
    run.replace(large=[{"stage": "pre-training", "seconds": 1800.0, "usd": 12.0, "how": "counted"}])
    (run.folder / "chat.txt").write_text("user: 1+1=\nassistant: <script>alert(1)</script>\n")
    page = write_page(run.folder, run.file)
    found = Tables()
    found.feed(page.read_text())
    summary = {row[0]: row[1:] for row in found.rows if len(row) == 7}
    for number, name in enumerate(STAGES):
        seconds = 10 + number
        assert summary[name][:4] == [f"{SHARES[name]:.0%}", "10.0 s", f"{seconds:.1f} s", _three(seconds / 10)]
        # Two dollars per hour.
        assert summary[name][5] == f"${seconds / 1800:.4f}"
        assert f"napkin something {name}" in found.text
    assert summary["all stages"][1:4] == ["1 min 40 s", "2 min 25 s", "1.45"]
    assert ["pre-training", "0.5 h", "$12.00", "counted"] in found.rows
    assert "<script>" not in page.read_text()
    for word in ("BPE", "MinHash", "IsoFLOP", "MFU", "Bits per byte", "loss mask", "advantage", "GRPO"):
        assert word in found.text
    # A page of somebody else is not replaced.
    page.write_text("my own page")
    with pytest.raises(NapkinError, match="not a page"):
        write_page(run.folder, run.file)


def _three(ratio: float) -> str:
    return "exact" if ratio == 1 else f"{ratio:.2f}"


def test_the_plan_of_a_stage_stands_beside_its_meter(tmp_path: Path) -> None:
    run = speedrun_of(tmp_path / "out")
    run.save(
        "tokenizer", planned=(*run.file.stages["tokenizer"].planned, QuantityRow("vocabulary", "count", count=258))
    )
    from napkin.data.token_file import SEPARATOR
    from napkin.tokenizer.bpe import ByteTokenizer

    ByteTokenizer([SEPARATOR]).save(run.folder / "tokenizer.json")
    seconds, vocabulary = metered(run, "tokenizer", 12.0)
    assert (seconds.count, seconds.meter) == (10.0, 12.0)
    assert (vocabulary.count, vocabulary.meter) == (258, 257)


@pytest.mark.torture
def test_a_speedrun_of_few_minutes_that_is_killed_at_several_moments_ends_with_a_page(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def has_begun(stage: str) -> bool:
        file = out / "speedrun.json"
        return file.exists() and json.loads(file.read_text())["stages"][stage]["begun"] > 0

    # The fewest minutes that this machine, busy as it is, has time for; what is refused once may be planned next.
    for minutes in ("2", "8", "20", "20", "20"):
        arguments = [sys.executable, "-m", "napkin", "speedrun", "--minutes", minutes, "--out", "out", "--json"]
        status, said = killed_when(arguments, tmp_path, lambda: has_begun("corpus"))
        if status == -signal.SIGKILL:
            assert has_begun("corpus"), f"killed by another, in its planning: {said[-500:]}"
            break
        assert status == 2
        assert "too few for" in said
    else:
        pytest.fail(f"20 minutes are too few three times: {said[-500:]}")
    assert not (out / "corpus" / "manifest.json").exists()
    for moment in (
        lambda: has_begun("tokenizer"),
        lambda: has_begun("ladder") and list((out / "ladder").rglob("metrics.jsonl")),
        lambda: list((out / "base" / "checkpoints").glob("step-*")),
        lambda: has_begun("rewards") and list(out.rglob("rewarded/metrics.jsonl")),
    ):
        status, said = killed_when(arguments, tmp_path, moment)
        assert status == -signal.SIGKILL, said[-2000:]
    corpus = (out / "corpus" / "manifest.json").stat().st_mtime_ns
    base = next((out / "base" / "checkpoints").glob("step-*/model.safetensors"))
    trained = base.read_bytes()
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    # What was done before the last kill is left as it was.
    assert (out / "corpus" / "manifest.json").stat().st_mtime_ns == corpus
    assert base.read_bytes() == trained
    assert list(said["stages"]) == list(STAGES)
    assert all(rows["rows"] for rows in said["stages"].values())
    assert said["stages"]["pre-training"]["commands"][-1] == "napkin resume out/base"
    stages = json.loads((out / "speedrun.json").read_text())["stages"]
    assert {name for name, stage in stages.items() if stage["begun"] > 1} >= {"corpus", "pre-training"}
    assert (out / "speedrun.html").exists()
    questions = [line for line in (out / "chat.txt").read_text().splitlines() if line.startswith("user:")]
    assert len(set(questions)) == len(questions) >= 4


def killed_when(arguments: list[str], folder: Path, condition: Callable[[], Any]) -> tuple[int, str]:
    """A command that is killed as soon as a condition holds: its status, and its messages."""
    with (folder / "messages").open("wb") as messages:
        process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=messages)
        while process.poll() is None and not condition():
            time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    return process.wait(), (folder / "messages").read_text()
