"""Tasks: questions in files, put to a model, with scores and their errors.

A model is any object with the methods of `TaskModel`; `napkin.inference.LoadedModel` makes one of a run or a Hugging
Face folder.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
