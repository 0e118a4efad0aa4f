"""The compiled core of the language classifier, in numba: n-grams, the sum of their rows, and training."""

from napkin.machine_code.loading import MachineCode

CORE = MachineCode(
    "napkin.languages.compiled", "napkin: compiling the language classifier for this machine (once, a few seconds)"
)
