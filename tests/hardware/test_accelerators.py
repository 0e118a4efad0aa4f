import dataclasses
import re
import subprocess
import sys
from collections import Counter

import pytest

from napkin.errors import NapkinError
from napkin.hardware.device_file import catalogue, find_device

DRIVER_NAMES = {
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
    "Tesla T4": "T4",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A100-SXM4-40GB": "A100-SXM-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100-SXM-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA H100 NVL": "H100-NVL-94GB",
    "NVIDIA H800": "H800-SXM-80GB",
    "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA B200": "B200-SXM-180GB",
    "NVIDIA GB200": "GB200-186GB",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI355X": "MI355X",
    "TPU v4": "TPU-v4",
    "TPU v5 lite": "TPU-v5e",
    "TPU v5": "TPU-v5p",
    "TPU v6 lite": "TPU-v6e",
    "Apple M2 Ultra": "M2-Ultra",
    "Tesla P100-PCIE-16GB": "P100-PCIe-16GB",
    "Tesla P100-SXM2-16GB": "P100-SXM2-16GB",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA A800-SXM4-80GB": "A800-SXM-80GB",
    "NVIDIA A800 80GB PCIe": "A800-PCIe-80GB",
    "NVIDIA L40": "L40",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Server",
    "NVIDIA GeForce RTX 4080": "RTX-4080",
    "NVIDIA GeForce RTX 5080": "RTX-5080",
    "NVIDIA H20": "H20-SXM-96GB",
    "NVIDIA H200 NVL": "H200-NVL-141GB",
    "NVIDIA GH200 144G HBM3e": "GH200-144GB",
    "NVIDIA B300 SXM6 AC": "B300-SXM-270GB",
    "NVIDIA GB300": "GB300-279GB",
    "NVIDIA GB10": "GB10",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300A": "MI300A",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI350X": "MI350X",
    "TPU v3": "TPU-v3",
    "TPU7x": "TPU-v7",
    "Apple M1 Max": "M1-Max",
    "Apple M3 Ultra": "M3-Ultra",
    "Apple M4 Pro": "M4-Pro",
}

COMMON_NAMES = """
p100 v100 t4 a10 a10g a30 a40 a100 a100-40gb a100-80gb a800 a6000 rtx-a6000 3090 rtx3090 4080 4090 rtx4090 5080 5090
rtx5090 l4 l40 l40s h100 h100-80gb h100-96gb h100-sxm h100-pcie h100-nvl h20 h200 h800 gh200 gh200-96gb gh200-144gb
b200 b300 gb200 gb300 gb10 dgx-spark rtx-6000-ada rtx-pro-6000 mi210 mi250x mi300a mi300x mi325x mi350x mi355x tpu-v3
tpu-v4 tpu-v5e tpu-v5p tpu-v6e trillium tpu-v7 ironwood trn1 trn2 trn3 trainium trainium2 gaudi2 gaudi3 m1 m1-pro m1-max
m1-ultra m2 m2-max m2-ultra m3 m3-max m3-ultra m4 m4-pro m4-max
""".split()

# Dense FLOP/s and bytes/s as published; where a datasheet prints the sparse figure, half of it.
PUBLISHED = {
    "H100": {"bf16": 1979e12 / 2, "fp32": 67e12, "fp8-e4m3": 3958e12 / 2},
    "H100-PCIe": {"bf16": 1513e12 / 2},
    "H800": {"bf16": 1979e12 / 2},
    "H200": {"bf16": 1979e12 / 2},
    "A100": {"bf16": 312e12, "fp32": 19.5e12, "tf32": 156e12},
    "L4": {"bf16": 242e12 / 2},
    "RTX-4090": {"bf16": 165.2e12},
    "V100": {"fp16": 125e12},
    "MI300X": {"bf16": 1307.4e12},
    "TPU-v5e": {"bf16": 197e12},
    "A30": {"bf16": 165e12},
    "B200": {"bf16": 4.5e15 / 2, "nvfp4": 9e15},
    "B300": {"bf16": 4.5e15 / 2, "nvfp4": 108e15 / 8},
    "GB10": {"fp4": 1e15 / 2},
    "RTX-5090": {"fp4": 3352e12 / 2},
    "MI355X": {"mxfp4": 10066.3e12},
    "MI300A": {"bf16": 980.6e12},
    "TPU-v7": {"bf16": 2307e12, "fp8": 4614e12},
    "Trainium2": {"bf16": 667e12, "fp8": 1299e12},
    "Gaudi3": {"bf16": 1835e12},
}


def test_every_device_has_a_source_a_peak_and_plausible_magnitudes():
    for device in catalogue():
        assert device.source, device.name
        assert len(device.source.title) > 10, device.name
        assert all(1e11 < flops < 1e17 for flops in [*device.peaks.values(), *device.sparse.values()]), device.name
        assert 1e10 < device.memory_bytes < 1e12, device.name
        assert 5e10 < device.memory_bandwidth < 1e14, device.name
        assert device.link_bandwidth is None or 1e10 < device.link_bandwidth < 2e12, device.name
        assert device.host_bandwidth is None or 1e10 < device.host_bandwidth < 1e12, device.name
        assert device.watts is None or 50 < device.watts < 2000, device.name
        assert device.price is None or (0.1 < device.price.usd_per_hour < 20 and device.price.offer), device.name


def test_a_link_has_a_name_where_it_has_a_bandwidth():
    for device in catalogue():
        assert (device.link is None) == (device.link_bandwidth is None), device.name
        assert (device.host_link is None) == (device.host_bandwidth is None), device.name


