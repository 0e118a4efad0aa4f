"""Which language a text is in: a linear classifier of character n-grams, its training, and the stage `language`.

Start with `classifier.py`, which guesses; `ngrams.py` says what it sees of a text, `training.py` how it learns.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
