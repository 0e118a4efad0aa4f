"""Triton's kernels compiled ahead of time for A100, H100 and B200, without a GPU: registers, spills, occupancy, plan.

    pip install 'napkin-lm[triton]'
    python benchmarks/cubins.py
    python benchmarks/cubins.py --only attention --show

Each launch of a kernel is caught and compiled for sm_80, sm_90 and sm_100; registers and spilled bytes per thread are
what cuobjdump, a part of Triton, reads in the cubin. Occupancy is the share of a multiprocessor's warps that can be
resident, by registers, shared memory and blocks. Planned microseconds are those of the roofline: the larger of FLOPs
over the datasheet's peak and bytes over its bandwidth, every tensor read or written once, or both. On a machine with
one of these GPUs the kernels also run, and the last column is their median. The exit status is 1 if a kernel spills.
"""

# pyright: reportMissingImports=false

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from napkin.hardware.accelerators import find_device
from napkin.kernels.triton import (
    attention_backward,
    attention_forward,
    cross_entropy,
    elementwise,
    grouped_products,
    norms,
)
from result_files import write_result

DEVICES = {80: "A100-SXM-80GB", 90: "H100-SXM-80GB", 100: "B200"}
BATCH, LENGTH, HEADS, KV_HEADS = 4, 2048, 16, 4
WIDTH, VOCAB_SIZE = 4096, 50304
WINDOW = 512
EXPERTS, D_EXPERT = 16, 1024
TOKENS = BATCH * LENGTH


@dataclass(frozen=True)
class Multiprocessor:
    """CUDA C++ Programming Guide 13.0, table "Technical Specifications per Compute Capability"."""

    registers: int
    shared_bytes: int
    warps: int
    blocks: int


MULTIPROCESSORS = {
    80: Multiprocessor(65536, 164 * 1024, 64, 32),
    90: Multiprocessor(65536, 228 * 1024, 64, 32),
    100: Multiprocessor(65536, 228 * 1024, 64, 32),
}
REWRITTEN = {"adamw_kernel": (0, 2, 3), "cross_entropy_kernel": (0,)}
"""Which tensors a kernel reads and writes, by place among them."""
RESERVED_BYTES = 1024
"""Shared memory that the driver takes of each block, from sm_80 on (the same guide)."""
REGISTER_UNIT = 256
"""Registers are allocated to warps in units of so many (CUDA occupancy calculator)."""


@dataclass(frozen=True)
class Launch:
    """One launch, caught."""

    kernel: Any
    tensors: list[Tensor]
    seconds: float | None
    """Measured, on a machine with that GPU."""


