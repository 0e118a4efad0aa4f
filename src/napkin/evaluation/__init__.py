"""Measures of a model's predictions and answers: bits per byte, tasks, and how sure they are.

`evaluate` predicts a whole token file and compares with gzip and xz; `mean_loss` is the loss alone, on a sample, as
training asks for it. `sampled_bits` measures as much of any text as a wanted error needs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
