"""Rewards: a number for the text of an answer, beside what is right.

Start with `reward.py`, what a reward is and what becomes of one that fails; `registry.py` has them by name.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
