"""Reading and writing the BPE vocabularies of other libraries, with the same ids for the same text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
