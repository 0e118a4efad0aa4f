"""What benchmarks share: the machine in one line, and where tables are left, named for what was measured and when."""

import argparse
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from napkin.hardware.host import cpu_name, instruction_sets, usable_cores

RESULTS = Path(__file__).parent / "results"
LOAD_BEFORE = os.getloadavg()[0]
"""Runnable threads in the minute before this process began."""


def machine(*packages: str) -> str:
    """The processor, its instructions, cores and load before the measurement, with the versions of Python, torch and
    the named packages that are installed."""
    instructions = ", ".join(instruction_sets() or ["no known instructions"])
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", *packages):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return (
        f"{cpu_name()} ({instructions}), {usable_cores()} of {os.cpu_count()} cores, {', '.join(versions)}, "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load before {LOAD_BEFORE:.1f}, now {os.getloadavg()[0]:.1f}"
    )


def no_options(about: str | None) -> None:
    """For a script without options: `--help` prints what it does, and anything else is refused."""
    argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def existing(path: str) -> Path:
    """The type of an argument that names a file or a folder: one that is missing is an error of one line."""
    if not os.path.exists(path):
        raise argparse.ArgumentTypeError(f"'{path}' does not exist: name a file or a folder that does")
    return Path(path)


def needs(about: str | None, package: str) -> NoReturn:
    """For a script that can do nothing without a package that is not installed: `--help` prints what it does, and all
    else ends with one line and status 2."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_known_args()
    parser.error(f"{package} is not installed: pip install {package}")


def write_result(name: str, lines: Iterable[str], *packages: str) -> None:
    """Keep the lines of a table in results/, beside those of earlier runs, with the machine and the versions of the
    named packages below; say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.md"
    measured_on = f"Measured on {machine(*packages)}."
    path.write_text("\n".join([*lines, "", measured_on]) + "\n", encoding="utf-8")
    print(f"\n{measured_on}\nwrote {path}")
