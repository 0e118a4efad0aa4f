"""The batch script with which Slurm trains a run on several nodes, until all its steps are done.

Slurm starts the script on the first node; `srun` starts torchrun once on every node, and torchrun the ranks. Before
the time limit Slurm signals the script, which passes the signal on: the run stops with a checkpoint, the script puts
its job back into the queue, and the next start resumes the run. A node that fails has the same end, by `--requeue`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from napkin.distributed.cluster_job import RENDEZVOUS_SECONDS, ClusterJob, refuse_unprintable
from napkin.errors import NapkinError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,+@:-]*")
TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
PLAIN = re.compile(r"[A-Za-z0-9_./%@:,+=-]+")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What the job asks of Slurm besides nodes. Raises NapkinError for what Slurm would not take."""

    folder: str
    """The folder in which the job runs, on every node."""
    time: str = "24:00:00"
    """Minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    """A container, started by the pyxis plugin."""
    exclusive: bool = True

    def __post_init__(self) -> None:
        refuse_unprintable(folder=self.folder, image=self.image)
        for option, name in (("--partition", self.partition), ("--account", self.account)):
            if name is not None:
                refuse_name(option, name)
        if self.image is not None and re.search("[:,]", self.folder):
            raise NapkinError(
                f"the folder '{self.folder}' cannot be mounted in a container, where ':' and ',' separate: start "
                "from another folder"
            )

    @property
    def seconds(self) -> int:
        """The time limit."""
        return seconds_of_time_limit(self.time)


def refuse_name(option: str, name: str) -> None:
    """Raise NapkinError for a name that Slurm has not given."""
    if not NAME.fullmatch(name) or len(name) > 255:
        raise NapkinError(f"{option} is '{name[:100]}': use letters, digits and _ . , + @ : -")


def seconds_of_time_limit(text: str) -> int:
    """The seconds of a time limit as Slurm writes it. Raises NapkinError for any other text, and for 0.

    >>> [seconds_of_time_limit(each) for each in ("90", "90:30", "24:00:00", "2-12", "2-12:30", "1-00:00:01")]
    [5400, 5430, 86400, 216000, 217800, 86401]
    """
    found = TIME.fullmatch(text) if text.isascii() else None
    if found:
        days, *parts = found.groups()
        given = [int(part) for part in parts if part is not None]
        if days is None:
            # One number is minutes, two are minutes and seconds.
            hours, minutes, seconds = {1: [0, *given, 0], 2: [0, *given], 3: given}[len(given)]
        else:
            hours, minutes, seconds = [*given, 0, 0][:3]
        total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        if total:
            return total
    raise NapkinError(
        f"--time is '{text[:100]}', which is not a time limit of Slurm: use HOURS:MINUTES:SECONDS, as 24:00:00, or "
        "DAYS-HOURS, as 2-12"
    )


def batch_script(job: ClusterJob, settings: SlurmSettings) -> str:
    """The script that `sbatch` takes.

    Raises NapkinError for a name that Slurm would not take, and for a time limit within its warning.
    """
    refuse_name("--job-name", job.name)
    if settings.seconds <= job.warning_seconds:
        raise NapkinError(
            f"--time {settings.time} is no more than the {job.warning_seconds} seconds of --warn-before: the run would "
            "be stopped as soon as it starts; use a longer --time or a shorter --warn-before"
        )
    return "\n".join([*_directives(job, settings), "", *_environment(job), "", *_start(job, settings), ""])


def _directives(job: ClusterJob, settings: SlurmSettings) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Trains a run until all its steps are done, in as many time limits as that takes. Written by napkin launch."
    yield f"#SBATCH --job-name={job.name}"
    yield f"#SBATCH --nodes={job.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if job.uses_gpus:
        yield f"#SBATCH --gpus-per-node={job.gpus_per_node}"
    if job.cpus_per_node is not None:
        yield f"#SBATCH --cpus-per-task={job.cpus_per_node}"
    if settings.exclusive:
        # --mem=0 is all memory of a node, which --exclusive alone does not give.
        yield from ("#SBATCH --exclusive", "#SBATCH --mem=0")
    yield f"#SBATCH --time={settings.time}"
    if settings.partition is not None:
        yield f"#SBATCH --partition={settings.partition}"
    if settings.account is not None:
        yield f"#SBATCH --account={settings.account}"
    # To this script alone, which passes it on: it has to know that the time limit was the cause.
    yield f"#SBATCH --signal=B:USR1@{job.warning_seconds}"
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --output=%x-%j.out"
    yield f"#SBATCH --chdir={_directive_value(settings.folder)}"


def _directive_value(text: str) -> str:
    # sbatch splits these lines itself. An escaped space ends a word unless it is in quotes, in which a backslash
    # escapes anything.
    return text if PLAIN.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _environment(job: ClusterJob) -> Iterator[str]:
    yield "set -u"
    yield "# Without it torchrun gives each rank 1 thread, too few for what a rank computes on the CPU, as an offloaded"
    yield "# optimizer."
    known = "$(nproc)" if job.cpus_per_node is None else str(job.cpus_per_node)
    yield f"cpus=${{SLURM_CPUS_ON_NODE:-{known}}}"
    yield f"export OMP_NUM_THREADS={job.threads_per_rank}"
    yield "# A file of this folder does not take the place of a Python module."
    yield "export PYTHONSAFEPATH=1"
    if job.uses_gpus:
        yield "# NCCL says why a connection fails. It finds the network by itself; where a cluster's manual names an"
        yield "# interface, export NCCL_SOCKET_IFNAME here."
        yield 'export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"'


def _start(job: ClusterJob, settings: SlurmSettings) -> Iterator[str]:
    yield f"recipe={shlex.quote(job.recipe_file)}"
    yield f"run={shlex.quote(job.run)}"
    yield 'if [ -e "$run/recipe.toml" ]; then'
    yield '    work=(resume "$run")'
    yield "else"
    yield '    work=(train "$recipe" --run "$run")'
    yield "fi"
    yield "# The launchers meet on the first node, at a port of this job."
    yield 'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield "endpoint=\"${nodes%%$'\\n'*}:$((20000 + SLURM_JOB_ID % 10000))\""
    yield ""
    yield "step='' signalled='' warned=''"
    yield 'trap \'signalled=yes warned=yes; [ -z "$step" ] || kill -USR1 "$step"\' USR1'
    yield "# srun passes signals on to the launchers. After the first of them has ended, the others get 60 seconds."
    words = ["srun --ntasks-per-node=1 --cpu-bind=none --wait=60"]
    if job.cpus_per_node is not None:
        # Newer versions of srun do not take it from sbatch.
        words[0] += f" --cpus-per-task={job.cpus_per_node}"
    if settings.image is not None:
        words.append(f"--container-image={shlex.quote(settings.image)}")
        words.append('--container-mounts="$PWD:$PWD" --container-workdir="$PWD"')
    words += job.launcher
    words.append('--nnodes "$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$endpoint"')
    words.append(f'--rdzv-id "$SLURM_JOB_ID" --rdzv-conf read_timeout={RENDEZVOUS_SECONDS}')
    words.append('-m -- napkin "${work[@]}" &')
    yield " \\\n    ".join(words)
    yield "step=$!"
    yield "while :; do"
    yield "    signalled=''"
    yield '    wait "$step"'
    yield "    status=$?"
    yield "    # A signal ends `wait`, not the run."
    yield '    [ -n "$signalled" ] || break'
    yield "done"
    yield 'if [ -n "$warned" ] && [ "$status" -ne 0 ]; then'
    yield '    echo "the time limit is near, the run has stopped: back into the queue"'
    yield '    scontrol requeue "$SLURM_JOB_ID" && exit 0'
    yield '    echo "it could not be put back into the queue: submit this script again, and the run continues" >&2'
    yield "fi"
    yield 'exit "$status"'
