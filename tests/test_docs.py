"""Every command and every Python block in README and docs runs, in the order of the page; figures shown are true."""

import dataclasses
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from napkin.accounting.counting import count
from napkin.cli.completion import words_of_commands
from napkin.model.transformer import Transformer
from napkin.optim import OPTIMIZERS, AdamW
from napkin.units import format_bytes, format_count, format_flops
from reliability.harness import Napkin

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# CHANGELOG tells of files as they were.
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


PLAIN = re.compile(
    r"(echo '(?P<said>[^']*)' \| )?napkin (?P<words>([^|&;$*`<>']|'[^']*')+)(> (?P<file>[\w./-]+))?"
    r"(; test \$\? = (?P<status>\d))?"
)
"""A command that needs no shell: with a line to read, a file for its output and another exit status than 0, or not."""


def commands_of(page: Path) -> list[tuple[list[str], list[str]]]:
    """The page's commands with the lines that it shows of what they print: shell lines behind `$ `, Python blocks."""
    commands: list[tuple[list[str], list[str]]] = []
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            commands.append(([sys.executable, "-c", text], []))
            continue
        for line in text.splitlines():
            if line.startswith("$ "):
                commands.append((["bash", "-c", line[2:]], []))
            elif line:
                commands[-1][1].append(line)
    return commands


def is_same_everywhere(command: str) -> bool:
    """Whether all figures printed are: those of counts and datasheets are, those of clocks and Python's library not."""
    return command.startswith(("napkin plan", "napkin fit", "napkin count", "napkin formats", "napkin hardware"))


LONG = set(
    "adapters benchmarking books compiling course evaluation extraction first-run index install layouts memory "
    "preferences profiling scaling tokenizers watching".split()
)
"""Pages whose commands train, measure or install for long."""


@pytest.mark.sampled(every=27)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.torture] if page.stem in LONG else [], id=page.stem)
        for page in PAGES
        if commands_of(page)
    ],
)
def test_every_command_of_the_page_works_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    folder, streams = tmp_path / "page", tmp_path / "streams"
    folder.mkdir()
    streams.mkdir()
    napkin = Napkin(folder, server, streams)
    for command, shown in commands_of(page):
        status, out, err = run(command, napkin, forks=page.stem != "install")
        assert status == 0, f"{command[-1]}\n{out}\n{err}"
        printed = [line.split() for line in (out + err).splitlines()]
        for line in shown:
            if is_same_everywhere(command[-1]) or not re.search(r"\d", line):
                assert line.split() in printed, f"{command[-1]}\n{out}\n{err}"


@pytest.mark.torture
def test_the_programs_of_the_readme_can_be_run_again(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    (tmp_path / "streams").mkdir()
    napkin = Napkin(tmp_path, server, tmp_path / "streams")
    programs = [command for command, _ in commands_of(ROOT / "README.md") if command[0] == sys.executable]
    for command in 2 * programs:
        status, out, err = run(command, napkin, forks=True)
        assert status == 0, f"{command[-1]}\n{out}\n{err}"


def test_every_option_that_a_page_shows_is_one_of_its_command() -> None:
    words = words_of_commands()
    for command in (command[-1] for page in ALL_PAGES for command, _ in commands_of(page)):
        plain = PLAIN.fullmatch(command)
        if plain is None:
            continue
        typed = list(itertools.takewhile(lambda word: word != "--", shlex.split(plain["words"])))
        name = next(name for name in (" ".join(typed[:2]), typed[0]) if name in words)
        # `--serve` chooses another command behind the same name.
        options = {word.partition("=")[0] for word in typed if word.startswith("--")} - {"--serve"}
        assert options <= words[name].keys(), command


def run(command: list[str], napkin: Napkin, *, forks: bool) -> tuple[int, str, str]:
    """Exit status and output of a command; with `forks` Python and `napkin` need not start anew for each."""
    plain = PLAIN.fullmatch(command[-1])
    if forks and (plain or command[0] == sys.executable):
        words, program = (shlex.split(plain["words"]), None) if plain else ([], command[-1])
        if plain and plain["said"]:
            said = f"import io, sys; sys.stdin = io.StringIO({plain['said']!r} + chr(10)); "
            words, program = [], f"{said}from napkin.cli import main; sys.exit(main({words}))"
        done = napkin.run(*words, program=program, environment={"COLUMNS": "200"})
        out, err = done.out.read_text(), done.err.read_text()
        if plain and plain["file"]:
            (napkin.folder / plain["file"]).write_text(out)
            out = ""
        expected = int(plain["status"] or 0) if plain else 0
        return int(done.wait() != expected), out, err
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200"}
    in_shell = subprocess.run(command, cwd=napkin.folder, env=environment, capture_output=True, text=True, timeout=300)
    return in_shell.returncode, in_shell.stdout, in_shell.stderr


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The rows of the table under that line of headings."""
    lines = (ROOT / "docs" / page).read_text().partition(heading + "\n")[2].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines)]


def test_the_table_of_optimizers_states_their_options() -> None:
    stated: dict[str, tuple[float, float]] = {}
    for names, _, rate, decay, *_ in rows_of(
        "optimizers.md", "| name | state, bytes per parameter | learning rate | decay | options | use it |"
    ):
        stated |= dict.fromkeys(re.findall(r"`(\w+)`", names), (float(rate.split()[0]), float(decay)))
    options = {name: optimizer.options for name, optimizer in OPTIMIZERS.items()}
    assert stated == {name: (each["learning_rate"], each.get("weight_decay", 0)) for name, each in options.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.torture)])
def test_the_table_of_switches_states_what_a_count_finds(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "model_switches.py"))
    rows = rows_of("models.md", "| switch | parameters | FLOPs per step | peak bytes | seconds | × |")
    configs = {
        name: dataclasses.replace(benchmark["BASE"], **changes) for name, changes in benchmark["SWITCHES"].items()
    }
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in Transformer(config).parameters()) for name, config in configs.items()}
    assert {row[0]: row[1] for row in rows} == {name: format_count(size) for name, size in sizes.items()}
    for name, _, flops, peak, *_ in rows[::every]:
        trained = benchmark["Trained"](configs[name])
        ledger = count(trained.module, trained.batch, optimizer=AdamW)
        assert (flops, peak) == (format_flops(ledger.flops), format_bytes(ledger.peak_bytes)), name


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", prose_of(page)):
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(other), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_the_tests_and_benchmarks_that_a_page_names_exist(page: Path) -> None:
    for named in re.findall(r"`((?:tests|benchmarks)/[\w./-]*)`", prose_of(page)):
        assert (ROOT / named).exists(), f"{page.name} names {named}"


def prose_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_an_anchor_is_the_heading_in_small_letters_without_signs(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# What `x` is, and why\n\n```\n# no heading\n```\n")
    assert anchors_of(tmp_path / "page.md") == {"what-x-is-and-why"}
