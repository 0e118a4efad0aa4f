"""Triton's kernels compiled ahead of time for data centres' GPUs, cards of sm_86, sm_89 and sm_120, and MI300X, without
a GPU: registers, spills, shared memory, occupancy.

    pip install 'napkin-lm[triton]'
    python benchmarks/cubins.py
    python benchmarks/cubins.py --only attention --for sm_86 sm_120 --show

Each launch of a kernel is caught and compiled for each of them, by ROCm's backend for gfx942. Registers
and spilled bytes per thread are what cuobjdump, a part of Triton, reads in the cubin, and what the code object for
gfx942 says. Occupancy is the share of a multiprocessor's warps that can be resident, by registers, shared memory and
blocks; none means that a block does not fit. Planned microseconds are those of the roofline: the larger of FLOPs over
the datasheet's peak and bytes over its bandwidth, every tensor read or written once, or both. On a machine with one of
these GPUs the kernels also run, and the last column is their median. The exit status is 1 if a kernel spills for
NVIDIA, whose tiles are the defaults, or has more shared memory than a block may.
"""

# pyright: reportMissingImports=false

import argparse
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from result_files import heading, needs, write_result

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction
except ImportError:
    needs(__doc__, "triton")

from napkin.hardware.device_file import find_device
from napkin.kernels.attention import triton_decode, triton_flash
from napkin.kernels.decoding import triton_block_step
from napkin.kernels.loss import triton_cross_entropy
from napkin.kernels.norms import triton_norms
from napkin.kernels.pointwise import triton_adamw, triton_pointwise
from napkin.kernels.products import triton_fp8, triton_grouped, triton_quantized
from napkin.kernels.triton_tiles import compiled_for

BATCH, LENGTH, HEADS, KV_HEADS = 4, 2048, 16, 4
WIDTH, VOCAB_SIZE = 4096, 50304
WINDOW = 512
EXPERTS, D_EXPERT = 16, 1024
TOKENS = BATCH * LENGTH


@dataclass(frozen=True)
class Processor:
    """A GPU: its name in the catalogue, what Triton compiles for, and what its multiprocessors hold."""

    device: str
    target: GPUTarget
    registers: int
    """Of 32 bits."""
    register_unit: int
    """Registers are allocated to warps in units of so many."""
    shared_bytes: int
    reserved_bytes: int
    """Of shared memory, which the driver takes of each block."""
    warps: int
    blocks: int


def _nvidia(device: str, capability: int, shared_kib: int, *, warps: int = 64, blocks: int = 32) -> Processor:
    """CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability"; CUDA occupancy calculator."""
    return Processor(
        device,
        GPUTarget("cuda", capability, 32),
        registers=65536,
        register_unit=256,
        shared_bytes=shared_kib * 1024,
        reserved_bytes=1024,
        warps=warps,
        blocks=blocks,
    )