def main() -> int:
    """Compile, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--show", action="store_true", help="print only, keep no file")
    options = parser.parse_args()
    lines = [
        f"# Triton {triton.__version__} kernels compiled ahead: {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"{BATCH} × {LENGTH} tokens; attention of {HEADS} query and {KV_HEADS} key heads; rows of {WIDTH}; "
        f"vocabulary {VOCAB_SIZE}; {EXPERTS} experts of {D_EXPERT}. Spilled bytes are per thread.",
        "",
        "| case | kernel | for | registers | shared KiB | spilled | occupancy | planned µs | measured µs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    spills = False
    for case, (run, flops) in cases().items():
        if options.only not in case:
            continue
        for architecture in DEVICES:
            for name, launch in caught(run, architecture).items():
                registers, spilled = resources(launch.kernel)
                spills |= spilled > 0
                lines.append(line(case, name, architecture, launch, registers, spilled, flops.get(name, 0)))
                print(lines[-1], flush=True)
    if not options.show:
        write_result("cubins", lines)
    return int(spills)


def cases() -> dict[str, tuple[Callable[[str], object], dict[str, int]]]:
    """What to launch on a device, and the FLOPs of its products, by kernel."""
    made: dict[str, tuple[Callable[[str], object], dict[str, int]]] = {}
    for dtype, head_dims in ((torch.bfloat16, (64, 128, 256)), (torch.float32, (64, 128))):
        for head_dim in head_dims:
            for bounded in (False, True):
                # Products over the pairs that mask and window leave: each query sees its own key and those before.
                seen = WINDOW if bounded else LENGTH
                pairs = seen * (seen + 1) // 2 + (LENGTH - seen) * seen
                product = 2 * BATCH * HEADS * pairs * head_dim
                flops = {"attend_kernel": 2 * product, "key_gradient_kernel": 4 * product}
                flops["query_gradient_kernel"] = 3 * product
                name = f"attention d {head_dim} {str(dtype)[6:]}{' documents, window, soft cap' if bounded else ''}"
                made[name] = (attention(head_dim, dtype, bounded=bounded), flops)
    made["norms bf16"] = (run_norms, {})
    made["elementwise bf16"] = (run_elementwise, {})
    made["cross-entropy bf16"] = (run_cross_entropy, {})
    product = 2 * TOKENS * WIDTH * D_EXPERT
    made["grouped products bf16"] = (run_grouped, {"matmul_kernel": product, "outer_kernel": product})
    return made


def attention(head_dim: int, dtype: torch.dtype, *, bounded: bool) -> Callable[[str], object]:
    """Forward and backward pass."""

    def run(device: str) -> None:
        def heads(n: int) -> Tensor:
            return torch.zeros(BATCH, LENGTH, n, head_dim, dtype=dtype, device=device).transpose(1, 2)

        query, key = heads(HEADS), heads(KV_HEADS)
        bounds = torch.zeros(2, BATCH, LENGTH, dtype=torch.int32, device=device) if bounded else None
        softcap, window = (30.0, WINDOW) if bounded else (0.0, 0)
        settings = (head_dim**-0.5, softcap, window, True, 0)
        mixed, logsumexp = attention_forward.attend(query, key, key, bounds, *settings)
        attention_backward.attend_backward(query, query, key, key, bounds, mixed, logsumexp, *settings)

    return run


def run_norms(device: str) -> None:
    """RMSNorm and its gradient, with a residual."""
    x, gain = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device=device), torch.ones(WIDTH, device=device)
    _, summed, statistics = norms.norm(x, x, gain, None, 1e-5, False, None)
    norms.norm_backward(x, x, summed, gain, statistics, False, False, None)


def run_elementwise(device: str) -> None:
    """Gates forward, rotation, AdamW with a copy."""
    x = torch.zeros(TOKENS, 2 * WIDTH, dtype=torch.bfloat16, device=device)
    elementwise.swiglu(x)
    elementwise.gelu_tanh(x)
    heads = torch.zeros(BATCH, LENGTH, HEADS + KV_HEADS, 128, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, LENGTH, 128, device=device)
    elementwise.rotate(heads, table, table, False, False)
    parameter, gradient, average, square = (torch.zeros(WIDTH, WIDTH, device=device) for _ in range(4))
    copy = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
    elementwise.adamw(parameter, gradient, average, square, copy, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)


def run_cross_entropy(device: str) -> None:
    """Of one chunk."""
    logits = torch.zeros(1024, VOCAB_SIZE, dtype=torch.bfloat16, device=device)
    targets = torch.zeros(1024, dtype=torch.int64, device=device)
    cross_entropy.cross_entropy_in_place(logits, targets, -1, 0.0, 0.0, True)


def run_grouped(device: str) -> None:
    """The rows of all tokens among experts, and the gradient of their matrices."""
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(EXPERTS, D_EXPERT, WIDTH, dtype=torch.bfloat16, device=device)
    starts = torch.arange(0, TOKENS, TOKENS // EXPERTS, device=device)
    grouped_products.grouped_outer(grouped_products.grouped_matmul(x, weight, starts), x, starts)


def caught(run: Callable[[str], object], architecture: int) -> dict[str, Launch]:
    """The kernels that `run` launches, compiled for that architecture, by name."""
    launches: dict[str, Launch] = {}
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() == divmod(architecture, 10)
    launch = JITFunction.run

    def catch(function: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        kernel = launch(function, *args, grid=grid, warmup=True, **settings)
        seconds = None
        if here:
            from triton.testing import do_bench

            def again() -> None:
                launch(function, *args, grid=grid, warmup=False, **settings)

            seconds = do_bench(again, return_mode="median") / 1e3
        tensors = [each for each in args if isinstance(each, Tensor)]
        launches[function.__name__] = Launch(kernel, tensors, seconds)

    JITFunction.run = catch
    try:
        with compiling_for(None if here else architecture):
            run("cuda" if here else "meta")
    finally:
        JITFunction.run = launch
    return launches


@contextmanager
def compiling_for(architecture: int | None) -> Iterator[None]:
    """While it lasts, Triton compiles for that architecture; None is the GPU that is here."""
    if architecture is not None:
        triton.runtime.driver.set_active(Offline(architecture))
    try:
        yield
    finally:
        if architecture is not None and torch.cuda.is_available():
            triton.runtime.driver.reset_active()


class Offline:
    """What Triton asks a driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where they are spilled."""
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(found["REG"]), int(found["STACK"])


def line(case: str, name: str, architecture: int, launch: Launch, registers: int, spilled: int, flops: int) -> str:
    """One row of the table."""
    device = find_device(DEVICES[architecture])
    dtype = "bf16" if any(each.dtype == torch.bfloat16 for each in launch.tensors) else "fp32"
    distinct = {(id(each) if each.is_meta else each.data_ptr()): each.nbytes for each in launch.tensors}
    moved = sum(distinct.values()) + sum(launch.tensors[place].nbytes for place in REWRITTEN.get(name, ()))
    seconds = max(flops / device.peaks[dtype], moved / device.memory_bandwidth)
    measured = "–" if launch.seconds is None else f"{launch.seconds * 1e6:.0f}"
    shared, warps = launch.kernel.metadata.shared, launch.kernel.metadata.num_warps
    share = occupancy(MULTIPROCESSORS[architecture], registers, shared, warps)
    kernel = name.removesuffix("_kernel")
    return (
        f"| {case} | {kernel} | sm_{architecture} | {registers} | {shared / 1024:.0f} | {spilled} | "
        f"{share:.0%} | {seconds * 1e6:.0f} | {measured} |"
    )


def occupancy(on: Multiprocessor, registers: int, shared: int, warps: int) -> float:
    """Resident warps over the most that a multiprocessor holds."""
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    blocks = min(
        on.blocks, on.warps // warps, on.registers // (of_warp * warps), on.shared_bytes // (shared + RESERVED_BYTES)
    )
    return blocks * warps / on.warps


if __name__ == "__main__":
    sys.exit(main())
