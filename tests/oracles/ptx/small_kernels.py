"""Kernels of a few lines, to test the oracle itself."""

from collections.abc import Sequence


def kernel(lines: Sequence[str], *, pointers: int = 0, threads: int = 32) -> str:
    """A kernel of these instructions, whose parameters tested_0, tested_1, … are pointers."""
    parameters = ",\n".join(f".param .u64 .ptr .global .align 1 tested_{n}" for n in range(pointers))
    registers = ".reg .pred %p<8>; .reg .b16 %rs<64>; .reg .b32 %r<64>; .reg .b64 %rd<64>;"
    body = "\n".join((*lines, "ret;"))
    return f".visible .entry tested(\n{parameters}\n)\n.reqntid {threads}\n{{\n{registers}\n{body}\n}}\n"
