"""Triton's launches on tensors in the host's memory, run as what its compiler makes of them for an NVIDIA GPU."""

# pyright: reportMissingImports=false

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from napkin.kernels import operators
from oracles.ptx.machine import Machine
from oracles.ptx.memory import Clock, GlobalMemory
from oracles.ptx.program import parse


@dataclass(frozen=True)
class Executed:
    """A launch that has run."""

    kernel: str
    blocks: int
    threads: int
    instructions: int
    """Executed, each counted once for all threads that are at it together."""
    ptx: str


class _Driver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def executing_ptx(
    capability: int = 80, altered: Callable[[str], str] = lambda ptx: ptx, reachable: Sequence[Tensor] = ()
) -> Iterator[list[Executed]]:
    """While it lasts, napkin's operators take their Triton forms for any tensor, and a launch is compiled for that
    compute capability (80 is 8.0) and run here, after `altered` has changed its PTX. `reachable` are tensors
    whose addresses stand in tensors. Yields what has run."""
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction

    executed: list[Executed] = []
    compile_ = JITFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        kernel = compile_(function, *args, grid=grid, warmup=True, **settings)
        given = dict(zip(function.arg_names, args, strict=False))
        kinds = kernel.src.signature
        passed = [(kind, given[name]) for name, kind in kinds.items() if kind != "constexpr"]
        ptx = altered(kernel.asm["ptx"])
        executed.append(launch(ptx, tuple(grid), passed, kernel.metadata.shared, reachable))

    def without_assembly(*args: Any) -> tuple[str, str] | None:
        """The PTX is all that is wanted of the compiler."""
        if not args:
            return ("ptx", "ptx")
        args[1]["cubin"] = lambda _source, _metadata: b""
        return None

    triton.runtime.driver.set_active(_Driver(capability))
    try:
        with (
            patch.object(JITFunction, "run", run),
            patch.object(knobs.compilation, "disable_line_info", True),
            patch.object(knobs.runtime, "add_stages_inspection_hook", without_assembly),
            patch.object(operators, "runs_triton", lambda tensor: tensor.dtype in operators.DTYPES),
        ):
            yield executed
    finally:
        if torch.cuda.is_available():
            triton.runtime.driver.reset_active()


def launch(
    ptx: str,
    grid: tuple[int, ...],
    passed: list[tuple[str, Any]],
    shared_bytes: int,
    reachable: Sequence[Tensor] = (),
) -> Executed:
    """Run a kernel on arguments, each with its type as Triton names it."""
    program = parse(ptx)
    columns, rows, layers = (*grid, 1, 1)[:3]
    blocks = columns * rows * layers
    clock = Clock(blocks, program.threads)
    memory = GlobalMemory([*(each for _, each in passed if isinstance(each, Tensor)), *reachable], clock)
    # Triton adds two pointers to scratch memory, which these kernels do not use.
    words = [_word(kind, each, memory) for kind, each in passed]
    words += [0] * (len(program.parameters) - len(words))
    arguments = dict(zip(program.parameters, words, strict=True))
    machine = Machine(program, (columns, rows, layers), arguments, memory, shared_bytes, clock)
    machine.run()
    return Executed(program.name, blocks, program.threads, machine.executed, ptx)


def _word(kind: str, argument: Any, memory: GlobalMemory) -> int:
    """An argument's bits."""
    if isinstance(argument, Tensor):
        return memory.address(argument)
    if kind == "fp32":
        return struct.unpack("<I", struct.pack("<f", argument))[0]
    return int(argument) & 2**64 - 1
