"""Tuning: what turns a language model into one that follows.

Start with `method.py`, what the methods share, and `objective.py`, what is minimised. `policy_gradient.py` and
`preferences.py` are the formulas.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
