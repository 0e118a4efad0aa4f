"""Starts the ranks of a job as torchrun would, each a process in milliseconds; or torchrun itself."""

import contextlib
import importlib
import os
import random
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from reliability.harness import Command, Napkin

IMPORTED_BY_RANKS = (
    "napkin.distributed.context_parallel",
    "napkin.distributed.expert_parallel",
    "napkin.distributed.fake_ranks",
    "napkin.distributed.pipeline",
    "napkin.distributed.process_group",
    "napkin.distributed.sharding",
    "napkin.distributed.tensor_parallel",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.testing._internal.distributed.fake_pg",
)
"""What a rank imports when it needs it; a process that forks ranks imports it once for all of them."""


def import_for_ranks() -> None:
    """Import all that ranks import."""
    for name in IMPORTED_BY_RANKS:
        importlib.import_module(name)


def start_ranks(napkin: Napkin, size: int, *arguments: str, **settings: Any) -> list[Command]:
    """`size` processes of one job on this machine, rank 0 first."""
    port = free_port()
    return [napkin.start(*arguments, environment=environment_of(rank, size, port), **settings) for rank in range(size)]


def run_ranks(napkin: Napkin, size: int, *arguments: str, **settings: Any) -> list[Command]:
    """The same, ended without an error."""
    ranks = start_ranks(napkin, size, *arguments, **settings)
    statuses = [rank.wait() for rank in ranks]
    assert statuses == [0] * size, [rank.errors for rank in ranks]
    return ranks


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun says in the environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def fork_ranks(work: Callable[[int], None], size: int, port: int) -> int:
    """Let forks of this process work as the ranks of a job. Returns 0 where all have ended well."""
    import_for_ranks()
    torch.set_num_threads(1)
    children: list[int] = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ.update(environment_of(rank, size, port))
            try:
                work(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def run_script_of_ranks(script: Path, server: subprocess.Popen[str], folder: Path, size: int) -> None:
    """Run a script that gives the folder, the number of ranks and a port to `fork_ranks`, as a fork of the server."""
    arguments = [str(script), str(folder), str(size), str(free_port())]
    program = f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = Napkin(folder, server).run(program=program)
    assert done.status == 0, done.err.read_text()


def free_port() -> int:
    """A port that is free now, and that the kernel does not give to those who ask for any, as gloo does."""
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_given = int(ranges.read_text().split()[0]) if ranges.exists() else 32_768
    while True:
        port = random.randrange(10_000, first_given)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def start_torchrun(folder: Path, size: int, *arguments: str, restarts: int = 0) -> Command:
    """`torchrun`, all its ranks on this machine."""
    out, err = folder / f"out-{time.monotonic_ns()}.txt", folder / f"err-{time.monotonic_ns()}.txt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    torchrun += ["--max-restarts", str(restarts), "--master-port", str(free_port()), "--monitor-interval", "0.1"]
    with open(out, "w") as out_file, open(err, "w") as err_file:
        process = subprocess.Popen(
            [*torchrun, "-m", "--", "napkin", *arguments],
            cwd=folder,
            stdout=out_file,
            stderr=err_file,
            # What a rank was about when it aborted would be told nowhere else.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )
    return Command(process.pid, out, err, lambda pid: process.wait())
