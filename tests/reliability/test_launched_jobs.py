"""The script of `napkin launch` trains a real run, with torchrun.

`srun` is a program that starts what it is given once per node, passes signals on, and ends with the highest status.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.distributed.cluster_job import ClusterJob, SlurmSettings, batch_script
from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import tiny_recipe
from reliability.harness import Command, Napkin, checkpoints, figures, lines_of_metrics, wait_until
from reliability.rank_runs import assert_follows, kill_rank
from reliability.ranks import free_port

STEPS = 150
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
tasks = []
def forward(number, _):
    for task in tasks:
        task.send_signal(number)
        # Nodes are not signalled at the same moment.
        time.sleep(0.5)
signal.signal(signal.SIGUSR1, forward)
tasks += [subprocess.Popen(command) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""


def make_slurm(folder: Path, nodes: int) -> dict[str, str]:
    """The programs of Slurm on a machine that is all of its nodes, and what Slurm says in the environment."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_CPUS_ON_NODE": "2",
    }


def free_job_id() -> int:
    """A job whose port is free."""
    while not 20_000 <= (port := free_port()) < 30_000:
        pass
    return port - 20_000 + 10_000 * random.randrange(1000)


def start_job(napkin: Napkin, environment: dict[str, str], name: str) -> Command:
    out, err = napkin.folder / f"out-{name}.txt", napkin.folder / f"err-{name}.txt"
    with open(out, "w") as out_file, open(err, "w") as err_file:
        process = subprocess.Popen(
            ["bash", "job.sh"],
            cwd=napkin.folder,
            stdout=out_file,
            stderr=err_file,
            env={**environment, "SLURM_JOB_ID": str(free_job_id())},
        )
    return Command(process.pid, out, err, lambda pid: process.wait())


@pytest.mark.torture
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 1)])
def test_a_job_stops_before_its_time_limit_and_its_next_start_trains_to_the_end_though_a_rank_is_lost(
    napkin: Napkin, nodes: int, per_node: int
) -> None:
    environment = make_slurm(napkin.folder, nodes)
    recipe = tiny_recipe(".", steps=STEPS, precision="fp32", device="cpu", checkpoint_every=STEPS)
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))
    job = ClusterJob(
        name="tiny",
        recipe_file="recipe.toml",
        run="run",
        nodes=nodes,
        gpus_per_node=per_node,
        uses_gpus=False,
        python=sys.executable,
    )
    script = batch_script(job, SlurmSettings(folder=str(napkin.folder)))
    (napkin.folder / "job.sh").write_text(script)
    assert napkin.run("train", "recipe.toml", "--run", "alone").wait() == 0

    started = start_job(napkin, environment, "first")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 12, started)
    # The batch shell alone gets it, as by --signal=B:USR1.
    started.send(signal.SIGUSR1)
    assert started.wait() == 0, started.errors
    assert (napkin.folder / "requeued").read_text().startswith("requeue ")
    assert len([line for line in started.errors if line.startswith("SIGUSR1: checkpoint saved")]) == 1
    (stopped_at,) = checkpoints(napkin.folder / "run")
    assert stopped_at < STEPS

    resumed = start_job(napkin, environment, "second")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= stopped_at + 5, resumed)
    # The launcher starts all ranks again, which go on from the checkpoint.
    kill_rank(resumed, 1)
    assert resumed.wait() == 0, resumed.errors
    assert checkpoints(napkin.folder / "run")[-1] == STEPS
    assert_follows(napkin.folder / "run", napkin.folder / "alone")
    assert figures(napkin.folder / "run")[-1]["step"] == STEPS
    assert len((napkin.folder / "requeued").read_text().splitlines()) == 1
