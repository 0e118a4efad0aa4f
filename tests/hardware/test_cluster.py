import re
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster, node_of, nodes
from napkin.hardware.device_file import catalogue, find_device


@pytest.mark.parametrize(
    ("name", "device", "n_devices", "per_node", "n_nodes"),
    [
        ("H100", "H100-SXM-80GB", 1, 8, 1),
        ("64xH100", "H100-SXM-80GB", 64, 8, 8),
        ("60 x h100", "H100-SXM-80GB", 60, 8, 8),
        ("8x8xH100", "H100-SXM-80GB", 64, 8, 8),
        ("4×16×A100", "A100-SXM-80GB", 64, 16, 4),
        ("16xDGX-H100", "H100-SXM-80GB", 128, 8, 16),
        ("2xgb200 nvl72", "GB200-186GB", 144, 72, 2),
        ("8xp4d.24xlarge", "A100-SXM-40GB", 64, 8, 8),
        ("16xL4", "L4", 16, 8, 2),
        ("1024xTPU-v4", "TPU-v4", 1024, 4096, 1),
    ],
)
def test_a_cluster_is_found_by_devices_by_nodes_and_devices_and_by_kinds_of_node(
    name: str, device: str, n_devices: int, per_node: int, n_nodes: int
) -> None:
    cluster = find_cluster(name)
    assert (cluster.device.name, cluster.n_devices) == (device, n_devices)
    assert (cluster.node.devices, cluster.n_nodes) == (per_node, n_nodes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("2xDGX-H10", "did you mean 'DGX-H100'?"),
        ("2x8xDGX-H100", "a DGX-H100 has 8 devices: write 2xDGX-H100"),
        ("0xH100", "is not a number of devices"),
        ("8x0xH100", "is not a number of devices"),
        ("999999999xH100", "999,999,999 devices: use at most 10,000,000"),
        ("8xbanana", "is not a known accelerator"),
        ("8x8x8xH100", "is not a known accelerator"),
    ],
)
def test_a_name_that_is_no_cluster_is_refused_with_the_way_out(name: str, says: str) -> None:
    with pytest.raises(NapkinError, match=re.escape(says)) as refused:
        find_cluster(name)
    assert "\n" not in str(refused.value)


def test_every_node_has_a_device_of_the_catalogue_and_a_slower_network_than_its_link() -> None:
    known = {device.name: device for device in catalogue()}
    for node in nodes():
        device = known[node.device]
        assert node.source is not None
        assert (node.network is None) == (node.network_bandwidth is None), node.name
        link = device.link_bandwidth or device.host_bandwidth
        assert link is not None
        assert node.network_bandwidth is None or node.network_bandwidth <= link, node.name


def test_a_file_describes_the_node_of_its_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\npeaks = { bf16 = 1e14 }\nmemory_bytes = 24e9\nmemory_bandwidth = 1e12\n'
        'link = "wire"\nlink_bandwidth = 50e9\ndevices_per_node = 4\nnetwork_bandwidth = 12.5e9\n'
    )
    cluster = find_cluster(f"16x{path}")
    assert (cluster.n_nodes, cluster.node.devices, cluster.node.network) == (4, 4, "100 Gbit/s per device")
    assert find_cluster(f"2x8x{path}").node.devices == 8
    path.write_text(path.read_text().replace("= 4\n", "= 0\n"))
    with pytest.raises(NapkinError, match=r"devices_per_node.*`?int`?.*1"):
        find_cluster(f"16x{path}")


def test_the_first_node_of_a_device_is_assumed_and_others_get_a_stated_default() -> None:
    assert node_of(find_device("A100-40GB")).name == "DGX-A100-40GB"
    assumed = node_of(find_device("RTX-4090"))
    assert assumed.network is not None
    assert "assumed" in assumed.network