PROCESSORS = {
    "sm_80": _nvidia("A100-SXM-80GB", 80, 164),
    "sm_86": _nvidia("RTX-3090", 86, 100, warps=48, blocks=16),
    "sm_89": _nvidia("RTX-4090", 89, 100, warps=48, blocks=24),
    "sm_90": _nvidia("H100-SXM-80GB", 90, 228),
    "sm_100": _nvidia("B200", 100, 228),
    "sm_120": _nvidia("RTX-5090", 120, 100, warps=48, blocks=24),
    # LLVM's user guide for AMDGPU, gfx90a and later: 4 × 512 registers for each of 64 lanes, allocated by 8; at most 8
    # wavefronts on each of 4 units; 64 KiB of shared memory.
    "gfx942": Processor("MI300X", GPUTarget("hip", "gfx942", 64), 4 * 512 * 64, 8 * 64, 64 * 1024, 0, 32, 32),
}
E4M3 = ("sm_89", "sm_90", "sm_100", "sm_120")
"""The architectures that convert numbers to e4m3; MI300X has another format of that name."""
REWRITTEN = {"cross_entropy": (0,)}
"""Which tensors a kernel reads and writes, by place among them."""
FOUND_BY_ADDRESS = {"adamw": (4 * 4 + 3 * 4 + 2) * WIDTH**2}
"""Bytes that a kernel moves of tensors whose addresses stand in a table: AdamW reads four numbers of fp32 and writes
three, and one of 2 bytes."""


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
    parser.add_argument("--for", nargs="+", default=list(PROCESSORS), choices=PROCESSORS, dest="architectures")
    parser.add_argument("--show", action="store_true", help="print only, keep no file")
    options = parser.parse_args()
    lines = [
        *heading(
            "Triton's kernels compiled ahead",
            f"{BATCH} × {LENGTH} tokens; attention of {HEADS} query and {KV_HEADS} key heads; rows of {WIDTH}; "
            f"vocabulary {VOCAB_SIZE}; {EXPERTS} experts of {D_EXPERT}. Spilled bytes are per thread.",
            packages=["triton"],
        ),
        "| case | kernel | for | registers | shared KiB | spilled | occupancy | planned µs | measured µs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    spills = exceeds = False
    for case, (run, flops) in cases().items():
        if options.only not in case:
            continue
        for architecture in options.architectures:
            processor = PROCESSORS[architecture]
            if case.startswith("fp8") and architecture not in E4M3:
                continue
            for name, launch in caught(run, architecture).items():
                registers, spilled = resources(launch.kernel)
                exceeds |= launch.kernel.metadata.shared > processor.shared_bytes - processor.reserved_bytes
                spills |= spilled > 0 and processor.target.backend == "cuda"
                lines.append(line(case, name, architecture, launch, registers, spilled, flops.get(name, 0)))
                print(lines[-1], flush=True)
    if not options.show:
        write_result("cubins", lines)
    return int(spills or exceeds)


def cases() -> dict[str, tuple[Callable[[str], object], dict[str, int]]]:
    """What to launch on a device, and the FLOPs of its products, by kernel."""
    made: dict[str, tuple[Callable[[str], object], dict[str, int]]] = {}
    for dtype, head_dims in ((torch.bfloat16, (64, 128, 256)), (torch.float16, (128,)), (torch.float32, (64, 128))):
        for head_dim in head_dims:
            for bounded in (False, True):
                # Products over the pairs that mask and window leave: each query sees its own key and those before.
                seen = WINDOW if bounded else LENGTH
                pairs = seen * (seen + 1) // 2 + (LENGTH - seen) * seen
                product = 2 * BATCH * HEADS * pairs * head_dim
                flops = {"attend": 2 * product, "key_gradient": 4 * product, "query_gradient": 3 * product}
                name = f"attention d {head_dim} {short(dtype)}{' documents, window, soft cap' if bounded else ''}"
                made[name] = (attention(head_dim, dtype, bounded=bounded), flops)
    for head_dim in (64, 128, 256):
        for kv in ("bf16", "int8"):
            for window in (0, WINDOW + 1):
                name = f"decode d {head_dim} {kv}{' window' if window else ''}"
                made[name] = (functools.partial(run_decode, head_dim, kv, window), {})
    for head_dim, dtype, normed, int8 in (
        (128, torch.bfloat16, False, False),
        (128, torch.bfloat16, True, True),
        (256, torch.bfloat16, True, False),
        (64, torch.float16, False, False),
        (128, torch.float32, False, False),
        (128, torch.float32, True, True),
    ):
        for vectors in (1, 32):
            name = f"block step {vectors} d {head_dim} {short(dtype)}{', head norms, int8' if int8 else ''}"
            run = functools.partial(run_block_step, vectors, head_dim, dtype, normed=normed, int8=int8)
            made[name + (", head norms" if normed and not int8 else "")] = (run, {})
    for bits in (8, 4):
        for vectors in (1, 64):
            made[f"int{bits} product {vectors}"] = (functools.partial(run_quantized, bits, vectors), {})
    for dtype in (torch.bfloat16, torch.float32):
        made[f"fp8 rounding of {short(dtype)}"] = (functools.partial(run_fp8, dtype), {})
    for dtype in (torch.bfloat16, torch.float16):
        made[f"norms {short(dtype)}"] = (functools.partial(run_norms, dtype), {})
        made[f"elementwise {short(dtype)}"] = (functools.partial(run_elementwise, dtype), {})
        made[f"cross-entropy {short(dtype)}"] = (functools.partial(run_cross_entropy, dtype), {})
        product = 2 * TOKENS * WIDTH * D_EXPERT
        flops = {"matmul": product, "outer": product}
        made[f"grouped products {short(dtype)}"] = (functools.partial(run_grouped, dtype), flops)
    return made


def short(dtype: torch.dtype) -> Literal["bf16", "fp16", "fp32"]:
    """As the catalogue names it."""
    return "bf16" if dtype == torch.bfloat16 else "fp16" if dtype == torch.float16 else "fp32"


def attention(head_dim: int, dtype: torch.dtype, *, bounded: bool) -> Callable[[str], object]:
    """Forward and backward pass."""

    def run(device: str) -> None:
        def heads(n: int) -> Tensor:
            return torch.zeros(BATCH, LENGTH, n, head_dim, dtype=dtype, device=device).transpose(1, 2)

        query, key = heads(HEADS), heads(KV_HEADS)
        bounds = torch.zeros(2, BATCH, LENGTH, dtype=torch.int32, device=device) if bounded else None
        softcap, window = (30.0, WINDOW) if bounded else (0.0, 0)
        settings = (head_dim**-0.5, softcap, window, True, 0)
        mixed, logsumexp = triton_flash.attend(query, key, key, bounds, *settings)
        triton_flash.attend_backward(query, query, key, key, bounds, mixed, logsumexp, *settings)

    return run


def run_decode(head_dim: int, kv: str, window: int, device: str) -> None:
    """One new token of each sequence, keys and values in blocks of 16."""
    n_blocks = LENGTH // 16
    held = torch.bfloat16 if kv == "bf16" else torch.int8
    query = torch.zeros(BATCH, HEADS, 1, head_dim, dtype=torch.bfloat16, device=device)
    key = torch.zeros(BATCH * n_blocks, KV_HEADS, 16, head_dim, dtype=held, device=device)
    scales = torch.zeros(*key.shape[:-1], 1, dtype=torch.bfloat16, device=device) if kv == "int8" else None
    counts = torch.full((BATCH,), LENGTH, device=device)
    table = torch.zeros(BATCH, n_blocks, dtype=torch.int64, device=device)
    given = query, key, key, counts, table, LENGTH, scales, scales, head_dim**-0.5, 0.0
    triton_decode.attend_to_slots(*given, window)


def run_quantized(bits: int, vectors: int, device: str) -> None:
    """Vectors times a matrix of integers, in int4 with groups of 64."""
    x = torch.zeros(vectors, WIDTH, dtype=torch.bfloat16, device=device)
    if bits == 8:
        values, scales = torch.zeros(WIDTH, WIDTH, dtype=torch.int8, device=device), x.new_zeros(WIDTH)
        triton_quantized.quantized_product(x, values, scales, None)
    else:
        values = torch.zeros(WIDTH, WIDTH // 2, dtype=torch.uint8, device=device)
        scales = x.new_zeros(WIDTH, WIDTH // 64)
        triton_quantized.quantized_product(x, values, scales, scales)


def run_fp8(dtype: torch.dtype, device: str) -> None:
    """An input and a gradient of it."""
    for gradient in (False, True):
        triton_fp8.fp8_quantize(torch.zeros(TOKENS, WIDTH, dtype=dtype, device=device), gradient)


def run_block_step(vectors: int, head_dim: int, dtype: torch.dtype, device: str, *, normed: bool, int8: bool) -> None:
    """The launches of a block for one new token of some sequences; int8: of keys and values, and of weights."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def matrix(rows: int, columns: int) -> list[Tensor]:
        return [zeros(rows, columns, dtype=torch.int8), zeros(rows)] if int8 else [zeros(rows, columns)]

    x, gain = zeros(vectors, WIDTH), zeros(WIDTH)
    held = [zeros(64, KV_HEADS, 16, head_dim, dtype=torch.int8 if int8 else dtype) for _ in range(2)]
    scales = [zeros(64, KV_HEADS, 16, 1, dtype=torch.bfloat16) if int8 else None for _ in range(2)]
    angles = zeros(vectors, head_dim, dtype=torch.float32)
    places = zeros(vectors, dtype=torch.int64)
    of_head = zeros(head_dim) if normed else None
    norm = (None, 1.0, gain, None, 1e-5, False)
    triton_block_step.project_heads(
        x, matrix((HEADS + 2 * KV_HEADS) * head_dim, WIDTH), *norm, HEADS, of_head, of_head, 1e-5, angles, angles,
        False, places, places, *held, *scales,
    )  # fmt: skip
    triton_block_step.project_activation(x, matrix(2 * WIDTH, WIDTH), *norm, "silu", True)
    parts = zeros(vectors, HEADS, 8 if vectors == 1 else 1, head_dim, dtype=torch.float32)
    logsumexp = zeros(*parts.shape[:3], dtype=torch.float32)
    triton_block_step.add_product(parts, logsumexp, matrix(WIDTH, HEADS * head_dim), None, 1.0, x)


def run_norms(dtype: torch.dtype, device: str) -> None:
    """RMSNorm of an fp32 stream to which narrow numbers are added and from which they are read, and its gradient."""
    x, stream = torch.zeros(TOKENS, WIDTH, dtype=dtype, device=device), torch.zeros(TOKENS, WIDTH, device=device)
    gain = torch.ones(WIDTH, device=device)
    _, summed, statistics = triton_norms.norm(x, stream, gain, None, 1e-5, False, dtype)
    triton_norms.norm_backward(x, stream, summed, gain, statistics, False, False, dtype)


def run_elementwise(dtype: torch.dtype, device: str) -> None:
    """Gates and activations forward and backward, rotation, AdamW with a copy."""
    x = torch.zeros(TOKENS, 2 * WIDTH, dtype=dtype, device=device)
    triton_pointwise.swiglu_backward(triton_pointwise.swiglu(x), x)
    triton_pointwise.gelu_tanh_backward(triton_pointwise.gelu_tanh(x), x)
    heads = torch.zeros(BATCH, LENGTH, HEADS + KV_HEADS, 128, dtype=dtype, device=device)
    table = torch.zeros(1, LENGTH, 128, device=device)
    triton_pointwise.rotate(heads, table, table, False, False)
    parameter, gradient, average, square = (torch.zeros(WIDTH, WIDTH, device=device) for _ in range(4))
    copy = torch.zeros(WIDTH, WIDTH, dtype=dtype, device=device)
    factor = torch.ones((), device=device)
    triton_adamw.adamw([parameter], [gradient], [average], [square], [copy], factor, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)


def run_cross_entropy(dtype: torch.dtype, device: str) -> None:
    """Of one chunk."""
    logits = torch.zeros(1024, VOCAB_SIZE, dtype=dtype, device=device)
    targets = torch.zeros(1024, dtype=torch.int64, device=device)
    triton_cross_entropy.cross_entropy_in_place(logits, targets, -1, 0.0, 0.0, True)


def run_grouped(dtype: torch.dtype, device: str) -> None:
    """The rows of all tokens among experts, and the gradient of their matrices."""
    x = torch.zeros(TOKENS, WIDTH, dtype=dtype, device=device)
    weight = torch.zeros(EXPERTS, D_EXPERT, WIDTH, dtype=dtype, device=device)
    starts = torch.arange(0, TOKENS, TOKENS // EXPERTS, device=device)
    triton_grouped.grouped_outer(triton_grouped.grouped_matmul(x, weight, starts), x, starts)


def caught(run: Callable[[str], object], architecture: str) -> dict[str, Launch]:
    """The kernels that `run` launches, compiled for that architecture, by name."""
    launches: dict[str, Launch] = {}
    here = architecture == architecture_here()
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
        name = function.__name__.removesuffix("_kernel") + (" backward" if settings.get("BACKWARD") else "")
        launches[name] = Launch(kernel, tensors, seconds)

    JITFunction.run = catch
    try:
        # Kernels ask torch whether it is ROCm's.
        hip = "offline" if PROCESSORS[architecture].target.backend == "hip" else None
        capability = re.fullmatch(r"sm_(\d+)(\d)", architecture)
        token = compiled_for.set(capability and (int(capability[1]), int(capability[2])))
        with compiling_for(None if here else architecture), patch.object(torch.version, "hip", hip):
            run("cuda" if here else "meta")
        compiled_for.reset(token)
    finally:
        JITFunction.run = launch
    return launches


def architecture_here() -> str | None:
    """Of this machine's GPU."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


@contextmanager
def compiling_for(architecture: str | None) -> Iterator[None]:
    """While it lasts, Triton compiles for that architecture; None is the GPU that is here."""
    if architecture is not None:
        triton.runtime.driver.set_active(Offline(PROCESSORS[architecture].target))
    try:
        yield
    finally:
        if architecture is not None and torch.cuda.is_available():
            triton.runtime.driver.reset_active()


class Offline:
    """What Triton asks a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> object:
        return self.target.arch

    def get_current_stream(self, device: object) -> int:
        return 0


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where they are spilled."""
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", kernel.asm["amdgcn"]))
        return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(found["REG"]), int(found["STACK"])


def line(case: str, name: str, architecture: str, launch: Launch, registers: int, spilled: int, flops: int) -> str:
    """One row of the table."""
    processor = PROCESSORS[architecture]
    device = find_device(processor.device)
    narrow = (each.dtype for each in launch.tensors if each.dtype in (torch.bfloat16, torch.float16))
    dtype = short(next(narrow, torch.float32))
    distinct = {(id(each) if each.is_meta else each.data_ptr()): each.nbytes for each in launch.tensors}
    moved = sum(distinct.values()) + sum(launch.tensors[place].nbytes for place in REWRITTEN.get(name, ()))
    moved += FOUND_BY_ADDRESS.get(name, 0)
    seconds = max(flops / device.peaks[dtype], moved / device.memory_bandwidth)
    measured = "–" if launch.seconds is None else f"{launch.seconds * 1e6:.0f}"
    shared, warps = launch.kernel.metadata.shared, launch.kernel.metadata.num_warps
    share = occupancy(processor, registers, shared, warps)
    return (
        f"| {case} | {name} | {architecture} | {registers} | {shared / 1024:.0f} | {spilled} | "
        f"{f'{share:.0%}' if share else 'none'} | {seconds * 1e6:.0f} | {measured} |"
    )


def occupancy(on: Processor, registers: int, shared: int, warps: int) -> float:
    """Resident warps over the most that a multiprocessor holds."""
    of_warp = -(-registers * on.target.warp_size // on.register_unit) * on.register_unit
    by_shared = on.shared_bytes // (shared + on.reserved_bytes) if shared + on.reserved_bytes else on.blocks
    blocks = min(on.blocks, on.warps // warps, on.registers // max(of_warp * warps, 1), by_shared)
    return blocks * warps / on.warps


if __name__ == "__main__":
    sys.exit(main())
