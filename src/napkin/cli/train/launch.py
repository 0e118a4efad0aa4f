"""`napkin launch`."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from napkin.cli.common.options import Switch, command, refuse_given
from napkin.cli.common.terminal import notify, print_verbatim, say
from napkin.distributed.cluster_job import (
    ClusterJob,
    KubernetesSettings,
    SlurmSettings,
    batch_script,
    job_name,
    jobset_manifest,
    sequences_per_rank,
    submit,
)
from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.runs.run_folder import RunFolder, is_run

OF_SLURM = ("time", "partition", "account", "exclusive")
OF_KUBERNETES = ("volume_claim", "mount", "namespace", "gpu_resource")


@dataclass(frozen=True)
class LaunchOptions:
    """Print the script with which a cluster trains a run on several nodes: sbatch takes it, or kubectl. A job whose run
    exists resumes it; before its time limit a job is warned, saves a checkpoint and goes back into the queue."""

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE.toml")]
    """The recipe. Its batch is divided among all GPUs."""
    nodes: int
    """Number of nodes."""
    gpus_per_node: int = 8
    """GPUs of each node, with one process for each. If the recipe says training.device = "cpu": processes of a node."""
    run: str | None = None
    """Folder of the run, which all nodes must see; None is runs/ and the name of the recipe."""
    scheduler: Literal["slurm", "kubernetes"] = "slurm"
    """slurm: a batch script. kubernetes: a JobSet, whose controller the cluster must have."""
    submit: Switch = False
    """Submit the script instead of printing it, with sbatch or kubectl."""
    job_name: str | None = None
    """Name of the job; None is made from the name of the run."""
    warn_before: int = 300
    """Seconds before its end at which a job is warned. A step and a checkpoint must fit into them."""
    max_restarts: int = 3
    """Number of restarts of the processes, and on Kubernetes of the pods, after one was lost."""
    cpus_per_node: int | None = None
    """CPUs to ask for on each node; None is all of them, on Kubernetes what the cluster gives."""
    image: str | None = None
    """Container image with napkin. Kubernetes needs one; Slurm needs the pyxis plugin for it and mounts this folder."""
    python: str | None = None
    """Python of the nodes; None is this one, in an image `python`."""
    time: str | None = None
    """Slurm: the time limit, 24:00:00 by default, or DAYS-HOURS, as 2-12."""
    partition: str | None = None
    """Slurm: the partition."""
    account: str | None = None
    """Slurm: the account that pays."""
    exclusive: bool = True
    """Slurm: take whole nodes, with all their memory."""
    volume_claim: str | None = None
    """Kubernetes: claim of the volume with recipe, tokens and runs, which all pods can write at once."""
    mount: str = "/work"
    """Kubernetes: where the pods have that volume; the paths of recipe and run begin there."""
    namespace: str | None = None
    """Kubernetes: the namespace."""
    gpu_resource: str = "nvidia.com/gpu"
    """Kubernetes: the resource that is a GPU."""


@command("launch", LaunchOptions)
def main(options: LaunchOptions) -> None:
    others = OF_KUBERNETES if options.scheduler == "slurm" else OF_SLURM
    refuse_given(options, others, f"means nothing to --scheduler {options.scheduler}")
    recipe = read_recipe(options.recipe)
    job = _job(options, recipe)
    script = _slurm(options, job) if options.scheduler == "slurm" else _kubernetes(options, job)
    sequences = sequences_per_rank(recipe, nodes=job.nodes, gpus_per_node=job.gpus_per_node)
    if options.scheduler == "slurm":
        _refuse_other_run(Path(job.run), recipe)
    if options.submit:
        say(submit(options.scheduler, script))
    else:
        print_verbatim(script.removesuffix("\n"))
    notify(f"launch: {job.nodes} x {job.gpus_per_node} processes; sequences of each batch per process: {sequences}")
    if job.uses_gpus:
        plan = f"napkin plan {shlex.quote(options.recipe)} --on {job.nodes}x{job.gpus_per_node}xH100"
        notify(f"launch: `{plan}` says what a step takes, with the name of these GPUs instead of H100")


def _job(options: LaunchOptions, recipe: Recipe) -> ClusterJob:
    run = str(Path("runs") / Path(options.recipe).stem) if options.run is None else options.run
    is_slurm = options.scheduler == "slurm"
    default_python = sys.executable if is_slurm and options.image is None else "python"
    return ClusterJob(
        name=job_name(run, options.scheduler) if options.job_name is None else options.job_name,
        recipe_file=_as_path(options.recipe),
        run=_as_path(run),
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        uses_gpus=recipe.training.device != "cpu",
        cpus_per_node=options.cpus_per_node,
        warning_seconds=options.warn_before,
        max_restarts=options.max_restarts,
        python=default_python if options.python is None else options.python,
    )


def _as_path(path: str) -> str:
    # A name that begins with a hyphen would be an option.
    return f"./{path}" if path.startswith("-") else path


def _slurm(options: LaunchOptions, job: ClusterJob) -> str:
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise NapkinError("the current folder was removed: change to the folder in which the job is to run") from None
    given: dict[str, Any] = {name: getattr(options, name) for name in ("partition", "account", "image", "exclusive")}
    if options.time is not None:
        given["time"] = options.time
    settings = SlurmSettings(folder=folder, **given)
    return batch_script(job, settings)


def _kubernetes(options: LaunchOptions, job: ClusterJob) -> str:
    if options.image is None:
        raise NapkinError("--image is missing: Kubernetes needs an image with napkin, as Dockerfile.cuda makes it")
    if options.volume_claim is None:
        raise NapkinError(
            "--volume-claim is missing: name the claim of a volume with recipe, tokens and runs that all pods can write"
        )
    names = ("image", "volume_claim", "mount", "namespace", "gpu_resource")
    settings = KubernetesSettings(**{name: getattr(options, name) for name in names})
    return jobset_manifest(job, settings)


def _refuse_other_run(run: Path, recipe: Recipe) -> None:
    """Raise NapkinError where `run` exists and is not a run of this recipe, which the job would not resume."""
    if not is_run(run):
        RunFolder.refuse_existing(run)
        return
    from napkin.training.run import recipe_differences

    differences = recipe_differences(recipe, run)
    if differences:
        raise NapkinError(
            f"'{run}' is a run of another recipe: there {'; '.join(differences)}: choose another --run, or launch "
            f"that run's own recipe, {shlex.quote(str(run / 'recipe.toml'))}"
        )
    notify(f"launch: '{run}' exists, so the job resumes it")
