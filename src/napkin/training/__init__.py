"""Training runs: started or resumed, trained to their end or to a signal.

Start with `run.py` for the whole, then `loop.py` for the loop and `callbacks.py` for what happens around its steps:
evaluations, metrics, checkpoints, trackers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
