"""The accountant: counts a step without running it, prices it, meters it, and reconciles the three witnesses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
