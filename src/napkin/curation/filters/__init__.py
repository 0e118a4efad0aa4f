"""Filters of documents: published rules of quality, lists of words and hosts, personal data, a trained classifier.

Start with `text_counts.py`, the counts that rules of Gopher, C4 and FineWeb are made of; `compiled/` has the same
counts as machine code.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
