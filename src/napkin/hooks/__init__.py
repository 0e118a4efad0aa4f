"""Hooks that add napkin to a program of one's own: for transformers' Trainer, for Lightning, and for any loop.

`watched_loop.py` meters, `loop_figures.py` has the figures of a loop; hooks of trainers tell when steps begin and end.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
