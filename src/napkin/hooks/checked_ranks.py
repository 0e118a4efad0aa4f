"""The gradient of a program on several ranks: real processes of this machine, with gloo between them.

This file is also the program of these processes.
"""

import datetime
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from napkin.child_process import failure_of, interrupts_wait, start_python
from napkin.errors import NapkinError, first_line
from napkin.hooks.checked_program import Arrangement, Checked, Gradient
from napkin.hooks.program_doors import load_program, open_program

MOST_SECONDS = 120
"""The longest wait for another rank."""


class Request(msgspec.Struct):
    """The request to each rank's process: which program, and how its batch is arranged."""

    program: str
    n_examples: int
    arrangements: list[Arrangement]
    without_dropout: bool
    working_folder: str


def gradients_on_ranks(
    checked: Checked, program: str, arrangements: Sequence[Arrangement], *, without_dropout: bool
) -> list[Gradient]:
    """The gradients that ranks have together, one for each arrangement; all have as many ranks.

    Raises NapkinError where one of them fails.
    """
    ranks = arrangements[0].ranks
    request = Request(program, len(checked.examples), [*arrangements], without_dropout, os.getcwd())
    text = msgspec.json.encode(request).decode()
    code = "from napkin.hooks.checked_ranks import main; main()"
    processes = []
    with tempfile.TemporaryDirectory(prefix="napkin-check-") as folder:
        # A copy of each, as tied weights are several here.
        weights = {name: each.detach().cpu().clone().contiguous() for name, each in checked.weights().items()}
        save_file(weights, Path(folder, "weights"))
        try:
            with interrupts_wait():
                for rank in range(ranks):
                    environment = {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "29500",
                        "OMP_NUM_THREADS": "1",
                        "CUDA_VISIBLE_DEVICES": "",
                    }
                    processes.append(start_python(code, folder, text, **environment))
            failures = [failure for failure in map(failure_of, processes) if failure]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failures:
            raise NapkinError(f"the program fails on {ranks} ranks: {failures[0][:300]}")
        return [load_file(Path(folder, f"gradient-{number}")) for number in range(len(arrangements))]


def main() -> None:
    """Compute as the rank of the environment; the arguments are a folder, and the request as JSON."""
    folder, request = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Request)
    os.chdir(request.working_folder)
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=MOST_SECONDS)
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        checked = open_program(load_program(request.program), request.n_examples)
        if request.without_dropout:
            checked.remove_dropout()
        checked.take_weights(load_file(folder / "weights"))
        for number, arrangement in enumerate(request.arrangements):
            gradient = checked.gradient(replace(arrangement, rank=rank))
            if rank == 0:
                save_file({name: each.contiguous() for name, each in gradient.items()}, folder / f"gradient-{number}")
        dist.barrier()
    except Exception as error:
        sys.stderr.write(f"\nrank {rank}: {first_line(error)}\n")
        sys.stderr.flush()
        os._exit(1)
    # A gloo thread that still releases a tensor would abort an interpreter that is shutting down.
    os._exit(0)
