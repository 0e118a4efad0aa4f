import math
import random
import struct

import numpy as np
import pytest
import torch

from napkin.errors import NapkinError
from napkin.number_formats import FORMATS, NumberFormat, bit_fields, find_format, neighbour, round_to, value_of

CAST_BY_TORCH = ["fp64", "fp32", "fp16", "bf16", "fp8-e4m3", "fp8-e5m2"]
PATTERN_TYPE = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def torch_dtype(number_format: NumberFormat) -> torch.dtype:
    assert number_format.torch_name is not None
    return getattr(torch, number_format.torch_name)


def torch_bits(value: float, number_format: NumberFormat) -> int:
    """The pattern of torch's own cast, from fp32, as every training run casts."""
    source = torch.tensor(value, dtype=torch.float64 if number_format.name == "fp64" else torch.float32)
    return (
        int(source.to(torch_dtype(number_format)).view(PATTERN_TYPE[number_format.bits]).item()) % 2**number_format.bits
    )


def hard_values(number_format: NumberFormat) -> list[float]:
    """Random numbers over the whole range and beyond it, neighbours, the ties between them, and the edges."""
    source = random.Random(7)
    low, high = math.log2(number_format.smallest_subnormal) - 2, math.log2(number_format.largest) + 1
    low, high = max(low, -148), min(high, 127)
    values = [2 ** source.uniform(low, high) for _ in range(600)]
    for _ in range(600):
        step = 2.0 ** max(source.uniform(low, high) // 1, math.log2(number_format.smallest_normal))
        step = max(step * number_format.resolution, 2.0**-149)
        values += [step * (source.randrange(2 ** (number_format.fraction_bits + 1)) + part) for part in (0, 0.5)]
    largest, smallest = number_format.largest, number_format.smallest_subnormal
    half_step = largest * number_format.resolution / 4
    values += [
        largest,
        largest + half_step,
        largest + 0.99 * half_step,
        largest + 1.01 * half_step,
        largest * 1.5,
    ]
    values += [
        smallest,
        smallest / 2,
        smallest * 0.51,
        smallest * 0.49,
        smallest * 1.5,
        number_format.smallest_normal,
    ]
    values += [0.0, 1.0, 1 / 3, 464.0, 464.1, 480.0, 65520.0, 65519.0, 1e-8]
    with np.errstate(over="ignore", under="ignore"):
        exact = [float(np.float32(value)) for value in values]
    return [signed for value in exact for signed in (value, -value)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CAST_BY_TORCH)
def test_rounding_gives_the_bits_of_torchs_cast(name: str):
    number_format = FORMATS[name]
    for value in hard_values(number_format):
        ours, theirs = round_to(value, number_format), torch_bits(value, number_format)
        assert ours.bits == theirs, (value, ours, theirs)


@pytest.mark.parametrize("name", CAST_BY_TORCH)
def test_figures_equal_torchs_finfo(name: str):
    number_format = FORMATS[name]
    figures = torch.finfo(torch_dtype(number_format))
    assert number_format.largest == figures.max
    assert number_format.lowest == figures.min
    assert number_format.smallest_normal == figures.smallest_normal
    assert number_format.resolution == figures.eps
    assert number_format.bits == figures.bits


def test_tf32_has_the_range_of_fp32_and_the_resolution_of_fp16():
    tf32 = FORMATS["tf32"]
    assert tf32.smallest_normal == FORMATS["fp32"].smallest_normal
    assert tf32.resolution == FORMATS["fp16"].resolution
    assert tf32.bytes == 4
    assert tf32.sign_bits + tf32.exponent_bits + tf32.fraction_bits == 19


def test_tf32_rounds_to_fp32_words_whose_13_low_bits_are_zero():
    source = random.Random(11)
    for _ in range(2000):
        value = source.gauss(0, 1) * 2.0 ** source.randrange(-140, 120)
        rounded = round_to(value, "tf32")
        (word,) = struct.unpack("<I", struct.pack("<f", rounded.value))
        assert word == rounded.bits
        assert word % 2**13 == 0
        assert rounded.relative_error <= 2.0**-11 or abs(value) < FORMATS["tf32"].smallest_normal


def test_known_figures():
    assert FORMATS["fp16"].largest == 65504
    assert FORMATS["bf16"].largest == 3.3895313892515355e38
    assert FORMATS["fp8-e4m3"].largest == 448
    assert FORMATS["fp8-e5m2"].largest == 57344
    assert FORMATS["fp16"].smallest_subnormal == 2.0**-24
    assert FORMATS["fp8-e4m3"].smallest_subnormal == 2.0**-9
    assert (FORMATS["bf16"].exponent_bits, FORMATS["bf16"].fraction_bits, FORMATS["bf16"].bias) == (8, 7, 127)
    assert (FORMATS["int8"].lowest, FORMATS["int8"].largest) == (-128, 127)
    assert (FORMATS["int4"].lowest, FORMATS["int4"].largest, FORMATS["int4"].bytes) == (-8, 7, 0.5)


def test_a_hundred_millionth_is_zero_in_fp16_and_not_in_bf16():
    half, brain = round_to(1e-8, "fp16"), round_to(1e-8, "bf16")
    assert (half.value, half.underflow, half.relative_error) == (0.0, True, 1.0)
    assert brain.value == pytest.approx(1e-8, rel=2**-8)
    assert not brain.underflow


def test_overflow_is_infinity_where_there_is_one_and_saturates_in_e4m3():
    assert round_to(65520, "fp16").value == math.inf
    assert round_to(-65520, "fp16").value == -math.inf
    assert not round_to(65519.99, "fp16").overflow
    assert round_to(1e30, "fp8-e5m2").absolute_error == math.inf
    assert not round_to(math.inf, "bf16").overflow
    assert round_to(464, "fp8-e4m3").value == 448
    assert not round_to(464, "fp8-e4m3").overflow
    assert round_to(-464.1, "fp8-e4m3").value == -448
    assert round_to(-464.1, "fp8-e4m3").overflow
    assert round_to(math.inf, "fp8-e4m3").value == 448
    assert round_to(math.inf, "fp8-e4m3").relative_error == math.inf


def test_nan_stays_nan_and_is_refused_by_integers():
    assert math.isnan(round_to(math.nan, "bf16").value)
    assert round_to(math.nan, "fp16").bits == torch_bits(math.nan, FORMATS["fp16"])
    with pytest.raises(NapkinError, match=r"NaN.*exist.*int8"):
        round_to(math.nan, "int8")


@pytest.mark.parametrize(("name", "low", "high"), [("int8", -128, 127), ("int4", -8, 7)])
def test_integers_round_half_to_even_and_saturate(name: str, low: int, high: int):
    for value in np.arange(-300, 300, 0.25):
        expected = float(np.clip(np.rint(value), low, high))
        rounded = round_to(float(value), name)
        assert rounded.value == expected
        assert rounded.overflow == (np.rint(value) != expected)
        assert rounded.absolute_error == abs(expected - value)
        if name == "int8":
            assert rounded.bits == int(np.int8(expected).view(np.uint8))
    assert round_to(-math.inf, name).value == low


def test_errors_are_exact_and_within_half_a_step():
    for name in ("fp16", "bf16", "fp8-e4m3", "fp8-e5m2"):
        number_format = FORMATS[name]
        for value in hard_values(number_format):
            rounded = round_to(value, number_format)
            if rounded.overflow or math.isinf(value):
                assert abs(value) > number_format.largest
                continue
            # In fp64 the difference of an fp32 number and its neighbour in a smaller format is exact.
            assert rounded.absolute_error == abs(rounded.value - value)
            if abs(value) >= number_format.smallest_normal:
                assert rounded.relative_error <= number_format.resolution / 2
            else:
                assert rounded.absolute_error <= number_format.smallest_subnormal / 2


def test_bits_are_written_as_sign_exponent_and_fraction():
    assert bit_fields(round_to(-1.5, "bf16").bits, "bf16") == "1 01111111 1000000"
    assert bit_fields(round_to(1.0, "tf32").bits, "tf32") == "0 01111111 0000000000"
    assert bit_fields(round_to(-1, "int4").bits, "int4") == "1111"


def test_formats_are_found_by_their_usual_names():
    names = {"torch.bfloat16": "bf16", "FP8_E4M3": "fp8-e4m3", "float8_e5m2": "fp8-e5m2", "half": "fp16"}
    for name, expected in names.items():
        assert find_format(name).name == expected
    with pytest.raises(NapkinError, match=r"'bflat16'.*number.*\(did.*bf16\?\)"):
        find_format("bflat16")


FP4_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Table 5 of the Open Compute Project's specification, in the order of their patterns."""


def test_all_sixteen_patterns_of_fp4_are_the_published_numbers():
    for pattern, magnitude in enumerate(FP4_MAGNITUDES):
        assert round_to(magnitude, "fp4").bits == pattern
        assert round_to(-magnitude, "fp4").bits == 8 + pattern
        assert round_to(magnitude, "fp4").absolute_error == 0
    assert FORMATS["fp4"].largest == 6.0
    assert FORMATS["fp4"].smallest_normal == 1.0
    assert FORMATS["fp4"].smallest_subnormal == 0.5
    assert FORMATS["fp4"].bytes == 0.5


def test_fp4_rounds_to_the_nearest_published_number_and_saturates():
    for step in range(-1600, 1601):
        value = step / 200
        rounded = round_to(value, "fp4")
        nearest = min(abs(abs(value) - magnitude) for magnitude in FP4_MAGNITUDES)
        assert rounded.absolute_error == pytest.approx(nearest, abs=1e-12)
    # Ties go to the pattern whose last bit is zero.
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    assert {value: round_to(value, "fp4").value for value in ties} == ties
    assert (round_to(7.0, "fp4").value, round_to(7.0, "fp4").overflow) == (6.0, True)
    assert round_to(-math.inf, "fp4").value == -6.0
    with pytest.raises(NapkinError, match=r"NaN.*exist.*fp4"):
        round_to(math.nan, "fp4")


def test_block_formats_are_found_by_their_elements():
    assert {find_format(name).name for name in ("mxfp4", "NVFP4", "e2m1", "FP4")} == {"fp4"}


@pytest.mark.parametrize(
    "name", ["fp16", pytest.param("bf16", marks=pytest.mark.thorough), "fp8-e4m3", "fp8-e5m2", "int8"]
)
def test_value_of_every_pattern_is_torchs(name: str) -> None:
    kind = find_format(name)
    words = torch.arange(2**kind.bits, dtype=torch.int32).to(torch.int16 if kind.bits == 16 else torch.uint8)
    values = words.view(getattr(torch, str(kind.torch_name))).double().tolist()
    ours = [value_of(bits, kind) for bits in range(2**kind.bits)]
    assert all(one == other or (math.isnan(one) and math.isnan(other)) for one, other in zip(ours, values, strict=True))
    # The sign of zero is kept.
    assert [math.copysign(1, value) for value in ours if value == 0] == [
        math.copysign(1, value) for value in values if value == 0
    ]


@pytest.mark.parametrize("name", ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8-e4m3", "fp4", "int4"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.5, 3.0, 6.0, 1e-3])
def test_bits_and_value_are_inverse_and_neighbours_are_next_to_each_other(name: str, value: float) -> None:
    kind = find_format(name)
    word = round_to(value, kind).bits
    assert value_of(word, kind) == round_to(value, kind).value
    above = neighbour(word, 1, kind)
    if above is None:
        assert value_of(word, kind) == kind.largest
        return
    between = (value_of(above, kind) + value_of(word, kind)) / 2
    # Nothing is between them: a number near the middle rounds to one of the two.
    assert round_to(between, kind).value in (value_of(above, kind), value_of(word, kind))
    assert value_of(above, kind) > value_of(word, kind)
    back = neighbour(above, -1, kind)
    assert back is not None
    assert value_of(back, kind) == value_of(word, kind)


def test_neighbours_of_fp32_are_those_of_numpy() -> None:
    for value in (0.1, -2.0, 1e-45, 3.4e38):
        word = round_to(float(np.float32(value)), "fp32").bits
        above = neighbour(word, 1, "fp32")
        assert above is not None
        assert value_of(above, "fp32") == float(np.nextafter(np.float32(value), np.float32(np.inf)))


def test_patterns_that_a_format_lacks_are_refused() -> None:
    with pytest.raises(NapkinError, match="use 0 to 65535"):
        value_of(2**16, "bf16")
    assert neighbour(round_to(math.inf, "bf16").bits, 1, "bf16") is None
    assert neighbour(round_to(448, "fp8-e4m3").bits, 1, "fp8-e4m3") is None
    # The 13 lowest bits of tf32 are not part of the number.
    assert value_of(round_to(1.5, "tf32").bits + 1, "tf32") == 1.5
