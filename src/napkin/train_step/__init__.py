"""One training step, from a resolved recipe to the updated weights, and its ledger.

Start with `step.py`: `TrainState` is the model and its optimizer, and `TrainState.step` is what the training loop runs
and what `count_step` traces. Activation checkpointing and compilation are a file each.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
