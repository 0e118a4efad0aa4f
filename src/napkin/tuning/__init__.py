"""Alignment: what turns a language model into one that follows.

Start with `token_sequence.py`, what all of it trains on, and `objective.py`, what is minimised; `tuning_run.py` trains.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
