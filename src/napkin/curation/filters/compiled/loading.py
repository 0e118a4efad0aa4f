"""Loading the compiled counts."""

from napkin.machine_code.loading import MachineCode

FILTERS = MachineCode(
    "napkin.curation.filters.compiled", "napkin: compiling the filters for this machine (once, about ten seconds)"
)
