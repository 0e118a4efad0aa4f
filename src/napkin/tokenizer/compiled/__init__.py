"""The compiled core of byte-pair encoding: scanning, looking up, merging, counting and learning at full speed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
