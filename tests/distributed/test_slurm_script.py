"""The script is run by a real bash, with programs in the place of Slurm's that record what they are asked."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from napkin.distributed.cluster_job import ClusterJob, SlurmSettings, batch_script, seconds_of_time_limit
from napkin.errors import NapkinError

BASH = shutil.which("bash")
HOSTILE = "it's \"a\" run; touch made $(touch made) `touch made` \\ #x %j & | > made \\' 日本語 🦊"

SRUN = f"""#!{sys.executable}
import json, os, signal, sys, time
def record():
    names = ("OMP_NUM_THREADS", "PYTHONSAFEPATH", "NCCL_DEBUG")
    told = {{"arguments": sys.argv[1:], "environment": {{name: os.environ.get(name) for name in names}}}}
    with open("srun.tmp", "w") as file:
        json.dump(told, file)
    os.rename("srun.tmp", "srun.json")
def stop(*_):
    # What the run does meanwhile, in which the shell's `wait` is interrupted again.
    time.sleep(0.5)
    sys.exit(int(os.environ["AFTER_SIGNAL"]))
signal.signal(signal.SIGUSR1, stop)
record()
if "AFTER_SIGNAL" in os.environ:
    time.sleep(60)
sys.exit(int(os.environ.get("STATUS", "0")))
"""
SCONTROL = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    assert sys.argv[3:] == [os.environ["SLURM_JOB_NODELIST"]]
    print("node-07\\nnode-08")
else:
    with open("scontrol.json", "w") as file:
        json.dump(sys.argv[1:], file)
    sys.exit(int(os.environ.get("REQUEUE", "0")))
"""

pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")


def job(**changes: Any) -> ClusterJob:
    settings = {"name": "big", "recipe_file": "big.toml", "run": "runs/big", "nodes": 4, "gpus_per_node": 8}
    return ClusterJob(**{**settings, **changes})


def directives(script: str) -> list[str]:
    """The options in a script as Slurm reads them: up to the first command, split as `sbatch` does."""
    found: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            found += split_as_sbatch(line.removeprefix("#SBATCH "))
        elif line and not line.startswith("#"):
            break
    return found


def split_as_sbatch(line: str) -> list[str]:
    """Words of a line: quotes group, a backslash escapes in and out of them but for spaces, # begins a comment."""
    words, word, quote, escaped = [], "", "", False
    for sign in line:
        if sign.isspace() and not quote:
            words += [word] if word else []
            word, escaped = "", False
        elif escaped:
            word, escaped = word + sign, False
        elif sign == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if sign == quote else (word + sign, quote)
        elif sign in "\"'":
            quote = sign
        elif sign == "#":
            break
        else:
            word += sign
    assert not quote
    return [*words, word] if word else words


class Slurm:
    """A folder whose programs stand for Slurm's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "node-[07-08]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_CPUS_ON_NODE": "96",
        }

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        (self.folder / "job.sh").write_text(script)
        for told in ("srun.json", "scontrol.json"):
            (self.folder / told).unlink(missing_ok=True)
        return subprocess.Popen(
            [str(BASH), "job.sh"],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, **environment: str) -> tuple[int, str]:
        process = self.start(script, **environment)
        _, told = process.communicate()
        return process.returncode, told

    def told(self, program: str) -> Any:
        path = self.folder / f"{program}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def warned(self, script: str, times: int = 1, **environment: str) -> tuple[int, str, str]:
        """Run a script that gets the time limit's signal in the middle, on the batch shell alone."""
        process = self.start(script, **environment)
        for _ in range(6000):
            if self.told("srun") is not None:
                break
            time.sleep(0.01)
        for _ in range(times):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        out, err = process.communicate()
        return process.returncode, out, err


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def value_after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_the_script_asks_for_what_a_job_needs() -> None:
    settings = SlurmSettings(folder="/home/me/a b", partition="gpu", account="lab")
    assert directives(batch_script(job(cpus_per_node=96), settings)) == [
        "--job-name=big",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--exclusive",
        "--mem=0",
        "--time=24:00:00",
        "--partition=gpu",
        "--account=lab",
        "--signal=B:USR1@300",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
        "--chdir=/home/me/a b",
    ]
    shared = directives(batch_script(job(uses_gpus=False), SlurmSettings(folder="/", exclusive=False)))
    assert not [each for each in shared if each.startswith(("--gpus", "--exclusive", "--mem", "--cpus"))]


