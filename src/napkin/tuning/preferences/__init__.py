"""Preferences: models that learn which of two answers is better.

Each objective is a file: a function on tensors with its equation, and the objective around it. `registry.py` makes one
of a recipe's [preference]; `reward_model.py` learns a number for each answer instead.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
