"""The compiled loops of deduplication, in numba: signatures, rolling hashes, clusters."""

from typing import Any

from numpy.typing import NDArray

from napkin.machine_code.loading import MachineCode

DEDUPLICATION = MachineCode(
    "napkin.curation.deduplication.compiled", "napkin: compiling deduplication for this machine (once, a few seconds)"
)


def address_of(array: NDArray[Any]) -> int:
    """The address of a contiguous array, which the caller keeps alive."""
    return array.ctypes.data
