"""Loading the compiled functions of the language classifier."""

from napkin.machine_code.loading import MachineCode

CORE = MachineCode(
    "napkin.languages.compiled", "napkin: compiling the language classifier for this machine (once, a few seconds)"
)
