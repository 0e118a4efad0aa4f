"""Scaling: sweeps of runs, and scaling laws: what loss a model of some size reaches after some tokens.

Start with `law_fit.py`, which fits the laws of `law_forms.py` to the runs that `observations.py` reads; `fitted_law.py`
predicts with them. Sweeps begin in `sweep.py`; `trials.py` reads their values and makes their runs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
