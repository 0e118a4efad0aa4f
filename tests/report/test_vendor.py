"""The chart library is the released one, with its licence, and is part of the package."""

import fnmatch
import hashlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
VENDOR = ROOT / "src" / "napkin" / "report" / "vendor"
# Of the files in uplot-1.6.32.tgz of the npm registry.
RELEASED = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot-1.6.32.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_the_library_is_unmodified() -> None:
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir()} == RELEASED


def test_a_wheel_has_the_library_its_licence_and_every_file_of_the_pages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["napkin"]
    report = ROOT / "src" / "napkin" / "report"
    data = [file for file in report.rglob("*") if file.is_file() and file.suffix not in {".py", ".pyc"}]
    assert len(data) > 8
    for file in data:
        name = file.relative_to(ROOT / "src" / "napkin").as_posix()
        assert any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns), name
    assert (VENDOR / "LICENSE").relative_to(ROOT).as_posix() in project["project"]["license-files"]
    for document in ("README.md", "CONTRIBUTING.md"):
        assert "uPlot" in (ROOT / document).read_text()
