"""Kernels of Triton's that a model calls itself, under torch.compile: named, and their results in the bytes."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import napkin
from peers import peer

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)
"""


@torch.library.custom_op("napkin_tests::opaque_sum", mutates_args=())
def opaque_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@opaque_sum.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


opaque_sum.register_autograd(lambda _, gradient: (gradient, gradient))


class Adds(nn.Module):
    """Adds what two layers make, which the backward pass needs as well: it must not be copied."""

    added: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.added(self.one(x).tanh(), self.other(x).tanh())).sum()


@pytest.mark.peers
def test_a_triton_kernel_is_named_and_takes_the_bytes_of_the_operator_that_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels of Triton's interpreter cannot be wrapped: run it without TRITON_INTERPRET")
    (tmp_path / "napkin_test_kernel.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = importlib.import_module("napkin_test_kernel").add_kernel

    def launch(x: Tensor, y: Tensor) -> Tensor:
        out, n = torch.empty_like(x), x.numel()
        torch.library.wrap_triton(kernel)[((n + 1023) // 1024,)](x, y, out, n, BLOCK=1024)
        return out

    triton_sum: Any = torch.library.triton_op("napkin_tests::triton_sum", launch, mutates_args={})
    triton_sum.register_autograd(lambda _, gradient: (gradient, gradient))
    batch = (torch.zeros(256, 64),)
    ledgers = []
    for name, added in (("Ours", triton_sum), ("Plain", opaque_sum)):
        module: Any = torch.compile(type(name, (Adds,), {"added": staticmethod(added)})())
        ledgers.append(napkin.count(module, batch, target="cuda"))
    ours, plain = ledgers
    assert ours.unknown_operators == {"add_kernel": 1}
    (row,) = [row for row in ours.rows if row.operator == "add_kernel"]
    assert (row.flops, row.bytes_written, row.phase) == (0, batch[0].nbytes, "forward")
    assert ours.flops == plain.flops
    assert sum(row.bytes_allocated for row in ours.rows) == sum(row.bytes_allocated for row in plain.rows)
    assert ours.peak_bytes == plain.peak_bytes
