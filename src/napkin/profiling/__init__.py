"""Where the seconds of a training step go: measured by torch's profiler, beside what was planned.

Start with `profiler.py`, which runs the steps. `profiler_events.py` reads torch's events, `operator_calls.py` divides a
step's time among the operators that were called, `matching.py` finds the row of the ledger that each call is, and
`step_profile.py` is the result; the other files draw it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
