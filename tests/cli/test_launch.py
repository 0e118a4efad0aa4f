"""`napkin launch`: what is printed, what is refused, what a scheduler is given."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cli.conftest import Napkin
from napkin.recipe.toml_file import read_recipe

JOB = ("launch", "tiny.toml", "--run", "runs/new", "--nodes", "2", "--gpus-per-node", "2")
ON_KUBERNETES = (*JOB, "--scheduler", "kubernetes", "--image", "lab/napkin", "--volume-claim", "training")


@pytest.fixture
def programs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one that is searched."""
    folder = place / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def make_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!{sys.executable}\nimport os, sys\n{text}\n")
    (folder / name).chmod(0o755)


def test_the_script_alone_is_printed(napkin: Napkin, place: Path) -> None:
    done = napkin(*JOB)
    assert done.status == 0
    assert done.out.startswith("#!/bin/bash\n")
    assert done.out.endswith('\nexit "$status"\n')
    assert f"\n#SBATCH --chdir={place}\n" in done.out
    assert f"\n    {sys.executable} -m napkin.distributed.cluster_job " in done.out
    assert "\n#SBATCH --job-name=new\n" in done.out
    checked = subprocess.run([shutil.which("bash") or "bash", "-n"], input=done.out, text=True, check=False)
    assert checked.returncode == 0
    assert "sequences of each batch per process: 1" in done.err
    assert "napkin plan tiny.toml --on 2x2xH100" in done.err


def test_the_plan_that_is_named_works(napkin: Napkin, place: Path) -> None:
    command = napkin(*JOB).err.partition("`napkin ")[2].partition("`")[0]
    assert napkin(*command.split()).status == 0


def test_a_jobset_is_printed(napkin: Napkin, place: Path) -> None:
    done = napkin(*ON_KUBERNETES, "--namespace", "lab", "--mount", "/data", "--gpu-resource", "amd.com/gpu")
    assert done.status == 0
    jobset = yaml.safe_load(done.out)
    assert (jobset["kind"], jobset["metadata"]) == ("JobSet", {"name": "new", "namespace": "lab"})
    assert "exec python -m napkin.distributed.cluster_job" in done.out
    assert '"amd.com/gpu": 2' in done.out
    assert 'mountPath: "/data"' in done.out


def test_the_run_has_the_name_of_the_recipe_and_the_job_that_of_the_run(napkin: Napkin, place: Path) -> None:
    shutil.copy("tiny.toml", "My 1st: rün.toml")
    without_run = [each for each in JOB if each not in ("--run", "runs/new", "tiny.toml")]
    done = napkin(without_run[0], "My 1st: rün.toml", *without_run[1:])
    assert "\nrun='runs/My 1st: rün'\n" in done.out
    assert "\n#SBATCH --job-name=My-1st-r-n\n" in done.out
    options = ("--scheduler", "kubernetes", "--image", "x", "--volume-claim", "y")
    done = napkin(without_run[0], "My 1st: rün.toml", *without_run[1:], *options)
    assert yaml.safe_load(done.out)["metadata"]["name"] == "my-1st-r-n"
    assert napkin(*JOB, "--job-name", "other").out.count("--job-name=other\n") == 1


def test_a_name_that_begins_with_a_hyphen_is_no_option(napkin: Napkin, place: Path) -> None:
    done = napkin("launch", "tiny.toml", "--run=-x", "--nodes", "1", "--gpus-per-node", "1")
    assert "\nrun=./-x\n" in done.out
    assert "\n#SBATCH --job-name=x\n" in done.out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--nodes", "3"), "does not divide among 6 devices"),
        (("--nodes", "0"), "--nodes is 0"),
        (("--gpus-per-node", "-1"), "--gpus-per-node is -1"),
        (("--time", "1d"), "--time is '1d'"),
        (("--time", "2:00"), "--warn-before"),
        (("--warn-before", "0"), "--warn-before is 0"),
        (("--partition", "a b"), "--partition is 'a b'"),
        (("--account", "$(x)"), "--account is"),
        (("--job-name", "a\nb"), "no script can hold"),
        (("--run", "a\x1b[31mb"), "no script can hold"),
        (("--run", "docs"), "is a folder without a run"),
        (("--run", "tiny.toml"), "it is a file"),
        (("--cpus-per-node", "1"), "--cpus-per-node is 1"),
        (("--max-restarts", "-1"), "--max-restarts is -1"),
        (("--volume-claim", "x"), "--volume-claim means nothing to --scheduler slurm"),
        (("--scheduler", "slrum"), "did you mean slurm"),
        (("--scheduler", "kubernetes"), "--image is missing"),
        (("--scheduler", "kubernetes", "--image", "x"), "--volume-claim is missing"),
        (("--scheduler", "kubernetes", "--time", "1:00:00"), "--time means nothing to --scheduler kubernetes"),
        (("--scheduler", "kubernetes", "--no-exclusive"), "--no-exclusive means nothing"),
    ],
)
def test_what_cannot_be_is_refused(
    refusal: Callable[..., str], place: Path, options: tuple[str, ...], told: str
) -> None:
    assert told in refusal(*JOB, *options)


