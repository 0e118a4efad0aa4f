"""What computes: the catalogue of accelerators, this machine, and how fast this machine was measured to be."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
