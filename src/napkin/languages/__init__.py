"""The language of a text: a linear classifier of character n-grams, and its training.

Start with `classifier.py`, which says what it sees of a text and guesses; `training.py` is how it learns.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
