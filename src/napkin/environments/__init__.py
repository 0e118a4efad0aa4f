"""Environments give tasks and judge the answers to them.

Start with `environment.py`, the protocol; `registry.py` has the bundled ones by name.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
