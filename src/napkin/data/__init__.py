"""Corpora, memory-mapped token files, and batches that are a pure function of (seed, index)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
