"""Single instructions of the PTX oracle against closed forms: Python's integers, torch's casts, libm's fma, fp64."""

import ctypes
import ctypes.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.ptx.launches import launch
from oracles.ptx.small_kernels import kernel

LANES = 32


def computed(instruction: str, *inputs: Tensor, result: torch.dtype) -> Tensor:
    """The numbers d of an instruction of operands a, b and c, of which each thread has one."""
    found = torch.zeros(LANES, dtype=result)
    lines: list[str] = []
    for place, tensor in enumerate((*inputs, found)):
        size = tensor.element_size()
        lines += [f"ld.param.b64 %rd{place}, [tested_{place}];", f"mad.wide.u32 %rd{place}, %r0, {size}, %rd{place};"]
    letters = {2: "%rs", 4: "%r", 8: "%rd"}
    names = dict(zip("abc", (f"{letters[each.element_size()]}{10 + n}" for n, each in enumerate(inputs)), strict=False))
    for place, (tensor, name) in enumerate(zip(inputs, names.values(), strict=True)):
        lines.append(f"ld.global.b{8 * tensor.element_size()} {name}, [%rd{place}];")
    names["d"] = f"{letters[result.itemsize]}20"
    opcode, _, operands = instruction.partition(" ")
    lines.append(f"{opcode} {', '.join(names.get(each.strip(), each.strip()) for each in operands.split(','))};")
    lines.append(f"st.global.b{8 * result.itemsize} [%rd{len(inputs)}], {{ {names['d']} }};")
    passed = [("pointer", each) for each in (*inputs, found)]
    launch(kernel(["mov.u32 %r0, %tid.x;", *lines], pointers=len(passed)), (1,), passed, 0)
    return found


def floats(seed: int, spread: float = 4.0) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LANES, generator=generator) * 2 ** (spread * torch.randn(LANES, generator=generator))


def integers(seed: int, bits: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    dtype = torch.int32 if bits <= 32 else torch.int64
    numbers = torch.randint(low, high, (LANES,), generator=generator, dtype=torch.int64) if bits < 64 else None
    if numbers is None:
        numbers = torch.randint(-(2**62), 2**62, (LANES,), generator=generator)
    numbers[:3] = torch.tensor([0, -1, low])
    return numbers.to(dtype)


def signed(number: int, bits: int) -> int:
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


HALFWAY = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80000000, 0x7F800000, 0x00018000])
"""Bits of fp32: two ties of bf16 and what is beside one, the largest, the smallest, -0, ∞, a subnormal tie."""


def hard_floats() -> Tensor:
    numbers = floats(0)
    numbers[: len(HALFWAY)] = HALFWAY.to(torch.int32).view(torch.float32)
    numbers[8:16] = torch.tensor([2049.0, 2051.0, 65519.9, 65520.0, 2**-25, 3 * 2**-25, 2**-24, -(2**-14) * 0.9999])
    return numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    narrow = computed(f"cvt.rn.{name}.f32 d, a", hard_floats(), result=dtype)
    assert torch.equal(narrow.view(torch.int16), hard_floats().to(dtype).view(torch.int16))
    wide = computed(f"cvt.f32.{name} d, a", narrow, result=torch.float32)
    assert torch.equal(wide, narrow.float())


def test_a_cast_of_two_numbers_puts_the_first_into_the_upper_half() -> None:
    pairs = computed("cvt.rn.bf16x2.f32 d, a, b", floats(1), floats(2), result=torch.int32)
    expected = torch.stack((floats(2), floats(1)), dim=1).bfloat16().view(torch.int32)[:, 0]
    assert torch.equal(pairs, expected)


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_a_cast_to_fp8_rounds_to_nearest_even_up_to_the_largest(kind: str, dtype: torch.dtype) -> None:
    numbers = floats(7, 5.0)
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    numbers[:12] = torch.tensor([0.0, -0.0, 0.5, 1.5, -2.5, 17.0, 19.0, 1.0, 0.25, 0.75, 7.5, 15.5]) * step
    numbers[12:18] = torch.tensor([1.0625, 1.1875, 1.125, 1.375, 1e30, -1e30])
    pairs = computed(f"cvt.rn.satfinite.{kind}x2.f32 d, a, b", floats(8), numbers, result=torch.int16)
    largest = torch.finfo(dtype).max
    expected = torch.stack([each.clamp(-largest, largest).to(dtype).view(torch.uint8) for each in (numbers, floats(8))])
    assert torch.equal(pairs.view(torch.uint8).view(-1, 2).T, expected)


def test_a_cast_towards_zero_is_not_larger() -> None:
    narrow = computed("cvt.rz.f16.f32 d, a", floats(9, 2.0), result=torch.float16).double()
    exact = floats(9, 2.0).double()
    nearest = exact.to(torch.float16).double()
    assert (narrow.abs() <= exact.abs()).all()
    assert torch.equal(narrow[nearest.abs() <= exact.abs()], nearest[nearest.abs() <= exact.abs()])
    assert ((exact - narrow).abs() < 2 * 2.0**-11 * exact.abs() + 2**-24).all()


