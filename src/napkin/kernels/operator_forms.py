"""The choice among several forms of an operator for a shape: the one that was fastest on this machine.

An operator asks `fastest_form` for the class of its shape. The answer was found by timing (napkin.hardware.form_timing)
and is kept in the user's cache, in one file for each processor, its instructions, the number of threads, and the
versions of torch and of the kernels; what this process chose it uses also where the file cannot be written. Where
nothing was timed it is the operator's default. Nothing is timed here, so a form never changes in the middle of a
computation.

With the environment variable NAPKIN_FORMS=default nothing is timed and nothing is read: the same forms on each machine.
"""

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from napkin.errors import NapkinError
from napkin.json_files import cache_path, read_cached, write_cached
from napkin.machine_code.processor import cpu_name, processor_name_and_features

KIND = "operator-forms"
MOST_CHOICES = 10_000
SWITCH = "NAPKIN_FORMS"
LIMITS_OF_LIBRARIES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that keep torch and oneDNN from instructions that the processor has."""

Name = Annotated[str, msgspec.Meta(max_length=256)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
ShapeClass = tuple[str | int, ...]
"""The sizes and formats that decide which form is fastest, such as ("bf16", 1, 2304, 768)."""


@dataclass(frozen=True)
class Processor:
    """The processor and the libraries that a choice of forms holds for."""

    name: Name
    capability: Name
    """The instructions that torch's own kernels use, such as AVX512."""
    features: Name
    """The first digits of a SHA-256 of all that the processor has and that libraries are told to use."""
    threads: Annotated[int, msgspec.Meta(gt=0)]
    torch_version: Name
    kernels: Name
    """The first digits of a SHA-256 of the kernels' sources."""


@dataclass(frozen=True)
class Choice:
    """The form of an operator that was fastest for a class of shapes."""

    operator: Name
    shape_class: Annotated[tuple[Name | int, ...], msgspec.Meta(max_length=32)]
    form: Name
    default: Name
    """The form that the others were compared with, and that stays where none is surely faster."""
    default_seconds: Positive
    ratios: Annotated[dict[Name, Positive], msgspec.Meta(max_length=32)]
    """The seconds of each form over those of the default, medians of pairs that were timed in turns."""
    disturbed: bool = False
    """True if other processes used the processor meanwhile."""


@dataclass(frozen=True)
class FormTable:
    """All choices for one processor."""

    processor: Processor
    choices: Annotated[list[Choice], msgspec.Meta(max_length=MOST_CHOICES)]


_pinned: dict[str, str] = {}


def fastest_form(operator: str, shape_class: ShapeClass, default: str) -> str:
    """The form that an operator computes a class of shapes in: the pinned one, the kept choice, or the default."""
    if _pinned and operator in _pinned:
        return _pinned[operator]
    stored = _forms(torch.get_num_threads()).get((operator, shape_class))
    return default if stored is None else stored


def known_form(operator: str, shape_class: ShapeClass) -> str | None:
    """The pinned form or the stored choice; None where there is neither."""
    return fastest_form(operator, shape_class, "") or None


@contextmanager
def pinned_forms(forms: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, each of these operators has that form for all shapes."""
    before = dict(_pinned)
    _pinned.update(forms)
    try:
        yield
    finally:
        _pinned.clear()
        _pinned.update(before)


def are_measured() -> bool:
    """True if forms are chosen by timing. Raises NapkinError for another value of NAPKIN_FORMS than it can have."""
    value = os.environ.get(SWITCH, "measured")
    if value not in ("measured", "default"):
        raise NapkinError(f"the environment variable {SWITCH} is '{value}': use measured or default, or unset it")
    return value == "measured"


def this_processor() -> Processor:
    """The processor and the libraries of this process, with as many threads as torch has now."""
    return _processor(torch.get_num_threads())


def kept_choices() -> list[Choice]:
    """The stored choices for this processor."""
    processor = this_processor()
    stored = read_cached(cache_path(KIND, processor), FormTable)
    return stored.choices if stored is not None and stored.processor == processor else []


def keep_choices(choices: Sequence[Choice]) -> Path:
    """Use choices in this process, and store them for this processor, replacing older ones of the same classes; returns
    the file.

    Raises OSError or NapkinError where it cannot be written; the choices are used all the same.
    """
    _forms(torch.get_num_threads()).update(_by_class(choices))
    merged = {(each.operator, each.shape_class): each for each in (*kept_choices(), *choices)}
    processor = this_processor()
    path = cache_path(KIND, processor)
    write_cached(path, FormTable(processor, list(merged.values())[-MOST_CHOICES:]))
    return path


def forget_choices() -> None:
    """Forget what was chosen for this processor: it is timed again when it is asked for."""
    cache_path(KIND, this_processor()).unlink(missing_ok=True)
    _forms.cache_clear()


@functools.cache
def _forms(threads: int) -> dict[tuple[str, ShapeClass], str]:
    """The form of each operator and class for torch's current number of threads: those that were stored when the first
    was asked for, and those that this process chose."""
    return _by_class(kept_choices()) if are_measured() else {}


def _by_class(choices: Sequence[Choice]) -> dict[tuple[str, ShapeClass], str]:
    return {(each.operator, each.shape_class): each.form for each in choices}


@functools.cache
def _processor(threads: int) -> Processor:
    described = processor_name_and_features()
    limits = [os.environ.get(name, "") for name in LIMITS_OF_LIBRARIES]
    return Processor(
        name=cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        features=hashlib.sha256("\n".join([described, *limits]).encode()).hexdigest()[:16],
        threads=threads,
        torch_version=str(torch.__version__),
        kernels=_kernels_version(),
    )


@functools.cache
def _kernels_version() -> str:
    """A digest of the sources of all kernels for a CPU."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        if not file.name.startswith("triton_"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
