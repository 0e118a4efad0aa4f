"""Number formats of GGUF: floats, and blocks of 4 to 8-bit integers with scales.

Blocks of 32 numbers (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) have one scale, and a minimum where the name ends in 1. Superblocks
of 256 (Q4_K, Q5_K, Q6_K) have eight or sixteen scales, which are integers themselves with one scale. The layouts are
those of ggml's ggml-common.h. All functions take and return one block per row:

    decode: uint8 [blocks, n_bytes] to fp32 [blocks, n_numbers]
    encode: fp32 [blocks, n_numbers] to uint8 [blocks, n_bytes]
    integers: uint8 [blocks, n_bytes] to `Integers`, which stand for exactly the same numbers
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from napkin.errors import NapkinError

Blocks = UInt8[Tensor, "blocks n_bytes"]
Numbers = Float[Tensor, "blocks n_numbers"]


class Integers(NamedTuple):
    """Numbers as integers in groups of 32, each with a scale.

    They are q · scale for int8, and (q - 8) · scale for uint8, or q · scale + minimum where there are minima.
    """

    values: UInt8[Tensor, "blocks n_numbers"] | Int8[Tensor, "blocks n_numbers"]
    scales: Float[Tensor, "blocks groups"]
    minima: Float[Tensor, "blocks groups"] | None = None


def _not_written(numbers: Numbers) -> Blocks:
    raise NapkinError("this format is read and not written: use F32, F16, BF16, Q8_0 or Q4_0")


@dataclass(frozen=True)
class BlockFormat:
    """One format: its number in files, its name, and a block's numbers and bytes."""

    number: int
    name: str
    n_numbers: int
    n_bytes: int
    decode: Callable[[Blocks], Numbers]
    encode: Callable[[Numbers], Blocks] = _not_written
    integers: Callable[[Blocks], Integers] | None = None


def _floats(dtype: torch.dtype) -> tuple[Callable[[Blocks], Numbers], Callable[[Numbers], Blocks]]:
    return (
        lambda blocks: blocks.contiguous().view(dtype).float(),
        lambda numbers: numbers.to(dtype).contiguous().view(torch.uint8),
    )


def _stored_half(blocks: Blocks, at: int) -> Float[Tensor, "blocks 1"]:
    """Return the fp16 number that begins at a byte of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _half(blocks: Blocks, at: int) -> Float[Tensor, "blocks 1"]:
    return _stored_half(blocks, at).float()


def _nibbles(bytes_: Blocks) -> UInt8[Tensor, "blocks n_numbers"]:
    """Return the lower halves of some bytes, then the upper ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=1)


def _fifth_bits(bytes_: UInt8[Tensor, "blocks 4"]) -> UInt8[Tensor, "blocks 32"]:
    """Return bit i of 32 as the number i, times 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((bytes_[:, :, None] >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16)


def _q5_1(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).float() + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Numbers:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _scales_and_minima(packed: UInt8[Tensor, "blocks 12"]) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits each; of the last four, two bits stand above the first four."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales.float(), minima.float()


def _k_blocks(blocks: Blocks, integers: UInt8[Tensor, "blocks 256"]) -> Numbers:
    """Return d · scale · q - dmin · minimum, for each 32 of a superblock."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scaled = (_half(blocks, 0) * scales)[:, :, None] * integers.float().unflatten(1, (8, 32))
    return (scaled - (_half(blocks, 2) * minima)[:, :, None]).flatten(1)


def _halves_of_64(bytes_: UInt8[Tensor, "blocks 128"]) -> UInt8[Tensor, "blocks 256"]:
    """Return the 4-bit integers of a superblock: 32 bytes hold 32 numbers below and the next 32 above."""
    groups = bytes_.unflatten(1, (4, 32))
    return torch.stack((groups & 15, groups >> 4), dim=2).flatten(1)


def _q4_k(blocks: Blocks) -> Numbers:
    return _k_blocks(blocks, _halves_of_64(blocks[:, 16:]))


def _q5_k(blocks: Blocks) -> Numbers:
    # Bit s of byte i is the fifth bit of number i of the group s.
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> shifts & 1) << 4).flatten(1)
    return _k_blocks(blocks, _halves_of_64(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Blocks) -> Numbers:
    # Each half of 128 numbers has 64 bytes with their lower four bits and 32 with their upper two.
    low, high = blocks[:, :128].unflatten(1, (2, 2, 32)), blocks[:, 128:192].unflatten(1, (2, 1, 32))
    lower = torch.cat((low & 15, low >> 4), dim=2)
    upper = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    integers = (lower | upper << 4).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _half(blocks, 208) * (scales[:, :, None] * integers.flatten(1).unflatten(1, (16, 16))).flatten(1)


def _integers_of_q4_k(blocks: Blocks) -> Integers:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    integers = _halves_of_64(blocks[:, 16:])
    return Integers(integers, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)


def _encode_q8_0(numbers: Numbers) -> Blocks:
    scale = numbers.abs().amax(dim=1, keepdim=True) / 127
    integers = _rounded(numbers * _reciprocal(scale)).to(torch.int8)
    return torch.cat((_half_bytes(scale), integers.view(torch.uint8)), dim=1)


def _encode_q4_0(numbers: Numbers) -> Blocks:
    # The number that is farthest from 0 becomes -8, the one integer without its opposite.
    farthest = numbers.gather(1, numbers.abs().argmax(dim=1, keepdim=True))
    scale = farthest / -8
    integers = (numbers * _reciprocal(scale) + 8.5).to(torch.uint8).clamp(max=15)
    return torch.cat((_half_bytes(scale), integers[:, :16] | integers[:, 16:] << 4), dim=1)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _rounded(numbers: Tensor) -> Tensor:
    """Return the nearest integers; halves are rounded away from 0, as C does."""
    return numbers.sign() * (numbers.abs() + 0.5).floor()


def _half_bytes(scale: Tensor) -> Blocks:
    return scale.half().contiguous().view(torch.uint8)


FORMATS = {
    each.number: each
    for each in (
        BlockFormat(0, "F32", 1, 4, *_floats(torch.float32)),
        BlockFormat(1, "F16", 1, 2, *_floats(torch.float16)),
        BlockFormat(30, "BF16", 1, 2, *_floats(torch.bfloat16)),
        BlockFormat(2, "Q4_0", 32, 18, _q4_0, _encode_q4_0, lambda b: Integers(_nibbles(b[:, 2:]), _stored_half(b, 0))),
        BlockFormat(
            3,
            "Q4_1",
            32,
            20,
            _q4_1,
            integers=lambda b: Integers(_nibbles(b[:, 4:]), _stored_half(b, 0), _stored_half(b, 2)),
        ),
        BlockFormat(6, "Q5_0", 32, 22, _q5_0),
        BlockFormat(7, "Q5_1", 32, 24, _q5_1),
        BlockFormat(
            8,
            "Q8_0",
            32,
            34,
            _q8_0,
            _encode_q8_0,
            lambda b: Integers(b[:, 2:].contiguous().view(torch.int8), _stored_half(b, 0)),
        ),
        BlockFormat(12, "Q4_K", 256, 144, _q4_k, integers=_integers_of_q4_k),
        BlockFormat(13, "Q5_K", 256, 176, _q5_k),
        BlockFormat(14, "Q6_K", 256, 210, _q6_k),
    )
}


def format_named(name: str) -> BlockFormat:
    """Return the format of a name. Raises KeyError for one that is not known."""
    return {each.name: each for each in FORMATS.values()}[name]
