"""What benchmarks share: the heading of a table, and where tables are left, named for what was measured and when."""

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from napkin.hardware.host import usable_cores
from napkin.machine_code.processor import cpu_name, instruction_sets

RESULTS = Path(__file__).parent / "results"
LOAD_BEFORE = os.getloadavg()[0]
"""Runnable threads in the minute before this process began."""


def heading(title: str, *notes: str, packages: Sequence[str] = ()) -> list[str]:
    """The first lines of a table, printed before anything is measured: its title, the machine and the versions of
    Python, torch and the named packages, and notes, such as what was set and what brackets mean."""
    lines = [f"# {title}", ""]
    for paragraph in (_machine(packages), *notes):
        lines += [paragraph, ""]
    print("\n".join(lines), flush=True)
    return lines


def _machine(packages: Sequence[str]) -> str:
    """The processor, its instructions, cores, torch's threads, versions, the time and the load before this process."""
    instructions = ", ".join(instruction_sets() or ["no known instructions"])
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", *packages):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cores = f"{usable_cores()} of {os.cpu_count()} cores"
    if (torch := sys.modules.get("torch")) is not None:
        cores += f", threads of torch {torch.get_num_threads()}"
    return (
        f"{cpu_name()} ({instructions}), {cores}, {', '.join(versions)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, "
        f"load before {LOAD_BEFORE:.1f}."
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


def write_result(name: str, lines: Iterable[str]) -> None:
    """Keep a heading and the lines of its table in results/, beside those of earlier runs, with the load after the
    measurement below; say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.md"
    after = f"Load after: {os.getloadavg()[0]:.1f}."
    path.write_text("\n".join([*lines, "", after]) + "\n", encoding="utf-8")
    print(f"\n{after}\nwrote {path}")
