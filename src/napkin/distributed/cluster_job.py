"""A run as a job of a cluster: what the scripts for Slurm and for Kubernetes have in common, checked.

For Slurm it is a batch script, for Kubernetes a manifest: a JobSet with one pod per node. Both go on until all steps
are done. `python -m napkin.distributed.cluster_job` is `torchrun`, which reports a lost rank in one line instead of a
traceback.
"""

import json
import logging
import os
import posixpath
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from napkin.child_process import run_program
from napkin.errors import NapkinError
from napkin.recipe.layout import layout_of_recipe, refuse_impossible_layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import per_device

RENDEZVOUS_SECONDS = 600
"""Seconds that a node waits for the others, which may import Python more slowly from a shared disk; torch's default for
the first connection is 60."""
LONGEST_WARNING = 65_535
"""Seconds; Slurm takes no more."""

LONGEST_NAME = 40
"""Characters of a JobSet's name: with the pod's index and ending it is the name of a pod, of at most 63."""
Scheduler = Literal["slurm", "kubernetes"]
COMMAND: dict[Scheduler, tuple[str, ...]] = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f", "-")}
"""The command that takes a job from its standard input."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on several nodes. Raises NapkinError for what no cluster can do.

    Paths are those on the nodes. All texts are printed in scripts: characters that do not print are refused.
    """

    name: str
    recipe_file: str
    run: str
    nodes: int
    gpus_per_node: int
    """Ranks per node, one for each GPU."""
    uses_gpus: bool = True
    """False for a recipe with training.device = "cpu"."""
    cpus_per_node: int | None = None
    warning_seconds: int = 300
    """Warning before the end of a job: a step and a checkpoint must fit into it."""
    max_restarts: int = 3
    python: str = "python"

    def __post_init__(self) -> None:
        refuse_unprintable(name=self.name, recipe=self.recipe_file, run=self.run, python=self.python)
        for option, number in (("--nodes", self.nodes), ("--gpus-per-node", self.gpus_per_node)):
            if number < 1:
                raise NapkinError(f"{option} is {number}: a job needs at least 1")
        if self.cpus_per_node is not None and self.cpus_per_node < self.gpus_per_node:
            raise NapkinError(
                f"--cpus-per-node is {self.cpus_per_node}, fewer than the {self.gpus_per_node} processes of a node: "
                "give each at least 1"
            )
        if not 1 <= self.warning_seconds <= LONGEST_WARNING:
            raise NapkinError(f"--warn-before is {self.warning_seconds} seconds: use 1 to {LONGEST_WARNING}")
        if self.max_restarts < 0:
            raise NapkinError(f"--max-restarts is {self.max_restarts}: use 0 or more")

    @property
    def launcher(self) -> list[str]:
        """The command of torchrun on a node, in the words of a shell, up to the rendezvous."""
        # This is torchrun, which then exits with 128 + n after signal n instead of 1. Ranks that have not finished
        # their checkpoint are killed after --shutdown-timeout, torchrun's default being 30 seconds.
        return [
            f"{shlex.quote(self.python)} -m napkin.distributed.cluster_job",
            f"--nproc-per-node {self.gpus_per_node} --max-restarts {self.max_restarts} "
            f"--shutdown-timeout {self.warning_seconds}",
        ]

    @property
    def threads_per_rank(self) -> str:
        """The CPU threads of a rank as an expression of a shell, whose variable `cpus` is those of the node."""
        return f"$((cpus > {self.gpus_per_node} ? cpus / {self.gpus_per_node} : 1))"


def sequences_per_rank(recipe: Recipe, *, nodes: int, gpus_per_node: int) -> int:
    """The rows of a batch that each rank gets.

    Raises NapkinError where the recipe cannot be divided among the ranks as its [parallelism] says.
    """
    layout = layout_of_recipe(recipe, nodes * gpus_per_node)
    rows = per_device(recipe, layout.batch_parts).training.batch_size
    refuse_impossible_layout(recipe, layout)
    return rows


def job_name(run: str, scheduler: Scheduler) -> str:
    """The name of a run with the characters that a scheduler takes."""
    name = os.path.basename(os.path.abspath(run))
    if scheduler == "slurm":
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:100].strip("-._") or "napkin"
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")
    return name[:LONGEST_NAME].strip("-") or "napkin"


def submit(scheduler: Scheduler, script: str) -> str:
    """Submit the script to the scheduler and return its answer. Raises NapkinError if the scheduler rejects it."""
    command = COMMAND[scheduler]
    program = command[0]
    try:
        done = run_program(command, script.encode())
    except FileNotFoundError:
        raise NapkinError(
            f"{program} is not installed here: leave --submit out, and give the script to {program} where it is"
        ) from None
    except OSError as error:
        raise NapkinError(f"{program} cannot be started ({error.strerror}): leave --submit out") from None
    answer = " ".join(done.stdout.decode(errors="replace").split())
    if done.returncode:
        message = " ".join(done.stderr.decode(errors="replace").split()) or f"exit status {done.returncode}"
        raise NapkinError(f"{program} did not take the job ({message}): leave --submit out to see the script")
    return answer or f"{program} took the job"


