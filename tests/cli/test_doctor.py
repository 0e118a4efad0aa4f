"""`napkin doctor` tries what it reports: what is taken away is reported, with the way to get it back."""

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from napkin.hardware import doctor
from napkin.hardware.host import usable_cores
from napkin.machine_code.processor import cpu_name


def findings(napkin) -> dict[str, dict[str, str]]:
    done = napkin("doctor", "--json")
    found = json.loads(done.out)
    assert done.status == int(found["broken"])
    return {each["what"]: each for each in found["findings"]}


def only(found: Iterable[doctor.Finding]) -> dict[str, doctor.Finding]:
    """What one of the checks finds: all of them start processes that import torch."""
    return {each.what: each for each in found}


@pytest.mark.thorough
def test_a_healthy_machine_is_described_with_the_versions_that_are_imported(napkin) -> None:
    import numba
    import numpy
    import torch

    done = napkin("doctor")
    assert (done.status, done.err) == (0, "")
    assert cpu_name() in done.out
    assert f"{usable_cores()} usable of" in done.out
    # Of each line the first word is a mark.
    known = dict(line.split()[1:3] for line in done.out.splitlines() if len(line.split()) > 2)
    for library in (torch, numba, numpy):
        assert known[library.__name__] == library.__version__
    assert done.out.splitlines()[-1] == "nothing that napkin needs is broken"


def test_a_compiler_that_fails_is_told_from_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor._compiler())["C++ compiler"].state == "fine"
    fake = tmp_path / "false-compiler"
    fake.write_text("#!/bin/sh\necho 'try.cpp:1: error: no headers of C++' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    found = only(doctor._compiler())["C++ compiler"]
    assert found.state == "lacking"
    assert "does not compile a program: no headers of C++" in found.found
    assert "install one" in found.remedy
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not there" in only(doctor._compiler())["C++ compiler"].found


def test_a_compiler_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "slow-compiler"
    fake.write_text("#!/bin/sh\nexec sleep 1000\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 0.2)
    (found,) = doctor._compiler()
    assert (found.state, "took more than 0.2 s" in found.found) == ("lacking", True)


@pytest.mark.thorough
def test_a_library_that_cannot_be_imported_is_broken_and_a_missing_calibration_lacking(
    napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('a missing symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    found = findings(napkin)
    assert (found["numba"]["state"], found["numba"]["found"]) == ("broken", "ImportError: a missing symbol")
    assert found["numba"]["remedy"] == "reinstall it: pip install --force-reinstall numba"
    assert {name for name, each in found.items() if each["state"] == "broken"} == {"numba"}
    assert found["calibration (cpu)"]["state"] == "lacking"


@pytest.mark.torture
def test_a_library_that_crashes_does_not_take_the_doctor_with_it(
    napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numba.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert findings(napkin)["torch"]["state"] == "broken"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have neither owners nor modes here")
def test_a_cache_that_others_may_write_into_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    assert "nothing in it yet" in only(doctor._caches())["cache"].found
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    found = only(doctor._caches())["cache"]
    assert (found.state, "other users may write into it" in found.found) == ("broken", True)
    assert "NAPKIN_CACHE_DIR" in found.remedy
    (tmp_path / "cache").chmod(stat.S_IRWXU)
    assert only(doctor._caches())["cache"].state == "fine"


def test_a_file_in_place_of_the_cache_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    assert only(doctor._caches())["cache"].state == "broken"
