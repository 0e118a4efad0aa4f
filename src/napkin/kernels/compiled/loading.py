"""Loading the compiled kernels, and how a float is passed to them."""

import struct

from napkin.machine_code.loading import MachineCode

KERNELS = MachineCode("napkin.kernels.compiled", "napkin: compiling kernels for this machine (once, a few seconds)")


def float_bits(x: float) -> int:
    """The bits of the nearest float32: arguments are integers, see `float_argument` in number_conversions.py."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def load_for_training() -> None:
    """Load the kernels of a training step, all at once: what is missing is built side by side, with one message."""
    KERNELS.load("activations", "attention_rows", "loss_rows", "norm_rows", "rotations")