def refuse_unprintable(**texts: str | None) -> None:
    """Raise NapkinError for a text that is empty, or has a character that does not print, such as a line break."""
    for what, text in texts.items():
        if text is not None and not (text and text.isprintable()):
            problem = "has a character that does not print" if text else "is empty"
            raise NapkinError(f"the {what.replace('_', ' ')} '{text}' {problem}, which no script can hold: rename it")


# Slurm starts the script on the first node; `srun` starts torchrun once on every node, and torchrun the ranks. Before
# the time limit Slurm signals the script, which passes the signal on: the run stops with a checkpoint, the script puts
# its job back into the queue, and the next start resumes the run. A node that fails has the same end, by `--requeue`.

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,+@:-]*")
TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
PLAIN = re.compile(r"[A-Za-z0-9_./%@:,+=-]+")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Settings of a Slurm job besides nodes. Raises NapkinError for what Slurm would not take."""

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
    match = TIME.fullmatch(text) if text.isascii() else None
    if match:
        days, *parts = match.groups()
        numbers = [int(part) for part in parts if part is not None]
        if days is None:
            # One number is minutes, two are minutes and seconds.
            hours, minutes, seconds = {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
        else:
            hours, minutes, seconds = [*numbers, 0, 0][:3]
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
    # The signal goes to this script alone, which passes it on: it has to know that the time limit was the cause.
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


# The pods of its indexed Job find each other by the names that its headless service gives them. A pod that is to go
# gets SIGTERM: the run stops with a checkpoint. When a pod has failed, the JobSet creates all of them anew, and they
# resume.

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
PORT = 29400


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Settings of a Kubernetes job besides nodes. Raises NapkinError for what Kubernetes would not take."""

    image: str
    volume_claim: str
    """A claim that all pods can write at once, with recipe, token files and runs."""
    mount: str = "/work"
    """Path at which the pods have it; paths of the recipe and the run begin here."""
    namespace: str | None = None
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        refuse_unprintable(image=self.image, mount=self.mount)
        for option, value, pattern, valid in (
            ("--image", self.image, r"\S+", "the name of an image, without spaces"),
            ("--mount", self.mount, r"/[^:]*", "a path that begins with / and has no ':'"),
            ("--volume-claim", self.volume_claim, CLAIM, "a-z, 0-9, - and ."),
            ("--namespace", self.namespace, LABEL, "a-z, 0-9 and -"),
            ("--gpu-resource", self.gpu_resource, RESOURCE, "DOMAIN/NAME, as nvidia.com/gpu"),
        ):
            if value is not None:
                _refuse(option, value, pattern, valid)


def _refuse(option: str, value: str, pattern: str | re.Pattern[str], valid: str, longest: int = 253) -> None:
    if not re.fullmatch(pattern, value) or len(value) > longest:
        raise NapkinError(f"{option} is '{value[:100]}', which Kubernetes does not take: use {valid}")


def jobset_manifest(job: ClusterJob, settings: KubernetesSettings) -> str:
    """The manifest that `kubectl apply` takes, as YAML.

    Raises NapkinError for a name that Kubernetes would not take, and for a path that is not on the volume.
    """
    valid = f"a-z, 0-9 and -, beginning with a letter, at most {LONGEST_NAME} characters"
    _refuse("--job-name", job.name, LABEL, valid, LONGEST_NAME)
    for what, path in (("recipe", job.recipe_file), ("run", job.run)):
        place = PurePosixPath(posixpath.normpath(posixpath.join(settings.mount, path)))
        if not place.is_relative_to(posixpath.normpath(settings.mount)):
            raise NapkinError(
                f"the {what} '{path}' is not on the volume, which the pods have at {settings.mount}: name it by its "
                "path on the volume, from the folder that is the volume here"
            )
    return "\n".join([*_head(job, settings), *_indented(_pod(job, settings), 12), ""])


def _head(job: ClusterJob, settings: KubernetesSettings) -> Iterator[str]:
    yield "# Trains a run on several nodes, and resumes it after failures. Written by napkin launch."
    yield "apiVersion: jobset.x-k8s.io/v1alpha2"
    yield "kind: JobSet"
    yield "metadata:"
    yield f"  name: {_scalar(job.name)}"
    if settings.namespace is not None:
        yield f"  namespace: {_scalar(settings.namespace)}"
    yield "spec:"
    yield "  # The headless service, under the name of the JobSet."
    yield "  network:"
    yield "    enableDNSHostnames: true"
    yield "  failurePolicy:"
    yield f"    maxRestarts: {job.max_restarts}"
    yield "  replicatedJobs:"
    yield "    - name: node"
    yield "      replicas: 1"
    yield "      template:"
    yield "        spec:"
    yield f"          parallelism: {job.nodes}"
    yield f"          completions: {job.nodes}"
    yield "          completionMode: Indexed"
    yield "          # A lost pod fails the job: the ranks of the others cannot go on without it."
    yield "          backoffLimit: 0"
    yield "          template:"