def test_the_number_of_nodes_and_the_recipe_are_asked_for(refusal: Callable[..., str], place: Path) -> None:
    assert "--nodes" in refusal("launch", "tiny.toml")
    assert "RECIPE.toml" in refusal("launch", "--nodes", "2")
    assert "does not exist" in refusal("launch", "missing.toml", "--nodes", "2")


def test_a_run_that_exists_is_resumed_if_it_is_of_this_recipe(
    napkin: Napkin, refusal: Callable[..., str], place: Path
) -> None:
    job = ("launch", "tiny.toml", "--run", "runs/tiny", "--nodes", "2", "--gpus-per-node", "2")
    done = napkin(*job)
    assert done.status == 0
    assert "'runs/tiny' exists, so the job resumes it" in done.err
    text = Path("tiny.toml").read_text()
    Path("tiny.toml").write_text(text.replace("steps = 6", "steps = 7"))
    assert "training.steps is 6, not 7" in refusal(*job)


def test_a_recipe_for_cpus_asks_for_no_gpus(napkin: Napkin, place: Path) -> None:
    text = Path("tiny.toml").read_text().replace("[training]", '[training]\ndevice = "cpu"')
    Path("tiny.toml").write_text(text)
    assert read_recipe("tiny.toml").training.device == "cpu"
    done = napkin(*JOB)
    assert "gpus" not in done.out
    assert "H100" not in done.err


@pytest.mark.parametrize(
    ("arguments", "program", "asked"),
    [(JOB, "sbatch", []), (ON_KUBERNETES, "kubectl", ["apply", "-f", "-"])],
)
def test_a_scheduler_is_given_the_script(
    napkin: Napkin, programs: Path, arguments: tuple[str, ...], program: str, asked: list[str]
) -> None:
    script = napkin(*arguments).out
    make_program(
        programs,
        program,
        f"open({str(programs / 'given')!r}, 'w').write(sys.stdin.read())\n"
        f"open({str(programs / 'asked')!r}, 'w').write(repr([sys.argv[1:], os.getcwd()]))\n"
        "print('Submitted batch job \\x1b[31m17')",
    )
    done = napkin(*arguments, "--submit")
    assert (done.status, done.out) == (0, "Submitted batch job \\x1b[31m17\n")
    assert (programs / "given").read_text() == script
    # Where nothing of the user's can be in the way; the script names the folder.
    assert (programs / "asked").read_text() == repr([asked, os.path.abspath(os.sep)])


def test_a_job_that_is_not_taken_is_told_in_a_line(refusal: Callable[..., str], programs: Path) -> None:
    assert "sbatch is not installed here" in refusal(*JOB, "--submit")
    assert "kubectl is not installed here" in refusal(*ON_KUBERNETES, "--submit")
    make_program(programs, "sbatch", "sys.exit('sbatch: error: invalid\\npartition')")
    assert "sbatch did not take the job (sbatch: error: invalid partition)" in refusal(*JOB, "--submit")
    (programs / "sbatch").chmod(0o644)
    assert "sbatch cannot be started" in refusal(*JOB, "--submit")


def test_the_help_names_every_option(napkin: Napkin) -> None:
    done = napkin("launch", "--help")
    assert done.status == 0
    for option in (
        "--nodes",
        "--gpus-per-node",
        "--scheduler",
        "--submit",
        "--warn-before",
        "--volume-claim",
        "--time",
    ):
        assert option in done.out
    assert "  launch " in napkin("--help").out


def test_a_script_is_printed_without_torch(place: Path) -> None:
    program = f"import sys\nfrom napkin.cli import main\nassert main({list(JOB)}) == 0\n"
    program += "assert not {'torch', 'numba'} & sys.modules.keys()\n"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_a_layout_that_the_ranks_cannot_have_is_refused(refusal: Callable[..., str], place: Path) -> None:
    Path("tiny.toml").write_text(Path("tiny.toml").read_text() + "\n[parallelism]\ntensor = 3\n")
    assert "choose sizes whose product is 4" in refusal(*JOB)
