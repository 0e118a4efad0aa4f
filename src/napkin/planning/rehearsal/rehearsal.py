"""`rehearse`: run an unmodified training script without a GPU, and plan the step that it makes.

The script runs in a child process with bounded time and memory, in a folder of its own that links to the files of the
current one. It finds stand-ins for CUDA, the process group and absent data; it is stopped when its third step has been
counted. A script is code: rehearsing it runs it, with the rights of the user.
"""

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import Price, price_with_launches
from napkin.accounting.rank_seconds import Communication
from napkin.child_process import start_script
from napkin.errors import NapkinError
from napkin.hardware.ceilings import CatalogueCeilings, efficiency_of
from napkin.hardware.cluster import Cluster, find_cluster, interconnect_of
from napkin.hardware.target import CudaTarget, as_in_release
from napkin.planning.rehearsal.messages import EXITS, Answer, Highest, Request
from napkin.planning.step.site import fits

_CHILD = "from napkin.planning.rehearsal.running_script import main; main()"
_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Rehearsal:
    """The step of a script on rank 0 of some devices."""

    script: str
    cluster: Cluster
    ledger: Ledger
    price: Price
    """Seconds of computation by rooflines of the catalogue's device."""
    communication: Communication
    exposed_seconds: float
    """Seconds by which collectives lengthen the step."""
    environment: dict[str, str | None]
    """The environment variables that the script read, with their values; None for those that were not set."""
    absent_files: tuple[str, ...]
    """Absent files that were replaced by small ones."""
    highest: Highest
    """The most memory that the script took as far as it was rehearsed, which evaluations can raise above the step's."""
    notes: tuple[str, ...]
    """Assumptions and omissions, one sentence each."""
    rehearsing_seconds: float
    rehearsing_bytes: int
    """The most memory that the child process took here."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.price.seconds + self.exposed_seconds

    @property
    def fits(self) -> bool:
        """True if what was rehearsed fits into a device's memory, with the share that every plan leaves free, and what
        torch's allocator reserves for it into the whole."""
        usable, highest = self.cluster.device.usable_bytes, self.highest
        return fits(highest.bytes, usable, reserved_bytes=highest.reserved_bytes)

    @property
    def collectives(self) -> dict[str, dict[str, float]]:
        """Calls of each kind of collective, the bytes of their tensors, and the bytes that a device sends."""
        sums: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "bytes": 0, "sent_bytes": 0})
        for each in self.communication.collectives:
            into = sums[each.operation]
            into["calls"] += each.times
            into["bytes"] += each.times * each.data_bytes
            into["sent_bytes"] += each.sent_bytes
        return dict(sums)

    def as_values(self) -> dict[str, Any]:
        """All figures, for JSON."""
        ledger = self.ledger
        return {
            "script": self.script,
            "device": self.cluster.device.name,
            "n_devices": self.cluster.n_devices,
            "parameters": ledger.parameters,
            "flops": ledger.flops,
            "hardware_flops": ledger.hardware_flops,
            "peak_bytes": ledger.peak_bytes,
            "reserved_bytes": ledger.reserved_bytes,
            "highest_bytes": self.highest.bytes,
            "highest_reserved_bytes": self.highest.reserved_bytes,
            "highest_where": self.highest.place,
            "peak_by_category": ledger.peak_by_category,
            "fits": self.fits,
            "seconds": self.seconds,
            "compute_seconds": self.price.seconds,
            "exposed_seconds": self.exposed_seconds,
            "factor": self.price.factor,
            "collectives": self.collectives,
            "unknown_operators": ledger.unknown_operators,
            "environment": self.environment,
            "absent_files": self.absent_files,
            "notes": self.notes,
            "rehearsing_seconds": self.rehearsing_seconds,
            "rehearsing_bytes": self.rehearsing_bytes,
        }


