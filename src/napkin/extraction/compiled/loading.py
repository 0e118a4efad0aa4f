"""Loading the compiled core of extraction."""

from napkin.machine_code.loading import MachineCode

EXTRACTION = MachineCode(
    "napkin.extraction.compiled", "napkin: compiling extraction for this machine (once, a few seconds)"
)