def _pod(job: ClusterJob, settings: KubernetesSettings) -> Iterator[str]:
    limits = {settings.gpu_resource: job.gpus_per_node} if job.uses_gpus else {}
    limits |= {} if job.cpus_per_node is None else {"cpu": job.cpus_per_node}
    yield "spec:"
    yield "  restartPolicy: Never"
    yield "  # Between SIGTERM and SIGKILL: a step and a checkpoint must fit."
    yield f"  terminationGracePeriodSeconds: {job.warning_seconds}"
    yield "  containers:"
    yield "    - name: napkin"
    yield f"      image: {_scalar(settings.image)}"
    yield f"      workingDir: {_scalar(settings.mount)}"
    yield '      command: ["/bin/sh", "-c"]'
    yield "      args:"
    yield "        - |"
    yield from _indented(map(_without_references, _shell_script(job)), 10)
    yield "      env:"
    yield "        # A file of the volume does not take the place of a Python module."
    yield '        - {name: PYTHONSAFEPATH, value: "1"}'
    if job.uses_gpus:
        yield "        # NCCL says why a connection fails."
        yield '        - {name: NCCL_DEBUG, value: "WARN"}'
    yield "      ports:"
    yield f"        - containerPort: {PORT}"
    if limits:
        yield "      resources:"
        yield "        limits:"
        yield from (f"          {_scalar(name)}: {number}" for name, number in limits.items())
    yield "      volumeMounts:"
    yield f"        - {{name: work, mountPath: {_scalar(settings.mount)}}}"
    yield "        - {name: shm, mountPath: /dev/shm}"
    yield "  volumes:"
    yield "    - name: work"
    yield "      persistentVolumeClaim:"
    yield f"        claimName: {_scalar(settings.volume_claim)}"
    yield "    # NCCL exchanges data of one node through shared memory, of which a container has 64 MB by default."
    yield "    - name: shm"
    yield "      emptyDir: {medium: Memory}"


def _shell_script(job: ClusterJob) -> Iterator[str]:
    first_pod = f"{job.name}-node-0-0.{job.name}"
    yield f"recipe={shlex.quote(job.recipe_file)}"
    yield f"run={shlex.quote(job.run)}"
    yield 'if [ -e "$run/recipe.toml" ]; then'
    yield '  set -- resume "$run"'
    yield "else"
    yield '  set -- train "$recipe" --run "$run"'
    yield "fi"
    yield "# Without it torchrun gives each rank 1 thread."
    yield f"cpus={'$(nproc)' if job.cpus_per_node is None else job.cpus_per_node}"
    yield f"export OMP_NUM_THREADS={job.threads_per_rank}"
    yield "# The pods meet at the first of them, which may not know its own name yet."
    yield 'is_host=$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo true || echo false)'
    yield "# The launcher takes the shell's place, and with it the signals."
    first, *words = job.launcher
    words = [f"exec {first}", *words]
    words.append(f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint {first_pod}:{PORT}")
    words.append(f'--rdzv-id {job.name} --rdzv-conf "is_host=$is_host,read_timeout={RENDEZVOUS_SECONDS}"')
    words.append('-m -- napkin "$@"')
    yield from " \\\n  ".join(words).splitlines()


def _without_references(line: str) -> str:
    # Kubernetes replaces $(NAME) in arguments, and $$ by $.
    return re.sub(r"\$(?=[$(])", "$$", line)


def _scalar(text: str) -> str:
    # A string of JSON is one of YAML, if all characters print.
    return json.dumps(text, ensure_ascii=False)


def _indented(lines: Iterable[str], spaces: int) -> Iterator[str]:
    return (textwrap.indent(line, " " * spaces) for line in lines)


# It takes torchrun's options. It exits with the status of the rank that failed first, 128 + n after signal n, and
# forwards the signals that clusters send before a time limit, for which torchrun itself would end and leave its ranks
# behind.

FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU"


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for them and return the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Every closing signal that is sent to a rank, and every failure with its pid, would be a line of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run.main(["--signals-to-handle", FORWARDED, *(sys.argv[1:] if arguments is None else arguments)])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        # A rank that was killed is the cause, even if the others have noticed before the launcher has.
        killed = [each for each in error.failures.items() if each[1].exitcode < 0]
        rank, failure = killed[0] if killed else error.get_first_failure()
        if not killed:
            # The rank has said why.
            return failure.exitcode
        line = f"launch: rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}"
        sys.stderr.write(f"{line}; continue from the newest checkpoint with `napkin resume`\n")
        return 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
