"""The tasks of a pipeline on a Ray cluster instead of processes of this machine.

All nodes see the input, the folder of the corpus and napkin at the same paths, as on a shared file system. A task
leaves a folder whole or not at all, whoever does it and however often; so a node may vanish at any moment, and Ray has
its tasks done elsewhere.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.extra import import_extra
from napkin.curation.pipeline_file import Pipeline, pipeline_of, values_of
from napkin.curation.shard_work import DecisionTask, ShardTask, Task, do_task
from napkin.errors import NapkinError, first_line

MOST_ATTEMPTS = 6
"""How often a task is begun whose worker or node ended."""
_QUEUED_PER_CORE = 4


@contextmanager
def ray_cluster(address: str | None) -> Iterator[Any]:
    """The `ray` module, connected to a cluster: the one at `address`, or one of this machine that ends with the block.

    Raises NapkinError where ray is not installed or the cluster does not answer.
    """
    ray = import_extra("ray", "--engine ray")
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = f"at '{address}'" if address else "on this machine"
        raise NapkinError(
            f"there is no Ray cluster {where} ({first_line(error)}): start one with `ray start`"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def do_tasks_on_ray(
    ray: Any, pipeline: Pipeline, work: Path, tasks: Sequence[Task], on_done: Callable[[Task], None]
) -> None:
    """Do tasks on the cluster, in any order; `on_done` is called from this thread.

    Raises NapkinError where one cannot be done.
    """
    remote = ray.remote(num_cpus=1, max_retries=MOST_ATTEMPTS - 1)(_do)
    values = msgspec.json.encode(values_of(pipeline))
    waiting = list(reversed(tasks))
    running: dict[Any, Task] = {}
    while waiting or running:
        most = _QUEUED_PER_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while waiting and len(running) < most:
            task = waiting.pop()
            kind = "shard" if isinstance(task, ShardTask) else "decision"
            running[remote.remote(os.getcwd(), str(work.absolute()), values, kind, msgspec.json.encode(task))] = task
        done, _ = ray.wait(list(running), timeout=0.2)
        for reference in done:
            task = running.pop(reference)
            try:
                error = ray.get(reference)
            except ray.exceptions.RayError as problem:
                raise NapkinError(
                    f"a task was begun {MOST_ATTEMPTS} times and never finished ({first_line(problem)}): run the same "
                    "command again, or without --engine ray, which names the document"
                ) from None
            if error:
                raise NapkinError(error)
            on_done(task)


def _do(folder: str, work: str, values: bytes, kind: str, task: bytes) -> str:
    """Do a task on the node that this runs on; an error that a user can mend is returned."""
    try:
        os.chdir(folder)
        decoded = msgspec.json.decode(task, type=ShardTask if kind == "shard" else DecisionTask)
        do_task(pipeline_of(msgspec.json.decode(values)), Path(work), decoded, lambda _: None)
    except NapkinError as error:
        return str(error)
    except OSError as error:
        what = error.filename or work
        return f"'{what}' cannot be written or read on a node ({error.strerror}): all nodes need the same paths"
    return ""