def rehearse(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    on: str = "8xH100",
    setup: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    torch: str | None = None,
    most_seconds: float = 300.0,
    most_bytes: int = 4 * 10**9,
) -> Rehearsal:
    """Run a training script without a GPU until its third step, and plan that step.

    Args:
        script: a Python file; it is run as `__main__`, with this process's rights, and is not changed.
        arguments: its arguments.
        on: the devices of the catalogue that the script will find. With more than one, it runs as rank 0 under
            torchrun.
        setup: a Python file that is run before it in the same process, where something must be replaced.
        environment: environment variables to set in addition.
        torch: the release of torch that it will run under, such as "2.8", where it computes in other formats than the
            one that is installed here.
        most_seconds: after which the script is stopped.
        most_bytes: of memory, after which it is stopped.

    Raises NapkinError, naming the call that failed and a remedy, if no step could be counted.
    """
    path = _existing(script)
    before = None if setup is None else _existing(setup)
    cluster = find_cluster(on)
    as_in_release(CudaTarget(), torch)
    begin = time.monotonic()
    answer, memory = Answer(), 0
    for all_on_device in (False, True):
        with tempfile.TemporaryDirectory(prefix="napkin-rehearsal-") as folder:
            inside = Path(folder, "work").resolve()
            inside.mkdir()
            for each in Path.cwd().iterdir():
                (inside / each.name).symlink_to(each)
            request = Request(
                str(path), list(arguments), on, None if before is None else str(before), str(inside),
                str(Path(folder, "answer.json")), begin + most_seconds - time.monotonic(), all_on_device, torch,
            )  # fmt: skip
            variables = {**_torchrun(cluster), **(environment or {})}
            answer, memory = _run(request, variables, begin + most_seconds, most_bytes)
        if answer.ledger is not None or not answer.on_host:
            break
    if answer.ledger is None or answer.highest is None:
        raise NapkinError(_why_not(path, answer))
    ceilings = CatalogueCeilings(cluster.device, efficiency_of(cluster.device))
    priced = price_with_launches(answer.ledger, ceilings, factor=ceilings.efficiency.factor)
    communication = Communication.of(answer.ledger)
    links = interconnect_of(cluster.device, cluster.node, ceilings.efficiency)
    passes = {name: spent.seconds for name, spent in priced.by_phase.items()}
    notes = tuple(answer.notes)
    if all_on_device:
        notes += ("the script moves nothing to a GPU: all that it makes is taken to be on one",)
    return Rehearsal(
        script=str(script),
        cluster=cluster,
        ledger=answer.ledger,
        price=priced,
        communication=communication,
        exposed_seconds=0.0 if links is None else communication.exposed_seconds(
            links,
            forward_seconds=passes.get("forward", 0.0),
            backward_seconds=passes.get("backward", 0.0) + passes.get("recompute", 0.0),
        ),
        environment=answer.environment,
        absent_files=tuple(answer.absent),
        highest=answer.highest,
        notes=notes,
        rehearsing_seconds=time.monotonic() - begin,
        rehearsing_bytes=memory,
    )  # fmt: skip


def _existing(file: str | os.PathLike[str]) -> Path:
    path = Path(file)
    if not path.is_file():
        raise NapkinError(f"there is no script '{file}': name a Python file")
    return path.resolve()


def _torchrun(cluster: Cluster) -> dict[str, str]:
    """The variables that torchrun sets for rank 0; one device is used without it."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if cluster.n_devices == 1:
        return offline
    local = min(cluster.n_devices, cluster.node.devices)
    return {
        **offline,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "WORLD_SIZE": str(cluster.n_devices),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _run(request: Request, variables: dict[str, str], end: float, most_bytes: int) -> tuple[Answer, int]:
    """The child's answer, and the most memory that it took."""
    with tempfile.TemporaryFile() as output:
        process = start_script(
            _CHILD, msgspec.json.encode(request).decode(), folder=request.folder, environment=variables, output=output
        )
        most = 0
        try:
            watched = psutil.Process(process.pid)
            while process.poll() is None:
                try:
                    most = max(most, watched.memory_info().rss)
                except psutil.Error:
                    break
                if most > most_bytes:
                    if Path(request.answer).exists():
                        break
                    raise NapkinError(
                        f"'{request.script}' took more than {most_bytes / 1e9:.3g} GB before a step was counted: give "
                        "it more with --memory, or smaller data"
                    )
                if time.monotonic() > end:
                    if Path(request.answer).exists():
                        break
                    raise NapkinError(
                        f"'{request.script}' was not done with three steps in time: give it more with --seconds, or "
                        "fewer micro-batches"
                    )
                time.sleep(_BETWEEN_LOOKS)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4000))
        lines = output.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it said nothing"
        try:
            answer = msgspec.json.decode(Path(request.answer).read_bytes(), type=Answer)
        except (OSError, msgspec.DecodeError):
            raise NapkinError(
                f"'{request.script}' ended its process with status {process.returncode} ({last[:200]}): "
                "run it under a debugger, or leave out what ends it"
            ) from None
        obstacle = answer.obstacle
        if obstacle is not None and obstacle["error"].startswith(f"{EXITS} status"):
            obstacle["error"] += f", after it said '{last[:200]}'"
        return answer, most


def _why_not(path: Path, answer: Answer) -> str:
    if answer.obstacle is not None:
        obstacle = answer.obstacle
        where = f" at {obstacle['place']}" if obstacle["place"] else ""
        return f"'{path.name}' cannot be rehearsed{where} ({obstacle['error']}): {obstacle['hint']}"
    if answer.on_host:
        return f"'{path.name}' trains on the CPU: move its model to 'cuda'"
    return (
        f"'{path.name}' ended after {answer.updates} updates by an optimizer, and its third step is what is counted: "
        "let it make three"
    )
