"""The recipe: everything that a user chooses for a run, as dataclasses and as a TOML file.

Start with `recipe.py`; each table of the TOML file is a class in a file of its own (`data_config.py` ...), whose field
docstrings are the help texts of the command line. `resolved.py` is a recipe with every default written out. Nothing
here imports torch at import time.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
