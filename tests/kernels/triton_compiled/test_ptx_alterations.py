"""Compiled kernels in which one instruction is altered: the oracle refuses them, or their results are wrong."""

import re
from collections.abc import Callable

import pytest
import torch

from napkin.kernels.triton_tiles import AttentionTile, RowTile, forced
from oracles.ptx.launches import executing_ptx
from oracles.ptx.program import PtxError


class Altered:
    """A text in which one match of a pattern, counted from 0, is replaced."""

    def __init__(self, pattern: str, number: int, replacement: str) -> None:
        self.pattern, self.number, self.replacement = re.compile(pattern), number, replacement

    def __call__(self, ptx: str) -> str:
        found = list(self.pattern.finditer(ptx))[self.number]
        return ptx[: found.start()] + found.expand(self.replacement) + ptx[found.end() :]


def run_norm(altered: Callable[[str], str]) -> None:
    """RMSNorm of rows that four warps share, with a residual in fp32."""
    from napkin.kernels.norms.triton_norms import norm

    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(3, 500, generator=generator) for _ in range(2))
    gain = torch.randn(500, generator=generator)
    with executing_ptx(80, altered), forced("norm", RowTile(4)):
        found, summed, _ = norm(x.bfloat16(), residual, gain, None, 1e-5, False, torch.bfloat16)
    expected = x.bfloat16().float() + residual
    torch.testing.assert_close(summed, expected, rtol=0, atol=0)
    expected *= torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-5) * gain
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def run_attention(capability: int, altered: Callable[[str], str]) -> None:
    """48 queries and 40 keys, which are read in two whole blocks and a part of one."""
    from napkin.kernels.attention.triton_flash import attend

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 32, generator=generator).bfloat16() for n in (48, 40, 40))
    with executing_ptx(capability, altered), forced("attention forward", AttentionTile(64, 16, 4, 2)):
        found, logsumexp = attend(query, key, value, None, 32**-0.5, 0.0, 0, False, 0)
    scores = query.double() @ key.double().mT * 32**-0.5
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ value.double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_each_barrier_of_a_norm_separates_threads_that_would_race() -> None:
    barriers: list[str] = []

    def count(ptx: str) -> str:
        barriers.extend(re.findall(r"bar\.sync\s+0;", ptx))
        return ptx

    run_norm(count)
    assert len(barriers) >= 3
    for number in range(len(barriers)):
        with pytest.raises(PtxError, match="race"):
            run_norm(Altered(r"bar\.sync\s+0;", number, ""))


SHIFTED = r"\1+16]"


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"mul\.f32 (\s*%r\d+), (%r\d+), (%r\d+);", r"mul.f32 \1, \2, \2;"),
        (r"(ld\.shared[^\[]*\[%r\d+)\]", SHIFTED),
        (r"shfl\.sync\.bfly\.b32([^,]+, [^,]+), 16,", r"shfl.sync.bfly.b32\1, 8,"),
        (r"setp\.eq\.b32([^,]+), ([^,]+), 0;", r"setp.eq.b32\1, \2, 1;"),
    ],
    ids=["a factor", "an address", "a lane", "a predicate"],
)
def test_an_altered_norm_is_found(pattern: str, replacement: str) -> None:
    # Where threads hold copies of a sum, the store of another thread writes the same: the last alteration is none.
    if "setp" in pattern:
        run_norm(Altered(pattern, -1, replacement))
        return
    with pytest.raises((AssertionError, PtxError)):
        run_norm(Altered(pattern, -1 if "mul" in pattern else 0, replacement))


@pytest.mark.parametrize(
    ("capability", "pattern", "number", "replacement", "message"),
    [
        (80, r"bar\.sync\s+0;", 1, "", "race"),
        (80, r"cp\.async\.wait_group\s+\d+;", 0, "", "an asynchronous copy is on its way"),
        (80, r"cp\.async\.commit_group;", 1, "", "an asynchronous copy is on its way"),
        (80, r"sub\.f32\s+(%r\d+), (%r\d+), (%r\d+);", 0, r"sub.f32 \1, \3, \2;", None),
        (80, r"(ldmatrix[^\[]*\[%r\d+)\]", 0, SHIFTED, None),
        (80, r"(mma\.sync[^}]*}, {[^}]*}, ){ (%r\d+), (%r\d+) }", 0, r"\1{ \3, \2 }", None),
        (90, r"cp\.async\.wait_group\s+\d+;", 0, "", "an asynchronous copy is on its way"),
        (90, r"fence\.proxy\.async[^;]*;", 1, "", "without a fence"),
        (90, r"wgmma\.wait_group[^;]*;", 0, "", "the result of a product that has not been waited for"),
        (90, r"(wgmma\.mma_async[^}]*}, %rd\d+, %rd\d+, 0, 1, 1, 0, )0;", 0, r"\g<1>1;", None),
    ],
)
def test_an_altered_attention_is_found(
    capability: int, pattern: str, number: int, replacement: str, message: str | None
) -> None:
    altered = Altered(pattern, number, replacement)
    if message is None:
        with pytest.raises((AssertionError, PtxError)):
            run_attention(capability, altered)
    else:
        with pytest.raises(PtxError, match=message):
            run_attention(capability, altered)


@pytest.mark.parametrize("capability", [80, 90])
def test_attention_is_right_where_nothing_is_altered(capability: int) -> None:
    run_attention(capability, lambda ptx: ptx)
