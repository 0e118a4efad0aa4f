"""The compiled core of byte-pair encoding, in numba: pre-tokenization, encoding, counting and learning merges."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