def test_srun_starts_torchrun_on_every_node_and_they_meet_on_the_first(slurm: Slurm) -> None:
    assert slurm.run(batch_script(job(python="/venv/bin/python"), SlurmSettings(folder="/"))) == (0, "")
    told = slurm.told("srun")
    arguments = told["arguments"]
    launcher = arguments.index("/venv/bin/python")
    assert "--ntasks-per-node=1" in arguments[:launcher]
    assert all(each.startswith("--") for each in arguments[:launcher])
    assert arguments[launcher + 1 : launcher + 3] == ["-m", "napkin.distributed.cluster_job"]
    options = {
        "--nnodes": "4",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node-07:23456",
        "--rdzv-id": "123456",
        "--max-restarts": "3",
        "--shutdown-timeout": "300",
    }
    assert {option: value_after(arguments, option) for option in options} == options
    assert arguments[-7:] == ["-m", "--", "napkin", "train", "big.toml", "--run", "runs/big"]
    assert told["environment"] == {"OMP_NUM_THREADS": "12", "PYTHONSAFEPATH": "1", "NCCL_DEBUG": "WARN"}
    assert slurm.told("scontrol") is None


def test_torchrun_knows_the_options_of_the_launcher(slurm: Slurm) -> None:
    from torch.distributed.run import get_args_parser

    slurm.run(batch_script(job(), SlurmSettings(folder="/")))
    arguments = slurm.told("srun")["arguments"]
    parsed = get_args_parser().parse_args(arguments[arguments.index("napkin.distributed.cluster_job") + 1 :])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("4", "8", 3)
    assert (parsed.module, parsed.training_script, parsed.training_script_args[0]) == (True, "napkin", "train")


def test_a_run_that_exists_is_resumed(slurm: Slurm) -> None:
    (slurm.folder / "runs" / "big").mkdir(parents=True)
    (slurm.folder / "runs" / "big" / "recipe.toml").write_text("")
    slurm.run(batch_script(job(), SlurmSettings(folder="/")))
    assert slurm.told("srun")["arguments"][-4:] == ["--", "napkin", "resume", "runs/big"]


def test_few_cpus_are_a_thread_per_rank(slurm: Slurm) -> None:
    slurm.run(batch_script(job(), SlurmSettings(folder="/")), SLURM_CPUS_ON_NODE="4", NCCL_DEBUG="INFO")
    environment = slurm.told("srun")["environment"]
    assert (environment["OMP_NUM_THREADS"], environment["NCCL_DEBUG"]) == ("1", "INFO")


def test_a_container_is_started_by_srun_in_the_same_folder(slurm: Slurm) -> None:
    settings = SlurmSettings(folder=str(slurm.folder), image="lab/napkin;touch made")
    slurm.run(batch_script(job(cpus_per_node=64), settings))
    arguments = slurm.told("srun")["arguments"]
    assert "--container-image=lab/napkin;touch made" in arguments
    assert f"--container-mounts={slurm.folder}:{slurm.folder}" in arguments
    assert f"--container-workdir={slurm.folder}" in arguments
    assert "--cpus-per-task=64" in arguments
    with pytest.raises(NapkinError, match="cannot be mounted"):
        SlurmSettings(folder="/a,/etc:/etc", image="lab/napkin")


@pytest.mark.parametrize("times", [1, 3])
def test_a_run_that_the_time_limit_has_stopped_goes_back_into_the_queue(slurm: Slurm, times: int) -> None:
    script = batch_script(job(), SlurmSettings(folder="/"))
    status, out, err = slurm.warned(script, times, AFTER_SIGNAL="138")
    assert (status, err) == (0, "")
    assert "back into the queue" in out
    assert slurm.told("scontrol") == ["requeue", "123456"]


def test_a_run_that_ends_after_the_warning_does_not_go_back(slurm: Slurm) -> None:
    script = batch_script(job(), SlurmSettings(folder="/"))
    assert slurm.warned(script, AFTER_SIGNAL="0")[0] == 0
    assert slurm.told("scontrol") is None


