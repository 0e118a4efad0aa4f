"""The compiled core of byte-pair encoding: pre-tokenization, lookup, merging, counting and training with numba."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
