"""Training that a page starts, stops and resumes: napkin's commands in separate processes. Each has a session of its
own, so that neither Ctrl-C in the studio's terminal nor the end of the studio ends it: a run of days does not depend on
a page. What it prints is appended to a log in the hidden folder `.studio` of the studio's folder. It is stopped as
Ctrl-C stops it: the step ends, a checkpoint is written, the process exits.

The process to stop is the one that holds the run's lock, if it belongs to this user.
"""

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

from napkin.child_process import AnsweringProcess, start_script
from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_text, regular
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.recipe.tuning_recipe import FIRST_FIELDS, RECIPE_OF, TuningRecipe
from napkin.runs.run_folder import RunFolder, is_being_trained, is_of_program, is_run

OWN_FOLDER = ".studio"
MOST_LOG_BYTES = 2**16
MOST_STARTED = 16
"""Processes that train at once, started by one studio."""
_COMMAND = "import sys; from napkin.cli import main; sys.exit(main())"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PROC = Path("/proc")


class RunProcesses:
    """The processes that a studio has started, by the names of their runs."""

    def __init__(self, folder: StrPath) -> None:
        self._folder = Path(folder)
        self._started: dict[str, AnsweringProcess] = {}
        self._asked: set[tuple[str, int]] = set()
        """Runs and processes that were asked to stop: a second signal would end them at once."""
        self._changing = threading.Lock()

    def start(self, name: str, recipe: str) -> None:
        """Train a recipe, given as TOML, to a new run of this name, or tune by it where it has [tuning].

        Raises NapkinError where it cannot be begun.
        """
        if not _NAME.fullmatch(name):
            raise NapkinError(
                f"the name of a run is '{name[:100]}': use up to 100 letters, digits, '-', '_' and '.', a letter or "
                "digit first"
            )
        with self._changing:
            RunFolder.refuse_existing(self._folder / name)
            self._refuse_another(name)
            file, command = self._write_recipe(name, recipe)
            self._run(name, *command, str(file.absolute()), "--run", str((self._folder / name).absolute()))

    def resume(self, name: str, path: Path) -> None:
        """Go on with a run. Raises NapkinError where a process trains it, or it is of another program."""
        with self._changing:
            if is_of_program(path):
                raise NapkinError(f"'{name}' is of a program that napkin watched: the program itself resumes it")
            if is_being_trained(path):
                raise NapkinError(f"'{name}' is being trained by another process: stop it first, or wait for it")
            self._refuse_another(name)
            self._run(name, "resume", str(path.absolute()))

    def stop(self, name: str, path: Path) -> None:
        """Ask the process that holds the run's lock to stop, as Ctrl-C does. Raises NapkinError where there is none
        of this user, or it was asked before."""
        with self._changing:
            holder = lock_holder(path)
            if holder is None:
                if is_being_trained(path):
                    raise NapkinError(
                        f"'{name}' is being trained by a process that is not this user's, or not on this machine: stop "
                        "it where it was started"
                    )
                raise NapkinError(f"'{name}' is not being trained: there is nothing to stop")
            if (name, holder) in self._asked:
                raise NapkinError(f"'{name}' was asked to stop: its step ends, and a checkpoint is written")
            _interrupt(path, holder)
            self._asked.add((name, holder))

    def states(self) -> dict[str, str]:
        """A sentence on each process that was started here, by the name of its run."""
        with self._changing:
            return {name: _state(process.poll()) for name, process in self._started.items()}

    def log(self, name: str) -> str:
        """The end of what the processes of a run have printed; empty where none was started here."""
        try:
            with open(self._own(name, ".log"), "rb", opener=regular) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - MOST_LOG_BYTES))
                return file.read(MOST_LOG_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _write_recipe(self, name: str, recipe: str) -> tuple[Path, tuple[str, ...]]:
        """The file of a recipe, and the command that trains by it."""
        file = self._own(name, ".toml")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            atomic_write_text(file, recipe, overwrite=True)
            read = read_recipe(file)
            if isinstance(read, TuningRecipe) and not read.tuning.start:
                raise NapkinError("tuning.start is empty: name a run, a Hugging Face folder or a GGUF file")
        except NapkinError:
            file.unlink(missing_ok=True)
            raise
        return file, ("tune", read.tuning.method) if isinstance(read, TuningRecipe) else ("train",)

    def _refuse_another(self, name: str) -> None:
        alive = [each for each, process in self._started.items() if process.poll() is None]
        if name in alive:
            raise NapkinError(f"'{name}' was started a moment ago: its log says how far it is")
        if len(alive) >= MOST_STARTED:
            raise NapkinError(f"{len(alive)} runs of this studio train at once, the most it starts: wait for one")

    def _own(self, name: str, ending: str) -> Path:
        # Names of runs below folders have slashes; neither the first nor the last part is one of a folder above.
        parts = [part for part in name.split("/") if part not in ("", ".", "..")]
        return self._folder.joinpath(OWN_FOLDER, *parts[:-1], f"{parts[-1] if parts else 'folder'}{ending}")

    def _run(self, name: str, *arguments: str) -> None:
        log = self._own(name, ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "100"}
        try:
            with open(log, "ab") as output:
                output.write(f"$ napkin {' '.join(arguments)}\n".encode())
                output.flush()
                process = start_script(_COMMAND, *arguments, folder=os.getcwd(), environment=environment, output=output)
        except OSError as error:
            raise NapkinError(f"'{name}' cannot be started ({error.strerror}): see '{log}'") from None
        self._started[name] = process


def _state(status: int | None) -> str:
    if status is None:
        return "runs"
    if status < 0:
        return f"was ended by signal {-status}"
    return "has ended" if status == 0 else f"ended with status {status}"


def lock_holder(run: Path) -> int | None:
    """The process of this user that holds a run's lock; None where there is none, or the system does not tell.

    A process that has inherited the open file does not count: the system names the one that took the lock.
    """
    try:
        lock = os.stat(run / ".lock")
        pids = [int(each) for each in os.listdir(_PROC) if each.isdigit()]
    except OSError:
        return None
    own = os.getuid()
    for pid in pids:
        # Processes and their open files come and go meanwhile; those of other users cannot be looked at.
        with contextlib.suppress(OSError):
            if pid == os.getpid() or os.stat(_PROC / str(pid)).st_uid != own:
                continue
            if any(_holds(pid, each, lock) for each in os.listdir(_PROC / str(pid) / "fd")):
                return pid
    return None


def _holds(pid: int, descriptor: str, lock: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        status = os.stat(_PROC / str(pid) / "fd" / descriptor)
        if (status.st_dev, status.st_ino) == (lock.st_dev, lock.st_ino):
            text = (_PROC / str(pid) / "fdinfo" / descriptor).read_text()
            return re.search(rf"^lock:.*\bFLOCK\s+\S+\s+WRITE\s+{pid}\s", text, re.MULTILINE) is not None
    return False


def _interrupt(run: Path, pid: int) -> None:
    """Send SIGINT to the holder of a run's lock, and to no process that has got its number since."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if lock_holder(run) == pid:
            signal.pidfd_send_signal(handle, signal.SIGINT)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


_BLANK = "tune "


def blank_recipe(name: str) -> str | None:
    """The recipe of tuning that `recipes_below` offers by this name, with what is usually chosen; None for others."""
    kind = RECIPE_OF.get(name.removeprefix(_BLANK)) if name.startswith(_BLANK) else None  # pyright: ignore[reportArgumentType, reportCallIssue]
    return None if kind is None else format_recipe(kind(), only=("tuning.method", *FIRST_FIELDS))


def recipes_below(folder: Path, runs: dict[str, Path]) -> list[str]:
    """Names of the recipes that a page offers: TOML files directly in the folder, the recipes of runs, and one to fill
    in for each way of tuning."""
    try:
        files = sorted(each.name for each in folder.iterdir() if each.suffix == ".toml" and each.is_file())
    except OSError:
        files = []
    blank = [f"{_BLANK}{method}" for method in RECIPE_OF]
    return files + blank + [f"{name}/recipe.toml" for name, path in runs.items() if is_run(path)]