def test_a_run_that_fails_does_not_go_back(slurm: Slurm) -> None:
    script = batch_script(job(), SlurmSettings(folder="/"))
    for status in ("2", "138", "143"):
        assert slurm.run(script, STATUS=status) == (int(status), "")
        assert slurm.told("scontrol") is None


def test_where_requeueing_is_refused_the_script_says_so_with_the_status_of_the_run(slurm: Slurm) -> None:
    status, _, err = slurm.warned(batch_script(job(), SlurmSettings(folder="/")), AFTER_SIGNAL="138", REQUEUE="1")
    assert status == 138
    assert "submit this script again" in err
    assert err.count("\n") == 1


def test_hostile_names_stay_names(slurm: Slurm) -> None:
    settings = SlurmSettings(folder=f"/{HOSTILE}", image=HOSTILE.replace(" ", ""))
    script = batch_script(job(run=HOSTILE, recipe_file=HOSTILE, python=HOSTILE), SlurmSettings(folder=f"/{HOSTILE}"))
    assert slurm.run(script) == (0, "")
    arguments = slurm.told("srun")["arguments"]
    assert arguments[-3:] == [HOSTILE, "--run", HOSTILE]
    assert HOSTILE in arguments[:-3]
    assert directives(script)[-1] == f"--chdir=/{HOSTILE}"
    assert slurm.run(batch_script(job(), settings)) == (0, "")
    assert f"--container-image={settings.image}" in slurm.told("srun")["arguments"]
    assert not (slurm.folder / "made").exists()
    (slurm.folder / HOSTILE.replace("/", "")).mkdir()
    (slurm.folder / HOSTILE / "recipe.toml").write_text("")
    slurm.run(script)
    assert slurm.told("srun")["arguments"][-2:] == ["resume", HOSTILE]


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31m", "a\u202eb", "", "a\rb", "a\0b"])
def test_what_does_not_print_is_refused(text: str) -> None:
    for field in ("run", "recipe_file", "python", "name"):
        with pytest.raises(NapkinError, match="no script can hold"):
            job(**{field: text})
    with pytest.raises(NapkinError):
        SlurmSettings(folder=text)


@pytest.mark.parametrize("name", ["a b", "a;b", "$(x)", "-x", "a'b", "ä", "x" * 300])
def test_names_that_slurm_has_not_given_are_refused(name: str) -> None:
    for field in ("partition", "account"):
        with pytest.raises(NapkinError, match=f"--{field} is"):
            SlurmSettings(folder="/", **{field: name})  # pyright: ignore[reportArgumentType]
    with pytest.raises(NapkinError, match="--job-name is"):
        batch_script(job(name=name), SlurmSettings(folder="/"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1", 60), ("1:30", 90), ("2:00:01", 7201), ("1-1", 90_000), ("1-1:30", 91_800), ("7-00:00:00", 604_800)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    assert seconds_of_time_limit(text) == seconds
    assert SlurmSettings(folder="/", time=text).seconds == seconds


@pytest.mark.parametrize("text", ["", "0", "00:00:00", "24h", "1:2:3:4", "-5", "1.5", "1-", "١", "24:00:00\n", "1d"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(NapkinError, match="not a time limit"):
        seconds_of_time_limit(text)


def test_a_time_limit_within_its_warning_is_refused() -> None:
    with pytest.raises(NapkinError, match="--warn-before"):
        batch_script(job(), SlurmSettings(folder="/", time="5:00"))
    assert batch_script(job(warning_seconds=60), SlurmSettings(folder="/", time="5:00"))


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 0},
        {"gpus_per_node": -1},
        {"cpus_per_node": 7},
        {"warning_seconds": 0},
        {"warning_seconds": 70_000},
        {"max_restarts": -1},
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(NapkinError, match="--"):
        job(**changes)


def test_the_folder_of_every_script_is_read_by_bash_without_complaint(tmp_path: Path) -> None:
    for changes in ({}, {"cpus_per_node": 9}, {"uses_gpus": False}, {"run": HOSTILE}):
        path = tmp_path / "job.sh"
        path.write_text(batch_script(job(**changes), SlurmSettings(folder="/", image="x")))
        done = subprocess.run([str(BASH), "-n", str(path)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