def test_sparse_figures_are_twice_the_dense_ones():
    for device in catalogue():
        for name, sparse in device.sparse.items():
            assert sparse == pytest.approx(2 * device.peaks[name], rel=0.02), (device.name, name)


def test_narrower_formats_are_never_slower():
    for device in catalogue():
        for formats in (("fp32", "tf32", "bf16", "fp8", "fp4"), ("bf16", "int8", "int4")):
            order = [device.peaks[name] for name in formats if name in device.peaks]
            assert order == sorted(order), device.name
        if "bf16" in device.peaks and "fp16" in device.peaks:
            assert device.peaks["bf16"] == device.peaks["fp16"], device.name


# Eight bits at the rate of sixteen; and AWS's matrix units, whose fp8 is 1.9 and 3.75 times as fast.
OTHER_FP8 = {"TPU-v5p", "Gaudi3", "Trainium2", "Trainium3"}


def test_fp8_is_twice_as_fast_as_bf16_and_fp4_at_least_as_fast_as_fp8():
    for device in catalogue():
        if "fp8" in device.peaks and device.name not in OTHER_FP8:
            assert device.peaks["fp8"] == pytest.approx(2 * device.peaks["bf16"], rel=0.02), device.name
        if {"fp4", "fp8"} <= device.peaks.keys():
            # Two to four times, but on Trainium3: Blackwell Ultra has 3, GeForce accumulates fp8 in fp32 at half rate.
            assert 1 <= device.peaks["fp4"] / device.peaks["fp8"] <= 4, device.name


def test_memory_is_within_a_tenth_of_the_advertised():
    for device in catalogue():
        assert device.memory_bytes == pytest.approx(device.advertised_bytes, rel=0.1), device.name


def test_every_source_has_a_year_and_an_address():
    for device in catalogue():
        assert device.source, device.name
        assert 2015 < int(device.source.date[:4]) < 2030, device.name
        assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+/\S+", device.source.url), device.name
        assert device.price is None or 2015 < int(device.price.date[:4]) < 2030, device.name


def test_a_name_that_states_gigabytes_has_about_as_many():
    for device in catalogue():
        stated = re.search(r"(\d+)GB", device.name)
        if stated:
            # Between the decimal and the binary reading, less what error correction and firmware keep.
            assert int(stated[1]) * 1e9 <= device.memory_bytes <= int(stated[1]) * 1.075e9, device.name


def test_no_two_devices_share_a_name_however_it_is_spelt():
    spellings = Counter(
        spelling
        for device in catalogue()
        for spelling in {re.sub(r"[-_\s]", "", name.lower()) for name in (device.name, *device.aliases)}
    )
    assert [name for name, times in spellings.items() if times > 1] == []


def test_every_name_and_alias_finds_its_device():
    for device in catalogue():
        for name in (device.name, *device.aliases):
            for spelling in (name, name.upper(), name.replace("-", " "), name.replace("-", "_").lower()):
                assert find_device(spelling) is device, spelling


def test_names_that_drivers_print_are_known():
    assert {printed: find_device(printed).name for printed in DRIVER_NAMES} == DRIVER_NAMES


def test_names_that_people_use_are_known():
    assert len(COMMON_NAMES) >= 60
    for name in COMMON_NAMES:
        find_device(name)


def test_peaks_are_the_published_dense_figures():
    for name, peaks in PUBLISHED.items():
        found = {format_name: find_device(name).peak(format_name) for format_name in peaks}
        assert found == pytest.approx(peaks, rel=1e-3), name


def test_bandwidths_are_the_published_ones():
    assert find_device("L4").memory_bandwidth == 300e9
    assert find_device("H100").memory_bandwidth == 3.35e12
    assert find_device("H200").memory_bandwidth == 4.8e12
    # 900 GB/s and 400 GB/s are both directions together.
    assert find_device("H100").link_bandwidth == 900e9 / 2
    assert find_device("H800").link_bandwidth == 400e9 / 2


def test_short_names_mean_the_commonest_form():
    assert find_device("H100").name == "H100-SXM-80GB"
    assert find_device("A100-80GB").name == "A100-SXM-80GB"
    assert find_device("a100").name == "A100-SXM-80GB"
    assert find_device("A100-40GB").name == "A100-SXM-40GB"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(NapkinError, match=r"^'H10O'.*accelerator: .* H100-SXM-80GB[^\n]*$"):
        find_device("H10O")
    with pytest.raises(NapkinError, match="P100-SXM2-16GB"):
        find_device("?")


def test_a_laptop_is_not_taken_for_the_desktop_card():
    with pytest.raises(NapkinError, match="RTX-4090"):
        find_device("NVIDIA GeForce RTX 4090 Laptop GPU")


def test_peak_takes_any_name_of_a_format_and_refuses_what_the_device_lacks():
    h100 = find_device("H100")
    assert h100.peak("torch.bfloat16") == h100.peak("bf16")
    assert h100.peak("fp8-e5m2") == h100.peak("fp8-e4m3") == h100.peaks["fp8"]
    with pytest.raises(NapkinError, match=r"V100-SXM2-16GB.*bf16.*choose.*fp64, fp32"):
        find_device("V100").peak("bf16")


def test_devices_are_frozen_and_can_be_keys():
    h100 = find_device("H100")
    assert {h100: 1}[find_device("h100 sxm")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        h100.name = "H200"  # pyright: ignore[reportAttributeAccessIssue]


def test_the_catalogue_loads_without_torch():
    program = (
        "import sys, napkin.hardware as h; h.find_device('H100'); h.Host; h.calibrate; h.load_calibration; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
