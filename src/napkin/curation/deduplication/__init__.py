"""Documents, lines and passages that stand in a corpus more than once are found and removed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
