"""`napkin completion`: the scripts are accepted by their shells, and complete in a real one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.cli import COMMANDS, TOKENIZER
from napkin.cli.completion import words_of_commands
from napkin.model.config import presets
from napkin.planning.layouts.stack import stacks

BASH = shutil.which("bash")


@pytest.fixture
def scripts(napkin, tmp_path: Path) -> Path:
    for shell in ("bash", "zsh", "fish"):
        done = napkin("completion", shell)
        assert (done.status, done.err) == (0, "")
        (tmp_path / shell).write_text(done.out)
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_accepted_by_its_shell(scripts: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([program, "-n", str(scripts / shell)], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.sampled(every=3)
@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("napkin tokenizer comp", "napkin tokenizer compare"),
        ("napkin calib", "napkin calibrate"),
        ("napkin count --by oper", "napkin count --by operator"),
        ("napkin count --by=oper", "napkin count --by=operator"),
        ("napkin train --optimizer.learn", "napkin train --optimizer.learning-rate"),
        ("napkin resume --data.tr", "napkin resume --data.train"),
        ("napkin plan --tokens-p", "napkin plan --tokens-per-second"),
        ("napkin plan --serv", "napkin plan --serve"),
        ("napkin plan serv", "napkin plan service"),
        ("napkin plan --preset qwen3-cod", "napkin plan --preset qwen3-coder-480b-a35b"),
        ("napkin plan --stack torchti", "napkin plan --stack torchtitan"),
        ("napkin evaluate a-run-w", "napkin evaluate a-run-with-a-name"),
    ],
)
def test_a_tab_in_a_real_bash_completes(scripts: Path, typed: str, completed: str) -> None:
    import pty

    (scripts / "a-run-with-a-name").write_text("")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(scripts)
        os.environ |= {"PS1": "", "TERM": "dumb", "HISTFILE": "/dev/null"}
        os.execv(str(BASH), ["bash", "--norc", "--noprofile", "-i"])
    # Ctrl-A goes to the beginning of the line, which is then printed instead of run.
    os.write(terminal, f"source ./bash\n{typed}\t\x01echo 'result:' \nexit\n".encode())
    written = b""
    try:
        while data := os.read(terminal, 2**16):
            written += data
    except OSError:  # Linux says so that the other side has closed.
        pass
    os.waitpid(pid, 0)
    results = [line.strip() for line in written.decode(errors="replace").splitlines() if line.startswith("result:")]
    assert results == [f"result: {completed}"]


def test_names_that_are_completed_are_those_of_the_package() -> None:
    plan = words_of_commands()["plan"]
    assert plan["--preset"] == tuple(presets())
    assert set(plan["--stack"]) == set(stacks())
    assert {"rule", "layouts", "service", "program", "--serve", "--program"} <= plan.keys()


def test_every_command_and_option_is_in_the_scripts(scripts: Path) -> None:
    for shell in ("bash", "fish"):
        script = (scripts / shell).read_text()
        assert all(name in script for name in (*COMMANDS, *TOKENIZER.commands))
    program = "import sys\nfrom napkin.cli import main\nassert main(['completion', 'bash']) == 0\n"
    program += "assert not {'torch', 'numba'} & sys.modules.keys()\n"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
