"""A pipeline on a Ray cluster of two nodes on this machine."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from napkin.curation.engine.pipeline_file import InputOptions, Pipeline
from napkin.curation.engine.pipeline_run import curate
from napkin.curation.registry import make_stage
from peers import peer

pytestmark = pytest.mark.peers


@pytest.fixture
def cluster() -> Iterator[Any]:
    made = peer("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def pipeline_of(folder: Path) -> Pipeline:
    folder.mkdir()
    for number in range(60):
        lines = [msgspec.json.encode({"text": f"document {number * 7 + n} " * (n % 40)}) for n in range(300)]
        (folder / f"{number:02d}.jsonl").write_bytes(b"\n".join(lines))
    stages = (make_stage("length", {"least": 100}), make_stage("duplicates", {}))
    return Pipeline(InputOptions((str(folder),), shard_bytes=2**15), stages)


def digests(corpus: Path) -> dict[str, str]:
    files = (path for path in sorted(corpus.rglob("*")) if path.is_file() and path.name != "meter.json")
    return {str(path.relative_to(corpus)): sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_cluster_gives_the_same_bytes_though_a_worker_and_a_node_vanish(tmp_path: Path, cluster: Any) -> None:
    pipeline = pipeline_of(tmp_path / "in")
    curate(pipeline, tmp_path / "alone")
    killed: list[int] = []

    def disturb() -> None:
        while not list((tmp_path / "ray").glob(".work/pass-0/000*")):
            time.sleep(0.01)
        while not killed and not (tmp_path / "ray" / "manifest.json").exists():
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    if "ray::_do" in " ".join(process.cmdline()):
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)
                        break
        cluster.remove_node(next(iter(cluster.worker_nodes)))

    thread = threading.Thread(target=disturb)
    thread.start()
    curate(pipeline, tmp_path / "ray", engine="ray", ray_address=cluster.address)
    thread.join()
    assert killed
    assert digests(tmp_path / "ray") == digests(tmp_path / "alone")
