"""The compiled core of extraction, in numba: a page as tables of its elements and blocks, and the choice among them."""

from napkin.machine_code.loading import MachineCode

EXTRACTION = MachineCode(
    "napkin.extraction.compiled", "napkin: compiling extraction for this machine (once, a few seconds)"
)
