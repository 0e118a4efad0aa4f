"""The manifest with which Kubernetes trains a run on several nodes: a JobSet with one pod per node.

The pods of its indexed Job find each other by the names that its headless service gives them. A pod that is to go gets
SIGTERM: the run stops with a checkpoint. When a pod has failed, the JobSet creates all of them anew, and they resume.
"""

import json
import posixpath
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from napkin.distributed.cluster_job import RENDEZVOUS_SECONDS, ClusterJob, refuse_unprintable
from napkin.errors import NapkinError

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST_NAME = 40
"""Characters of a JobSet's name: with the pod's index and ending it is the name of a pod, of at most 63."""
RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
PORT = 29400


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """What the job asks of Kubernetes besides nodes. Raises NapkinError for what Kubernetes would not take."""

    image: str
    volume_claim: str
    """A claim that all pods can write at once, with recipe, token files and runs."""
    mount: str = "/work"
    """Where the pods have it; paths of the recipe and the run begin here."""
    namespace: str | None = None
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        refuse_unprintable(image=self.image, mount=self.mount)
        _refuse("--image", self.image, bool(re.fullmatch(r"\S+", self.image)), "the name of an image, without spaces")
        mount = self.mount.startswith("/") and ":" not in self.mount
        _refuse("--mount", self.mount, mount, "a path that begins with / and has no ':'")
        _refuse("--volume-claim", self.volume_claim, bool(CLAIM.fullmatch(self.volume_claim)), "a-z, 0-9, - and .")
        if self.namespace is not None:
            _refuse("--namespace", self.namespace, bool(LABEL.fullmatch(self.namespace)), "a-z, 0-9 and -")
        resource = bool(RESOURCE.fullmatch(self.gpu_resource))
        _refuse("--gpu-resource", self.gpu_resource, resource, "DOMAIN/NAME, as nvidia.com/gpu")


def _refuse(option: str, value: str, is_valid: bool, valid: str) -> None:
    if not is_valid or len(value) > 253:
        raise NapkinError(f"{option} is '{value[:100]}', which Kubernetes does not take: use {valid}")


def jobset_manifest(job: ClusterJob, settings: KubernetesSettings) -> str:
    """The manifest that `kubectl apply` takes, as YAML.

    Raises NapkinError for a name that Kubernetes would not take, and for a path that is not on the volume.
    """
    is_valid = bool(LABEL.fullmatch(job.name)) and len(job.name) <= LONGEST_NAME
    valid = f"a-z, 0-9 and -, beginning with a letter, at most {LONGEST_NAME} characters"
    _refuse("--job-name", job.name, is_valid, valid)
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
