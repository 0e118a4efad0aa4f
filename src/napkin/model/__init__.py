"""The Transformer: its layers, its loss, and the config that chooses them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
