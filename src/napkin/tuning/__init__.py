"""Tuning: supervised, on preferences, and by reinforcement learning.

Start with `method.py`, the common part of the methods, and `sequence_step.py`, the protocol of losses and a step.
`policy_gradient.py` and `preferences.py` are the formulas.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
