"""Models of bytes by their n-grams: interpolated modified Kneser-Ney, a baseline of bits per byte."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
