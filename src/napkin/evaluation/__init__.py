"""How well a model predicts a text: loss, perplexity and bits per byte.

`evaluate` predicts a whole token file and compares with gzip and xz; `mean_loss` is the loss alone, on a sample, as
training asks for it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
