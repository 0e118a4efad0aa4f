"""The counts of `text_counts.py` and the lines of C4 as machine code, by numba: one pass over UTF-8 bytes."""

from napkin.machine_code.loading import MachineCode

FILTERS = MachineCode(
    "napkin.curation.filters.compiled", "napkin: compiling the filters for this machine (once, about ten seconds)"
)
