"""The compiled core of n-gram models, in numba: counting, probabilities, and scores of texts."""

from napkin.machine_code.loading import MachineCode

CORE = MachineCode(
    "napkin.evaluation.ngrams.compiled", "napkin: compiling n-gram models for this machine (once, a few seconds)"
)
