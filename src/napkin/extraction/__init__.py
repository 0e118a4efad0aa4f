"""Text of raw pages: HTML and PDF, with what they say of themselves."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
