"""The seconds of a training step by operator: measured by torch's profiler, beside what was planned.

Start with `profiler.py`, which runs the steps. `operator_calls.py` reads torch's events, divides a step's time among
the operators that were called, and finds the row of the ledger that each call is; `step_profile.py` is the result,
which the other files draw.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