def test_fma_rounds_once() -> None:
    a, b = floats(3), floats(4)
    # Sums that cancel, and sums whose exact value is next to the middle between two results.
    c = torch.where(torch.arange(LANES) % 2 == 0, -a * b, floats(5))
    a[:3], b[:3] = 1 + 2**-12, torch.tensor([1 + 2**-12, 1 - 2**-12, 1 + 2**-13])
    c[:3] = torch.tensor([2.0**-60, 2.0**-70, -(2.0**-80)])
    found = computed("fma.rn.f32 d, a, b, c", a, b, c, result=torch.float32)
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    assert found.tolist() == [fmaf(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert not torch.equal(found, a * b + c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_numbers_round_once(dtype: torch.dtype) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    a, b, c = (floats(seed, 2.0).to(dtype) for seed in range(3))
    added = computed(f"fma.rn.{name} d, a, b, c", a, b, c, result=dtype)
    exact = a.double() * b.double() + c.double()
    # The nearest of the numbers beside the result.
    beside = torch.stack([added.view(torch.int16) + step for step in (-1, 0, 1)]).view(dtype).double()
    assert ((beside[1] - exact).abs() <= (beside - exact).abs().amin(dim=0)).all()


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("mul.lo.s32 d, a, b", lambda a, b, c: a * b),
        ("mad.lo.s32 d, a, b, c", lambda a, b, c: a * b + c),
        ("sub.s32 d, a, b", lambda a, b, c: a - b),
        ("div.s32 d, a, b", lambda a, b, c: -1 if b == 0 else int(math.copysign(abs(a) // abs(b), a * b))),
        ("rem.s32 d, a, b", lambda a, b, c: -1 if b == 0 else int(math.copysign(abs(a) % abs(b), a))),
        ("min.s32 d, a, b", lambda a, b, c: min(a, b)),
        ("shr.s32 d, a, 40", lambda a, b, c: -1 if a < 0 else 0),
        ("shr.u32 d, a, 9", lambda a, b, c: a % 2**32 >> 9),
        ("shr.u32 d, a, 32", lambda a, b, c: 0),
        ("shl.b32 d, a, 5", lambda a, b, c: a << 5),
        ("bfe.u32 d, a, 3, 7", lambda a, b, c: (a >> 3) & 127),
        ("bfe.s32 d, a, 3, 7", lambda a, b, c: signed(a >> 3, 7)),
        ("bfe.s32 d, a, 28, 9", lambda a, b, c: a >> 28),
        ("prmt.b32 d, a, b, 0x7650", lambda a, b, c: (a & 255) | (b % 2**32 >> 8 << 8)),
        ("prmt.b32 d, a, 0, 0x888B", lambda a, b, c: (-1 if a < 0 else 0) & 255 | (-(a >> 7 & 1) << 8)),
        ("xor.b32 d, a, b", lambda a, b, c: a ^ b),
        ("not.b32 d, a", lambda a, b, c: ~a),
        ("shfl.sync.bfly.b32 d, a, 8, 31, -1", None),
    ],
)  # fmt: skip
def test_integers_are_those_of_python(instruction: str, expected: Any) -> None:
    a, b, c = (integers(seed) for seed in range(3))
    b[3:20] %= 1000
    found = computed(instruction, a, b, c, result=torch.int32).tolist()
    if expected is None:
        assert found == a[torch.arange(LANES) ^ 8].tolist()
        return
    for mine, *operands in zip(found, a.tolist(), b.tolist(), c.tolist(), strict=True):
        assert mine == signed(expected(*operands), 32), operands


def test_products_of_twice_the_width() -> None:
    a, b, c = integers(0), integers(1), integers(2, 64)
    found = computed("mad.wide.s32 d, a, b, c", a, b, c, result=torch.int64)
    assert found.tolist() == [signed(x * y + z, 64) for x, y, z in zip(*map(Tensor.tolist, (a, b, c)), strict=True)]
    found = computed("mul.wide.u32 d, a, b", a, b, result=torch.int64)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    assert found.tolist() == [signed((x % 2**32) * (y % 2**32), 64) for x, y in pairs]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("ex2.approx.f32 d, a", torch.exp2),
        ("lg2.approx.f32 d, a", torch.log2),
        ("sqrt.approx.f32 d, a", torch.sqrt),
        ("rcp.approx.f32 d, a", torch.reciprocal),
        ("rsqrt.approx.f32 d, a", torch.rsqrt),
        ("div.full.f32 d, 0f3F800000, a", torch.reciprocal),
        ("abs.f32 d, a", torch.abs),
        ("neg.f32 d, a", torch.neg),
    ],
)
def test_functions_are_those_of_fp64_rounded(instruction: str, expected: Any) -> None:
    a = floats(6, 2.0)
    found = computed(instruction, a, result=torch.float32)
    torch.testing.assert_close(found, expected(a.double()).float(), rtol=0, atol=0, equal_nan=True)


def test_subnormal_numbers_are_flushed_where_an_instruction_says_so() -> None:
    tiny = torch.full((LANES,), -(2.0**-130))
    assert computed("add.ftz.f32 d, a, 0f80000000", tiny, result=torch.float32).view(torch.int32)[0] == -(2**31)
    assert torch.equal(computed("add.f32 d, a, 0f80000000", tiny, result=torch.float32), tiny)


def test_a_maximum_prefers_numbers_to_nan() -> None:
    a = torch.where(torch.arange(LANES) % 2 == 0, torch.nan, floats(1))
    assert torch.equal(computed("max.f32 d, a, b", a, floats(2), result=torch.float32), torch.fmax(a, floats(2)))


FRAGMENTS = {
    # The PTX ISA's formulas: the row and column of number i in lane l, with g = l / 4 and t = l % 4.
    "m16n8k16": (
        lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)),
        lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    ),
    "m16n8k8": (
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
}


@pytest.mark.parametrize(("kind", "shape"), [("bf16", "m16n8k16"), ("f16", "m16n8k16"), ("tf32", "m16n8k8")])
def test_mma_is_the_product_of_matrices(kind: str, shape: str) -> None:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]
    depth, per_word = int(shape.rpartition("k")[2]), 4 // dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, generator=generator).to(dtype) for n in ((16, depth), (depth, 8)))
    added = torch.randn(16, 8, generator=generator)
    if kind == "tf32":
        # The last 13 bits count for nothing.
        left, right = (each.view(torch.int32).bitwise_and(-(2**13)).view(torch.float32) for each in (left, right))
    of_left, of_right = FRAGMENTS[shape]

    def fragment(matrix: Tensor, place: Any, n: int) -> Tensor:
        held = [[matrix[place(lane // 4, lane % 4, i)] for i in range(n)] for lane in range(LANES)]
        return torch.stack([torch.stack(each) for each in held]).view(torch.int32)

    def of_sum(g: int, t: int, i: int) -> tuple[int, int]:
        return g if i < 2 else g + 8, t * 2 + (i & 1)

    words = (
        fragment(left, of_left, 4 * per_word),
        fragment(right, of_right, 2 * per_word),
        fragment(added, of_sum, 4),
        torch.zeros(LANES, 4, dtype=torch.int32),
    )
    lines = ["mov.u32 %r0, %tid.x;"]
    registers: list[str] = []
    for place, words_of in enumerate(words):
        n = words_of.shape[1]
        lines += [f"ld.param.b64 %rd{place}, [tested_{place}];", f"mad.wide.u32 %rd{place}, %r0, {4 * n}, %rd{place};"]
        registers.append(", ".join(f"%r{10 * place + 10 + i}" for i in range(n)))
        if place < 3:
            lines.append(f"ld.global.v{n}.b32 {{{registers[-1]}}}, [%rd{place}];")
    multiply = f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32"
    lines.append(f"{multiply} {{{registers[3]}}}, {{{registers[0]}}}, {{{registers[1]}}}, {{{registers[2]}}};")
    lines.append(f"st.global.v4.b32 [%rd3], {{{registers[3]}}};")
    launch(kernel(lines, pointers=4), (1,), [("pointer", each) for each in words], 0)
    expected = (left.double() @ right.double() + added.double()).float()
    assert torch.equal(words[3], fragment(expected, of_sum, 4))


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_two_neighbours_of_four_matrices(transposed: bool) -> None:
    matrices = torch.arange(4 * 64, dtype=torch.int16).view(4, 8, 8)
    found = torch.zeros(LANES, 4, dtype=torch.int32)
    lines = [
        "mov.u32 %r0, %tid.x;", "ld.param.b64 %rd0, [tested_0];", "ld.param.b64 %rd1, [tested_1];",
        "mad.wide.u32 %rd0, %r0, 16, %rd0;", "mad.wide.u32 %rd1, %r0, 16, %rd1;",
        "mov.b32 %r1, global_smem;", "mad.lo.s32 %r1, %r0, 16, %r1;",
        "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd0];", "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};",
        "bar.warp.sync -1;",
        f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{%r6, %r7, %r8, %r9}}, [%r1];",
        "st.global.v4.b32 [%rd1], {%r6, %r7, %r8, %r9};",
    ]  # fmt: skip
    launch(kernel(lines, pointers=2), (1,), [("pointer", matrices), ("pointer", found)], 512)
    for lane in range(LANES):
        for n, matrix in enumerate(matrices.mT if transposed else matrices):
            row = matrix[lane // 4, 2 * (lane % 4) :][:2]
            assert found[lane, n] == int(row[0]) | int(row[1]) << 16
