"""Loading the compiled kernels, and how a float is passed to them."""

import struct

from napkin.machine_code.loading import MachineCode

KERNELS = MachineCode("napkin.kernels.compiled", "napkin: compiling kernels for this machine (once, a few seconds)")


def float_bits(x: float) -> int:
    """The bits of the nearest float32: arguments are integers, see `float_argument` in number_conversions.py."""
    return struct.unpack("<i", struct.pack("<f", x))[0]
