"""The tasks of a pipeline, done by processes of this machine or on a Ray cluster.

A process reads a request as a line and answers with a line; if it ends, only its task is lost. It reads its requests in
a thread: when the command that started it is gone, the requests end, and so does the worker, even in the middle of a
task, which leaves a folder whole or not at all. In a small file it notes which document it works on, so that a document
that ends two workers can be set aside.

All nodes of a cluster see the input, the folder of the corpus and napkin at the same paths, as on a shared file system.
A node may vanish at any moment: Ray has its tasks done elsewhere, and a task that is done twice leaves the same bytes.
"""

import contextlib
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.child_process import AnsweringProcess, interrupts_wait, start_answering
from napkin.curation.engine.pipeline_file import Pipeline, pipeline_of, values_of
from napkin.curation.engine.shard_work import ShardTask, Task, do_task
from napkin.errors import NapkinError, first_line, import_extra

MOST_ENDINGS = 6
"""Workers that one task may end before the command gives up."""
_CODE = "from napkin.curation.engine.workers import serve\nserve()"
_NOTE_BYTES = 4096


@dataclass(frozen=True)
class _Request:
    """A task and what it needs. The answer to it is why it was not done, empty if it was."""

    folder: str
    """The working directory of the command."""
    work: str
    pipeline: dict[str, Any]
    task: Task
    note: str = ""
    """The file for notes."""

    def do(self, note: Callable[[str], None]) -> None:
        do_task(pipeline_of(self.pipeline), Path(self.work), self.task, note)


def serve() -> None:
    """Answer requests from standard input until it ends: a worker's whole life."""
    answers, sys.stdout = sys.stdout, sys.stderr
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        request = msgspec.json.decode(requests.get(), type=_Request)
        os.chdir(request.folder)
        answers.write(msgspec.json.encode(_answer(request)).decode() + "\n")
        answers.flush()


def _answer(request: _Request) -> str:
    noted = ""

    def note(what: str) -> None:
        nonlocal noted
        data = what.encode(errors="replace")[: _NOTE_BYTES - 1]
        notes[: len(data) + 1] = data + b"\0"
        noted = what or noted

    with open(request.note, "r+b") as file, mmap.mmap(file.fileno(), _NOTE_BYTES) as notes:
        try:
            request.do(note)
        except NapkinError as error:
            return str(error)
        except OSError as error:
            what = f"'{error.filename}'" if error.filename else f"the folder '{request.work}'"
            reason = error.strerror or first_line(error)
            return f"{what} cannot be written or read ({reason}): make room, and run the same command again"
        except MemoryError:
            return f"a worker ran out of memory at {noted or 'a stage'}: use fewer --workers, or less --memory"
        except Exception as error:
            return f"{type(error).__name__} at {noted or 'a stage'} ({first_line(error)}): this is a bug"
    return ""


def do_tasks(
    pipeline: Pipeline,
    work: Path,
    n_workers: int,
    on_message: Callable[[str], None],
    tasks: Sequence[Task],
    on_done: Callable[[Task], None],
) -> None:
    """Do tasks in processes, in any order; `on_done` and `on_message` are called from this thread.

    Raises NapkinError where one cannot be done; the others that run then are ended too.
    """
    if not tasks:
        return
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    waiting = list(reversed(tasks))
    workers: list[_Worker] = []
    try:
        with interrupts_wait():
            for number in range(min(n_workers, len(tasks))):
                # One by one, so that those already started are ended if one cannot be started.
                workers.append(_Worker(pipeline, work, number, messages.put))  # noqa: PERF401
        with ThreadPoolExecutor(len(workers)) as pool:
            running = {pool.submit(each.do, waiting.pop()): each for each in workers}
            try:
                while running:
                    done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    while not messages.empty():
                        on_message(messages.get())
                    for future in done:
                        worker = running.pop(future)
                        on_done(future.result())
                        if waiting:
                            running[pool.submit(worker.do, waiting.pop())] = worker
            finally:
                # Threads that wait for an answer continue once their process has ended.
                for worker in workers:
                    worker.end()
    finally:
        for worker in workers:
            worker.end()
            worker.close()


class _Worker:
    """A process, and another one in its place when it has ended."""

    def __init__(self, pipeline: Pipeline, work: Path, number: int, tell: Callable[[str], None]) -> None:
        self._values, self._work, self._tell = values_of(pipeline), work, tell
        self._note = work / f"note-{number}"
        self._is_ended = False
        self._process = self._start()

    def _start(self) -> AnsweringProcess:
        self._note.write_bytes(bytes(_NOTE_BYTES))
        try:
            return start_answering(_CODE, own_session=True)
        except OSError as error:
            raise NapkinError(f"a worker cannot be started ({error.strerror}): use --workers 1") from None

    def do(self, task: Task) -> Task:
        """Do a task, again where that ended the process. Raises NapkinError where it cannot be done."""
        before = ""
        for _ in range(MOST_ENDINGS):
            answer = self._ask(task)
            if answer:
                raise NapkinError(answer)
            if answer is not None:
                return task
            status = self._process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            if self._is_ended:
                break
            noted = self._note.read_bytes().partition(b"\0")[0].decode(errors="replace")
            where = f"at {noted.replace('#>', ', after document ')}" if noted else "between two documents"
            if noted and noted == before and isinstance(task, ShardTask):
                self._tell(f"a worker ended again ({how}) {where}: it is set aside")
                task = msgspec.structs.replace(task, skipped=(*task.skipped, noted))
                before = ""
            else:
                self._tell(f"a worker ended ({how}) {where}: its task is done again")
                before = noted
            self.close()
            self._process = self._start()
            if self._is_ended:
                self._process.kill()
        raise NapkinError(
            f"{MOST_ENDINGS} workers were ended by the same shard: where memory is short use fewer --workers, else see "
            "what they were told to do"
        )

    def _ask(self, task: Task) -> str | None:
        """The answer of the process; None if it ended without one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = _Request(os.getcwd(), str(self._work.absolute()), self._values, task, str(self._note.absolute()))
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            return None
        return msgspec.json.decode(line, type=str) if line.endswith(b"\n") else None

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._is_ended:
            return
        self._is_ended = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes to a process that has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # Unsent requests are lost.
            with contextlib.suppress(OSError):
                pipe.close()


MOST_ATTEMPTS = 6
"""Attempts at a task whose worker or node ended, before it counts as failed."""
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
    values, waiting = values_of(pipeline), list(reversed(tasks))
    running: dict[Any, Task] = {}
    while waiting or running:
        most = _QUEUED_PER_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while waiting and len(running) < most:
            task = waiting.pop()
            request = _Request(os.getcwd(), str(work.absolute()), values, task)
            running[remote.remote(msgspec.json.encode(request))] = task
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


def _do(request: bytes) -> str:
    """Do a task on the node that this runs on; an error that a user can mend is returned."""
    asked = msgspec.json.decode(request, type=_Request)
    try:
        os.chdir(asked.folder)
        asked.do(lambda _: None)
    except NapkinError as error:
        return str(error)
    except OSError as error:
        what = error.filename or asked.work
        return f"'{what}' cannot be written or read on a node ({error.strerror}): all nodes need the same paths"
    return ""
