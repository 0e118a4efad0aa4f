"""The manifest is read by a YAML parser, and its script run by a shell, with a Python that records its arguments."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from napkin.distributed.cluster_job import ClusterJob, KubernetesSettings, jobset_manifest
from napkin.errors import NapkinError

HOSTILE = (
    'it\'s "a": run; touch made $(touch made) $(NCCL_DEBUG) $$(NCCL_DEBUG) $$ `touch made` \\ #x - {a: b} 日本語 🦊'
)


def job(**changes: Any) -> ClusterJob:
    settings = {"name": "big", "recipe_file": "big.toml", "run": "runs/big", "nodes": 4, "gpus_per_node": 8}
    return ClusterJob(**{**settings, **changes})


def settings(**changes: Any) -> KubernetesSettings:
    return KubernetesSettings(**{"image": "lab/napkin:1", "volume_claim": "training", **changes})


def parts(manifest: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """JobSet, specification of the Job, specification of the pod, container."""
    jobset = yaml.safe_load(manifest)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    of_job = replicated["template"]["spec"]
    pod = of_job["template"]["spec"]
    (container,) = pod["containers"]
    return jobset, of_job, pod, container


def expanded(text: str, environment: dict[str, str]) -> str:
    """An argument as Kubernetes passes it on: $(NAME) of a known variable is its value, $$ is $."""
    return re.sub(
        r"\$(?:\$|\(([^()]*)\))",
        lambda found: "$" if found[0] == "$$" else environment.get(found[1], found[0]),
        text,
    )


def run_script(manifest: str, folder: Path, index: int) -> dict[str, Any]:
    """What the container's command starts in `folder`."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    told = folder / "told.json"
    (programs / "python").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ), os.getpid()], open({str(told)!r}, 'w'))\n"
    )
    (programs / "python").chmod(0o755)
    container = parts(manifest)[3]
    given = {each["name"]: each["value"] for each in container["env"]}
    command = [*container["command"], *(expanded(each, given) for each in container["args"])]
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **given, "PATH": path, "JOB_COMPLETION_INDEX": str(index)}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    assert process.wait() == 0
    arguments, environment, pid = json.loads(told.read_text())
    # The launcher takes the place of the shell, so that it gets the pod's signals.
    assert pid == process.pid
    return {"arguments": arguments, "environment": environment}


def value_after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_the_manifest_has_what_a_job_needs() -> None:
    jobset, of_job, pod, container = parts(jobset_manifest(job(cpus_per_node=64), settings(namespace="lab")))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"] == {"name": "big", "namespace": "lab"}
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True}
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert {name: of_job[name] for name in ("parallelism", "completions", "completionMode", "backoffLimit")} == {
        "parallelism": 4,
        "completions": 4,
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)
    assert (container["image"], container["workingDir"]) == ("lab/napkin:1", "/work")
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8, "cpu": 64}}
    assert container["volumeMounts"] == [
        {"name": "work", "mountPath": "/work"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    assert pod["volumes"] == [
        {"name": "work", "persistentVolumeClaim": {"claimName": "training"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def test_a_recipe_for_cpus_asks_for_no_gpus() -> None:
    *_, container = parts(jobset_manifest(job(uses_gpus=False), settings()))
    assert "resources" not in container
    assert [each["name"] for each in container["env"]] == ["PYTHONSAFEPATH"]


@pytest.mark.parametrize("index", [0, 3])
def test_every_pod_starts_torchrun_and_they_meet_at_the_first(tmp_path: Path, index: int) -> None:
    told = run_script(jobset_manifest(job(cpus_per_node=64), settings()), tmp_path, index)
    arguments = told["arguments"]
    options = {
        "--nnodes": "4",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "big-node-0-0.big:29400",
        "--rdzv-id": "big",
        "--rdzv-conf": f"is_host={'true' if index == 0 else 'false'},read_timeout=600",
        "--max-restarts": "3",
        "--shutdown-timeout": "300",
    }
    assert arguments[:2] == ["-m", "napkin.distributed.cluster_job"]
    assert {option: value_after(arguments, option) for option in options} == options
    assert arguments[-7:] == ["-m", "--", "napkin", "train", "big.toml", "--run", "runs/big"]
    assert told["environment"]["OMP_NUM_THREADS"] == "8"


def test_torchrun_knows_the_options_of_the_launcher(tmp_path: Path) -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    arguments = run_script(jobset_manifest(job(), settings()), tmp_path, 0)["arguments"]
    parsed = get_args_parser().parse_args(arguments[2:])
    config, _, rest = config_from_args(parsed)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (4, 4, 8, 3)
    assert (config.rdzv_configs["is_host"], config.rdzv_configs["read_timeout"]) == ("true", "600")
    assert rest[-5:] == ["napkin", "train", "big.toml", "--run", "runs/big"]


def test_a_run_that_exists_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "recipe.toml").write_text("")
    arguments = run_script(jobset_manifest(job(), settings()), tmp_path, 0)["arguments"]
    assert arguments[-4:] == ["--", "napkin", "resume", "runs/big"]


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    manifest = jobset_manifest(job(run=HOSTILE, recipe_file=HOSTILE), settings(mount=f"/{HOSTILE.replace(':', '')}"))
    arguments = run_script(manifest, tmp_path, 0)["arguments"]
    assert arguments[-3:] == [HOSTILE, "--run", HOSTILE]
    assert not (tmp_path / "made").exists()
    *_, container = parts(manifest)
    assert container["workingDir"] == container["volumeMounts"][0]["mountPath"] == f"/{HOSTILE.replace(':', '')}"
    *_, container = parts(jobset_manifest(job(), settings(image=HOSTILE.replace(" ", ""))))
    assert container["image"] == HOSTILE.replace(" ", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "a b"},
        {"image": ""},
        {"image": "a\nb"},
        {"volume_claim": "A"},
        {"volume_claim": "a: b"},
        {"mount": "work"},
        {"mount": "/a:b"},
        {"mount": "/a\nb"},
        {"namespace": "a.b"},
        {"gpu_resource": "gpu"},
        {"gpu_resource": "nvidia.com/gpu: 1"},
    ],
)
def test_what_kubernetes_does_not_take_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(NapkinError):
        settings(**changes)


@pytest.mark.parametrize("name", ["Big", "a_b", "-a", "a-", "0a", "x" * 41, "a b", "a\nb"])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(NapkinError):
        jobset_manifest(job(name=name), settings())


@pytest.mark.parametrize("path", ["/home/me/big", "../big", "a/../../big", "/workshop/big"])
def test_a_path_that_is_not_on_the_volume_is_refused(path: str) -> None:
    for field in ("run", "recipe_file"):
        with pytest.raises(NapkinError, match="volume"):
            jobset_manifest(job(**{field: path}), settings())
    on_the_volume = job(run=f"{settings().mount}/runs/../big", recipe_file="a/../big.toml")
    assert jobset_manifest(on_the_volume, settings())


def test_dash_and_bash_read_the_script(tmp_path: Path) -> None:
    (script,) = parts(jobset_manifest(job(run=HOSTILE), settings()))[3]["args"]
    for shell in filter(None, map(shutil.which, ("sh", "bash", "dash"))):
        done = subprocess.run([shell, "-n"], input=expanded(script, {}), text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
