import os
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.hardware import Device, find_device, read_device

MINIMAL = {
    "name": '"mine"',
    "peaks": "{ bf16 = 100e12, fp32 = 50e12 }",
    "memory_bytes": "24_000_000_000",
    "memory_bandwidth": "1e12",
}


def write(folder: Path, **changes: str | None) -> Path:
    path = folder / "mine.toml"
    fields = {**MINIMAL, **changes}
    path.write_text("".join(f"{name} = {value}\n" for name, value in fields.items() if value is not None))
    return path


def test_four_fields_describe_a_device(tmp_path: Path):
    path = write(tmp_path)
    device = find_device(str(path))
    assert device == find_device(path) == read_device(path)
    assert isinstance(device, Device)
    assert (device.name, device.memory_bytes, device.advertised_bytes) == ("mine", 24 * 10**9, 24 * 10**9)
    assert device.peak("bf16") == 100e12
    assert (device.price, device.source, device.link, device.watts) == (None, None, None, None)


def test_every_field_of_the_catalogue_can_be_described(tmp_path: Path):
    path = write(
        tmp_path,
        vendor='"me"',
        source='{ title = "measured", date = "2026-01", url = "https://example.org/mine" }',
        memory_bytes="24e9",
        advertised_bytes="25_000_000_000",
        sparse="{ bf16 = 200e12 }",
        compute_capability="[9, 0]",
        aliases='["my card"]',
        link='"wire"',
        link_bandwidth="1e10",
        host_link='"PCIe 4.0 x16"',
        host_bandwidth="32e9",
        watts="200",
        price='{ usd_per_hour = 0.5, date = "2026-01", offer = "my shelf" }',
        torch_device='"cpu"',
    )
    device = find_device(path)
    assert (device.compute_capability, device.watts, device.usable_bytes) == ((9, 0), 200, 24 * 10**9)
    assert str(device.price) == "$0.50 per hour, my shelf, 2026-01"
    assert str(device.source) == "measured, 2026-01: https://example.org/mine"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"efficiency": "{ matmul_share = 1.7 }"}, "efficiency.matmul_share: expected float <= 1.2"),
        (
            {"efficiency": "{ matmul_shar = 0.7 }"},
            "unknown field efficiency.matmul_shar: did you mean efficiency.matmul_share",
        ),
        ({"name": None}, "the field name is missing"),
        ({"peaks": None}, "the field peaks is missing"),
        ({"memory_bandwith": "1e12"}, "unknown field memory_bandwith: did you mean memory_bandwidth?"),
        ({"peaks": "{ bf17 = 1e12 }"}, "unknown field peaks.bf17: did you mean peaks.bf16?"),
        ({"peaks": '{ bf16 = "x" }'}, "peaks: expected float, got str"),
        ({"peaks": "{ bf16 = -1.0 }"}, "peaks: expected float > 0"),
        ({"peaks": "{ }"}, "peaks: expected at least one format"),
        ({"peaks": "{ bf16 = inf }"}, "peaks.bf16: expected a number up to"),
        ({"peaks": "3"}, "peaks: expected object, got int"),
        ({"memory_bytes": '"24GB"'}, "memory_bytes: expected int, got str"),
        ({"memory_bytes": "1.5"}, "memory_bytes: expected int, got float"),
        ({"memory_bytes": "0"}, "memory_bytes: expected int >= 1"),
        ({"memory_bytes": "100_000_000"}, "memory_bytes: expected more than 600,000,000"),
        ({"memory_bandwidth": "nan"}, "memory_bandwidth: expected"),
        ({"link_bandwidth": "1e30"}, "link_bandwidth: expected a number up to"),
        ({"price": "3"}, "price: expected object"),
        ({"price": "{ usd = 1.0 }"}, "unknown field price.usd: use one of usd_per_hour, date, offer"),
        ({"price": '{ usd_per_hour = 1.0, date = "June", offer = "x" }'}, "price.date: expected str matching"),
        ({"source": '"a book"'}, "source: expected object"),
        ({"source": '{ title = "x", date = "2020", url = "ftp://x" }'}, "source.url: expected str matching"),
        ({"torch_device": '"tpu"'}, "torch_device: invalid enum value"),
        ({"name": '""'}, "name: expected a name"),
    ],
)
def test_a_mistake_is_one_line_with_the_field_and_what_is_expected(
    tmp_path: Path, changes: dict[str, str | None], reason: str
):
    path = write(tmp_path, **changes)
    with pytest.raises(NapkinError) as refusal:
        find_device(path)
    assert str(refusal.value).startswith(f"'{path}': {reason}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"name = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"a" + b".a" * 7000 + b" = 1", "a key has more than 32 dots"),
        (b"x = " + b"[" * 8000, "nested too deeply"),
        (b"memory_bytes = " + b"9" * 10000, "holds a value that cannot be read"),
        (b"#" * 20_000, "more than 16,384 bytes"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, data: bytes, reason: str):
    path = tmp_path / "hostile.toml"
    path.write_bytes(data)
    with pytest.raises(NapkinError, match=reason) as refusal:
        find_device(path)
    assert "\n" not in str(refusal.value)


def test_what_is_not_a_file_is_refused(tmp_path: Path):
    with pytest.raises(NapkinError, match="does not exist"):
        find_device(tmp_path / "absent.toml")
    with pytest.raises(NapkinError, match=r"cannot be read .Is a directory.: name a TOML file that describes a device"):
        find_device(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(NapkinError, match="it is a fifo, not a file"):
        find_device(str(tmp_path / "pipe.toml"))
    with pytest.raises(NapkinError, match="cannot be read"):
        find_device("nul\0.toml")


def test_a_name_of_the_catalogue_is_still_a_name():
    assert find_device("h100").name == "H100-SXM-80GB"
